"""The interface of the `launcher` group: a launcher starts the processes of a job."""

import os
from abc import ABC, abstractmethod

from omegaconf import DictConfig

from metadist.config import instantiate
from metadist.distributed import get_world_size
from metadist.errors import UserError
from metadist.launchers.run_spec import RunSpec


class Launcher(ABC):
    """Starts the worker processes of a job and waits until they have ended.

    The launching process is not a rank of the job. A sweep may call `run` in several threads at
    the same time, so it must not use Hydra's global state.
    """

    @abstractmethod
    def check(self, configuration: DictConfig) -> None:
        """Check the options before anything is started.

        Args:
            configuration: the composed configuration of the run.

        Raises:
            UserError: a package is not installed (the message has the pip command), there are more
                workers than the machine or cluster can run, or options contradict each other.
        """

    def max_concurrent_jobs(self, configuration: DictConfig) -> int:
        """The number of jobs of a sweep that may run at the same time. Default: 1."""
        return 1

    @abstractmethod
    def run(self, spec: RunSpec) -> int:
        """Start workers that run the job, wait for them, and leave no process behind.

        The workers report their errors and write to the standard streams of this process; those of
        a concurrent job write to `CONSOLE_FILE`.

        Returns:
            The job's exit status: 0, 2 after a user error, 130 or 143 after a signal, else 1.
        """

    @abstractmethod
    def stop(self, number: int) -> None:
        """Pass a signal to every running job, so that `run` returns.

        Called in the main thread; it does not wait.
        """


class NoLauncher:
    """`launcher=none`: this process is a worker itself, started by torchrun or on its own."""


def create_launcher(configuration: DictConfig) -> Launcher | None:
    """The configured launcher, checked; None if this process runs the job itself. Any rank.

    Raises:
        UserError: `Launcher.check` failed, or this process was started by a launcher itself.
    """
    node = configuration.get("launcher")
    launcher = NoLauncher() if node is None else instantiate(node, "launcher")
    if isinstance(launcher, NoLauncher):
        return None
    if not isinstance(launcher, Launcher):
        raise UserError(
            f"launcher._target_={node.get('_target_')} is not a Launcher: choose one of the "
            "options of launcher, as in launcher=torchrun."
        )
    if "RANK" in os.environ:
        raise UserError(
            f"already running under torchrun or the like: this process is one of "
            f"{get_world_size()} workers, and launcher=… would start more; drop launcher=… from "
            "the command line, or start the script with python instead of torchrun."
        )
    launcher.check(configuration)
    return launcher
