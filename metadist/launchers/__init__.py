"""Where processes come from, and the way in for the experiments."""

from metadist.launchers.entry import experiment
from metadist.launchers.launcher import Launcher, NoLauncher, PlannedRun
from metadist.launchers.sweeps import NoteSweep
from metadist.launchers.torchrun import TorchrunLauncher

__all__ = ["Launcher", "NoLauncher", "NoteSweep", "PlannedRun", "TorchrunLauncher", "experiment"]
