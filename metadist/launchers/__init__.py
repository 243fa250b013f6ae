"""Runs a job, and starts the processes that run it."""

from metadist.launchers.job import RunSpec, run_job
from metadist.launchers.launcher import Launcher, NoLauncher

__all__ = ["Launcher", "NoLauncher", "RunSpec", "run_job"]
