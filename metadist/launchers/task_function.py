"""What Hydra calls for each run: carry it out in this world, or start one for it."""

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from metadist.distributed import get_rank
from metadist.errors import UserError
from metadist.launchers.carry_out import Failed
from metadist.launchers.launcher import Launcher, PlannedRun, launcher_of
from metadist.launchers.planning import plan
from metadist.launchers.records import finished_results
from metadist.launchers.resolvers import register_resolvers
from metadist.launchers.set_up import Build
from metadist.launchers.side_by_side import Ended, Pending, SideBySide
from metadist.launchers.speaking import WorldEnded
from metadist.launchers.sweeps import (
    current_sweep,
    failed_job,
    figure_for_sweeper,
    on_failure_of,
    run_here,
)
from metadist.reports import WORKER_ERROR_FILE, read_results


class TaskFunction:
    """Hydra's task function of an experiment.

    Launchers of Hydra's send it to other processes, where it makes `conf/`'s resolvers known.

    Args:
        script: the experiment's script.
        build: (configuration, run directory, name) -> the experiment.
    """

    def __init__(self, script: Path, build: Build) -> None:
        register_resolvers()
        self.script = script
        self.build = build

    def __reduce__(self) -> tuple[Callable[..., "TaskFunction"], tuple[Path, Build]]:
        return TaskFunction, (self.script, self.build)

    def __call__(self, configuration: DictConfig) -> float | Pending | None:
        """Carry out the run that Hydra has composed.

        Returns:
            The figure that a sweeper optimises; None without validation and of a job that failed
            in a sweep that goes on. For a job of a sweep whose world goes on, its figure to come.

        Raises:
            Failed: it went wrong.
        """
        planned = plan(self.script, self.build, configuration)
        try:
            try:
                on_failure_of(configuration)
                launcher = launcher_of(configuration)
            except Exception as error:
                return failed_job(planned, Failed(error, in_job=False))
            if launcher is None:
                return run_here(planned)
            return _in_a_world(launcher, planned)
        except Failed:
            if get_rank() == 0 and not planned.in_sweep:
                with contextlib.suppress(OSError):
                    planned.directory.rmdir()  # of a run that was refused nothing is left
            raise


def _in_a_world(launcher: Launcher, planned: PlannedRun) -> float | Pending | None:
    """Start a world for a run; its figure, or, in a sweep, its figure to come.

    Raises:
        Failed: it went wrong.
    """
    try:
        known = finished_results(planned) if planned.in_sweep else None
        if known is not None:
            return figure_for_sweeper(known)
    except Exception as error:
        return failed_job(planned, Failed(error, in_job=False))
    at_once = launcher.jobs_at_once(planned.configuration)
    planned = replace(planned, quiet=planned.in_sweep and at_once > 1)
    sweep = current_sweep()
    worlds = SideBySide() if sweep is None else sweep.worlds
    (planned.directory / WORKER_ERROR_FILE).unlink(missing_ok=True)  # of an earlier attempt
    pending = worlds.start(launcher, planned, at_once, lambda ended: _end(planned, ended))
    if sweep is None or not _waits_for_batches():
        return pending.settle()
    return pending


def _waits_for_batches() -> bool:
    """Whether Hydra's sweeper and launcher in this process are known to start several jobs before
    they look at what one returned.
    """
    hydra = HydraConfig.get()
    names = {
        str(node.get("_target_")).rpartition(".")[2] for node in (hydra.sweeper, hydra.launcher)
    }
    return names <= {"BasicLauncher", "BasicSweeper", "OptunaSweeper"}


def _end(planned: PlannedRun, ended: Ended) -> float | None:
    """A run's figure, after its world has ended.

    Raises:
        Failed: it did not end well, or could not be started.
    """
    if ended != 0:
        error = ended if isinstance(ended, Exception) else WorldEnded(ended)
        return failed_job(planned, Failed(error, in_job=False))
    try:
        results = read_results(planned.directory)
        if results is None:
            raise UserError(
                f"the run ended well but left no results in {planned.directory}: put "
                "hydra.run.dir or hydra.sweep.dir on a file system that all nodes share."
            )
        figure = figure_for_sweeper(results)
    except UserError as error:
        return failed_job(planned, Failed(error, in_job=False))
    if planned.in_sweep:
        print(f"job {planned.number} finished: {_brief(results)}", flush=True)
    return figure


def _brief(results: dict[str, Any]) -> str:
    figures = {
        name.replace("_", " "): results[name]
        for name in ("validation_accuracy", "validation_mse", "test_accuracy", "test_mse")
        if isinstance(results.get(name), int | float)
    }
    return ", ".join(f"{name} {value:.4g}" for name, value in figures.items())
