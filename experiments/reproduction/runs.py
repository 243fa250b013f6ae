"""The runs of the cells: started with torchrun, resumed, or skipped if finished."""

import signal
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.core.override_parser.types import Quote, QuotedString
from omegaconf import OmegaConf
from reproduction.cells import compose

from metadist.errors import SIGNAL_STATUSES, UserError
from metadist.launchers import RunSpec
from metadist.launchers.torchrun import TorchrunLauncher
from metadist.reports import (
    FAILURE_FILE,
    config_fingerprint,
    is_runtime_key,
    pop_worker_error,
    write_failure,
)
from metadist.reports.run_record import RunRecord
from metadist.training.signals import preserved_handlers

_PRESET_KEYS = ("experiment", "seed", "trainer.iterations", "trainer.checkpoint_every")
_EXECUTION_KEYS = ("dataset.root", "strategy", "partition", "device", "threads")
_VALIDATION_KEYS = ("trainer.eval_every", "trainer.validation_tasks")


@dataclass(frozen=True)
class PresetRun:
    """A run of a preset.

    Attributes:
        preset: the preset's name in conf/experiment.
        dataset: the name of the preset's dataset.
        seed: the run's seed.
        iterations: the number of training iterations.
        options: further overrides.
        directory: the run's directory.
    """

    preset: str
    dataset: str
    seed: int
    iterations: int
    options: tuple[str, ...]
    directory: Path

    @property
    def title(self) -> str:
        """The title of the run in messages."""
        return f"{self.preset}, seed {self.seed}, {self.iterations} iterations"

    def overrides(self, workers: int = 1, root: str | None = None) -> tuple[str, ...]:
        """The overrides of the run.

        Args:
            workers: the number of processes.
            root: the directory of the dataset; None for the preset's directory.
        """
        return (
            f"+experiment={self.preset}",
            f"seed={self.seed}",
            f"trainer.iterations={self.iterations}",
            "resume=auto",
            *([] if workers > 1 else ["strategy=local"]),
            *([] if root is None else [f"dataset.root={_quote(root)}"]),
            *self.options,
        )

    def is_finished(self) -> bool:
        """Whether the run has results.

        Raises:
            UserError: the directory has a run with other options, or of an older version of the
                preset, or a file in it cannot be read.
        """
        if not self.directory.is_dir():
            return False
        record = RunRecord(self.directory)
        saved, options = relevant_options(record.overrides), relevant_options(self.options)
        if record.overrides and saved != options:
            raise UserError(
                f"{self.directory} was started with the options {' '.join(saved) or '(none)'}, not "
                f"{' '.join(options) or '(none)'}: choose another --directory."
            )
        if record.results is None:
            return False
        for key, (old, new) in configuration_differences(self.directory, self.overrides()).items():
            raise UserError(
                f"{self.directory} holds a run of another {self.preset}, with {key}={old}"
                f" where it now has {new}: choose another --directory."
            )
        return True


class Runner:
    """Runs presets with torchrun, several at a time.

    SIGINT and SIGTERM stop all runs, which save a checkpoint.

    Args:
        workers: the number of processes of each run.
        jobs: the number of concurrent runs.
        roots: the directories of datasets by name. Default: the preset's directory.
        log: a function that receives messages for the user.

    Attributes:
        stopped: the number of the signal that stopped the runs; 0 if none.
        failed: the runs that failed, or whose directory cannot be used.
    """

    def __init__(
        self, workers: int, jobs: int, roots: Mapping[str, str], log: Callable[[str], None]
    ) -> None:
        self.workers, self.jobs, self.roots, self.log = workers, jobs, roots, log
        self.stopped = 0
        self.failed: list[PresetRun] = []
        self._launcher = TorchrunLauncher(nproc_per_node=workers, oversubscribe=True)

    def run(self, runs: Sequence[PresetRun]) -> None:
        """Run the runs that are not finished. Failures are recorded in the runs' directories.

        Raises:
            UserError: see `PresetRun.is_finished`.
        """
        waiting = [run for run in runs if not run.is_finished()]
        for run in runs:
            if run not in waiting:
                self.log(f"{run.title}: already finished")
        specs = [self._spec(run) for run in waiting]  # Hydra composes in the main thread only
        with preserved_handlers(), ThreadPoolExecutor(self.jobs) as pool:
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, self._stop)
            list(pool.map(self._run_one, waiting, specs))

    def _spec(self, run: PresetRun) -> RunSpec:
        overrides = run.overrides(self.workers, self.roots.get(run.dataset))
        return RunSpec(
            name="maml",
            directory=run.directory.resolve(),
            configuration=compose(overrides),
            overrides=overrides,
            in_sweep=True,
            concurrent=True,
        )

    def _run_one(self, run: PresetRun, spec: RunSpec) -> None:
        if self.stopped:
            return
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
            (run.directory / FAILURE_FILE).unlink(missing_ok=True)
            self.log(f"{run.title}: started in {run.directory}")
            status = self._launcher.run(spec)
        except OSError as error:
            self.failed.append(run)
            self.log(f"{run.title}: FAILED: {run.directory} cannot be used ({error.strerror})")
            return
        message = pop_worker_error(run.directory) or f"ended with status {status}"
        if status == 0:
            self.log(f"{run.title}: finished")
        elif self.stopped or status in SIGNAL_STATUSES:
            self.log(f"{run.title}: stopped; the same command resumes it")
        else:
            self.failed.append(run)
            write_failure(run.directory, spec.overrides, message, status)
            self.log(f"{run.title}: FAILED with status {status}: {message}")

    def _stop(self, number: int, frame: FrameType | None) -> None:
        first, self.stopped = not self.stopped, number
        if first:  # a second signal would interrupt the saving of checkpoints
            self._launcher.stop(number)


def relevant_options(overrides: Sequence[str]) -> tuple[str, ...]:
    """The overrides by which a run differs from its preset, sorted.

    Overrides that are left out: the preset, its seed and length; the location of data, how
    processes are started and what is logged; and validation, unless it selects the tested
    checkpoint.
    """
    ignored = [*_PRESET_KEYS, *_EXECUTION_KEYS]
    if "trainer.test_checkpoint=best" not in overrides:
        ignored += _VALIDATION_KEYS

    def is_relevant(key: str) -> bool:
        return not (is_runtime_key(key) or key in ignored or key.split(".")[0] in _EXECUTION_KEYS)

    return tuple(sorted(override for override in overrides if is_relevant(key_of(override))))


def key_of(override: str) -> str:
    """The key of an override, such as `experiment` of `+experiment=maml_sinusoid`."""
    return override.lstrip("+").partition("=")[0]


def configuration_differences(
    directory: Path, overrides: Sequence[str]
) -> dict[str, tuple[str, str]]:
    """The keys in which a run's fingerprint differs from a configuration, without the seed.

    A key that only one of them has is an option that was added or removed later; it is ignored.

    Args:
        directory: the run's directory.
        overrides: the overrides of the configuration.

    Returns:
        key -> (value of the run, value of the configuration).
    """
    old = fingerprint(RunRecord(directory).config)
    composed: Any = OmegaConf.to_container(compose(overrides))
    new = fingerprint(composed) if old else {}
    return {key: (old[key], new[key]) for key in sorted(old.keys() & new) if old[key] != new[key]}


def fingerprint(configuration: Mapping[str, Any]) -> dict[str, str]:
    """The values of a configuration that determine a run's results, without the seed."""
    values = config_fingerprint(configuration)
    return {key: value for key, value in values.items() if key != "seed"}


def _quote(path: str) -> str:
    """A path as the value of a Hydra override."""
    return QuotedString(path, Quote.single).with_quotes()
