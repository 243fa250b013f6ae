"""Who starts the processes of a run when nobody has yet: the interface of the `launcher` group."""

import os
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

from omegaconf import DictConfig

from metadist.config import build
from metadist.distributed import get_world_size
from metadist.errors import UserError
from metadist.launchers.set_up import Build

_GROUP = "launcher"


@dataclass(frozen=True)
class PlannedRun:
    """One run, composed but not begun: what the process that starts a world knows of it.

    It can be pickled, and a process that has it can carry it out without Hydra.

    Attributes:
        script: the experiment's script.
        name: the experiment's name, that of its configuration's file.
        directory: the run's directory, absolute.
        configuration: as composed, without Hydra's part and with `launcher=none`.
        overrides: the words that compose this configuration once more, as typed (those of one
            job, in a sweep); no launcher's and none of Hydra's own are among them.
        hydra_words: Hydra's own words and options that composing needs, such as
            `hydra.searchpath=…` or `--config-dir=…`.
        build: (configuration, run directory, name) -> the experiment.
        in_sweep: whether it is one of a sweep's jobs: finished before, it is not run again.
        number: the job's number in its sweep, from 0.
        quiet: other runs go on beside it, so what its workers write belongs in a file.
    """

    script: Path
    name: str
    directory: Path
    configuration: DictConfig
    overrides: tuple[str, ...]
    hydra_words: tuple[str, ...]
    build: Build
    in_sweep: bool = False
    number: int = 0
    quiet: bool = False

    def words(self) -> list[str]:
        """What a worker's command line has after the script: the same run, in a world."""
        return [
            *self.hydra_words,
            *self.overrides,
            *(["resume=auto"] if self.configuration.get("resume") == "auto" else []),
            f"{_GROUP}=none",
            "hydra.mode=RUN",
            f"hydra.run.dir={quoted(self.directory)}",
        ]


def quoted(path: Path | str) -> str:
    """A path as an override's value that Hydra takes as it is, with its spaces and commas."""
    # A backslash counts as itself, but before a quote.
    doubled = re.sub(r"\\+(?='|\Z)", lambda run: 2 * run[0], str(path))
    escaped = doubled.replace("'", "\\'")
    return f"'{escaped}'"


class Launcher(ABC):
    """Starts a world of processes for a run and waits for its end.

    The process that calls it, the parent, is in no world itself and does no work. A sweep may
    call `run` in several threads at a time, so it must not touch Hydra's global state.
    """

    @abstractmethod
    def check(self, configuration: DictConfig) -> None:
        """Refuse what cannot work, before anything is started.

        Args:
            configuration: of the run, as composed.

        Raises:
            UserError: a package that is not installed (with the pip command), more workers than
                the machine or cluster has, options that do not go together.
        """

    def jobs_at_once(self, configuration: DictConfig) -> int:
        """How many runs of a sweep may go on at a time; one, unless a launcher knows better."""
        return 1

    @abstractmethod
    def run(self, planned: PlannedRun) -> int:
        """Start a world whose workers carry out the run, wait for its end, leave no process.

        The workers say what ends them; what they write goes where the parent's goes.

        Returns:
            The exit status of the run: 0, 2 for an error that the user can mend, 130 or 143
            after a signal, 1 for anything else.
        """

    @abstractmethod
    def stop(self, number: int) -> None:
        """Pass a signal that the parent got on to every running world; `run` then returns.

        It is called from the main thread and does not wait.
        """


class NoLauncher:
    """`launcher=none`: the processes are there, started by torchrun, or there is this one."""


def launcher_of(configuration: DictConfig) -> Launcher | None:
    """The configured launcher, checked; None where this process is to do the work itself.

    Any process; in a world every rank refuses alike.

    Raises:
        UserError: what `Launcher.check` says, or a launcher in a world that has one already.
    """
    node = configuration.get(_GROUP)
    launcher = NoLauncher() if node is None else build(node, _GROUP)
    if isinstance(launcher, NoLauncher):
        return None
    if not isinstance(launcher, Launcher):
        raise UserError(
            f"{_GROUP}._target_={node.get('_target_')} is no launcher: choose one of the options "
            f"of {_GROUP}, as in {_GROUP}=torchrun."
        )
    if "RANK" in os.environ:
        raise UserError(
            f"a world inside a world: this process is already one of {get_world_size()} that "
            f"torchrun or the like started, and {_GROUP}=… would start more; drop {_GROUP}=… from "
            "the command line, or start the script with python instead of torchrun."
        )
    launcher.check(configuration)
    return launcher
