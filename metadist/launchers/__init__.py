"""Runs a job, and starts the processes that run it."""

from metadist.launchers.job import run_job
from metadist.launchers.launcher import Launcher, NoLauncher
from metadist.launchers.run_spec import RunSpec

__all__ = ["Launcher", "NoLauncher", "RunSpec", "run_job"]
