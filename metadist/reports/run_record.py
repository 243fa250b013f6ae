"""Everything that a finished or unfinished run has recorded in its directory."""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from metadist.errors import UserError
from metadist.files import read_regular
from metadist.loggers import METRICS_FILE, read_metrics
from metadist.metrics import score, task_metric
from metadist.reports.file_schema import ExampleTasks
from metadist.reports.run_directory import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    ERROR_FILE,
    RESULTS_FILE,
    TEST_TASKS_DATA_FILE,
    choices_of,
    directory_override,
    read_config,
    read_failure,
    read_hydra,
    read_json,
    read_overrides,
    read_results,
    read_test_predictions,
)

Status = Literal["finished", "failed", "stopped", "running", "ended without results"]

_RUNNING_SECONDS = 300.0
"""If the newest metrics of a run without results are older, it was probably killed."""

_SUBCOMMANDS = ("maml", "ddp")
"""The subcommands of `metadist` that run the configuration of the same name."""

_STOPPED = "stopped "
"""The beginning of the error message of a run that a signal stopped."""


@dataclass(frozen=True)
class RunRecord:
    """The record of a run.

    Attributes:
        directory: the run directory.
        config: the composed configuration, with interpolations unresolved.
        hydra: the configuration node `hydra`; {} without one.
        overrides: the overrides on the command line.
        metrics: the lines of `metrics.jsonl`.
        results: the content of `results.json`; None if the run has not finished.
        error: see `read_error`.
        environment: the versions, commit, device and workers.
        predictions: the lines of `test_predictions.jsonl`; empty without the file.
        test_tasks: the data of the "hardest" and of some "typical" test tasks; {} if not saved.
        written: the time when the newest metrics were written, in seconds since 1970; None without
            metrics.
        started: the time when the newest attempt saved its configuration; None without one.
    """

    directory: Path
    config: Mapping[str, Any]
    hydra: Mapping[str, Any]
    overrides: Sequence[str]
    metrics: Sequence[Mapping[str, Any]]
    results: Mapping[str, Any] | None
    error: str
    environment: Mapping[str, Any]
    predictions: Sequence[Mapping[str, Any]]
    test_tasks: Mapping[str, Sequence[Mapping[str, Any]]]
    written: float | None
    started: float | None

    def status(self, now: float) -> Status:
        """The status of the run.

        Args:
            now: the current time, in seconds since 1970.
        """
        if self.results is not None:
            return "finished"
        if self.error:
            return error_status(self.error)
        last = self.started if self.written is None else self.written
        recent = last is not None and now - last < _RUNNING_SECONDS
        return "running" if recent else "ended without results"

    @cached_property
    def metric(self) -> str:
        """The metric of validation and test: "accuracy", or "mse" for regression."""
        of_regression = {"test_mse", "validation_mse", "train_mse"}
        lines = (self.results or {}, *self.metrics)
        return task_metric(any(not of_regression.isdisjoint(line) for line in lines))

    @cached_property
    def title(self) -> str:
        """A title in one line, such as `maml on omniglot, 5-way 1-shot`."""
        protocol = (self.results or {}).get("protocol", {})
        task = {**_mapping(self.config.get("task")), **protocol}
        algorithm = (self.results or {}).get("method", {}).get("algorithm")
        algorithm = algorithm or self._choice("algorithm")
        dataset = protocol.get("dataset") or self._choice("dataset")
        ways = "" if self.metric == "mse" else f"{task.get('ways', '?')}-way "
        return f"{algorithm} on {dataset}, {ways}{task.get('shots', '?')}-shot"

    @cached_property
    def preset(self) -> str:
        """The name of the run's preset in `conf/experiment`; "" without one."""
        for override in self.overrides:
            key, _, value = override.lstrip("+").partition("=")
            if key == "experiment":
                return value
        return ""

    @property
    def iterations(self) -> tuple[int, int | None]:
        """The finished training iterations, and the planned ones; None if these are unknown."""
        finished = int((self.results or {}).get("iterations", 0))  # metrics.jsonl may be missing
        logged = (int(record["iteration"]) for record in self.metrics if "train_loss" in record)
        done = max([finished, *logged])
        planned = _mapping(self.config.get("trainer")).get("iterations")
        return done, planned if isinstance(planned, int) else None

    def commands(self) -> dict[str, str]:
        """Commands that repeat the run, resume it and replay tasks.

        The first two are omitted for a run of the user's own program, which is not recorded.
        """
        name = _mapping(self.hydra.get("job")).get("config_name") or "maml"
        workers = _count(self.environment.get("world_size"), 1)
        launcher = choices_of(self.hydra).get("launcher", "none")
        program = ["metadist"]
        if workers > 1 and launcher == "none":
            program = ["torchrun", "--standalone", f"--nproc_per_node={workers}", "-m", "metadist"]
        again = shlex.join([*program, str(name), *self._search_path(), *self.overrides])
        resume = f"{directory_override('hydra.run.dir', self.directory)} resume=auto"
        repeat = {"Repeat the run": again, "Resume or continue it": f"{again} {resume}"}
        run, task = str(self.directory), next(iter(self.hardest(1)), 0)
        seed, iteration = self.config.get("seed", 0), max(self.iterations[0], 1)
        # Without --trust-code, since the run may be of someone else. The report names the option.
        replay = ["metadist", "replay", run, "--key"]
        training_task = shlex.join([*replay, f"{seed},train,{iteration},0"])
        commands = {
            **(repeat if name in _SUBCOMMANDS else {}),
            "Replay a test task": shlex.join([*replay, f"{self.eval_seed},test,0,{task}"]),
            **({} if self.iterations[1] == 0 else {"Replay a training task": training_task}),
            "Make this report again": shlex.join(["metadist", "report", run]),
        }
        # A control character in a pasted command could end it and begin another.
        return {title: text for title, text in commands.items() if text.isprintable()}

    def _search_path(self) -> list[str]:
        """The arguments that added directories to Hydra's search path."""
        sources = _mapping(self.hydra.get("runtime")).get("config_sources") or ()
        overrides = _mapping(self.hydra.get("overrides")).get("hydra") or ()
        return [
            argument
            for source in sources
            if source.get("provider") == "command-line"  # --config-dir
            for argument in ("--config-dir", str(source.get("path")))
        ] + [arg for arg in overrides if arg.lstrip("+").startswith("hydra.searchpath=")]

    @property
    def eval_seed(self) -> int:
        """The seed of the test tasks' keys."""
        protocol = (self.results or {}).get("protocol", {})
        trainer = _mapping(self.config.get("trainer"))
        return _count(protocol.get("eval_seed", trainer.get("eval_seed")), 0)

    def task_values(self) -> list[float]:
        """The metric of each test task."""
        return [float(task[self.metric]) for task in self.predictions if self.metric in task]

    def hardest(self, count: int) -> list[int]:
        """The indices of the test tasks with the worst metric, the worst first."""
        return tasks_by_difficulty(self.predictions, self.metric)[:count]

    def seconds(self) -> dict[str, float]:
        """The wall time of each part of the run, in seconds; {} if it is unknown."""
        logged = (float(record["seconds"]) for record in self.metrics if "seconds" in record)
        training = max(logged, default=0.0)
        results = self.results or {}
        if "wall_seconds" not in results:
            return {"training": training} if training else {}
        test = float(results.get("evaluation_seconds", 0.0))
        remainder = max(0.0, float(results["wall_seconds"]) - training - test)
        parts = {"training": training, "test": test, "validation and checkpoints": remainder}
        return {name: value for name, value in parts.items() if value}

    def _choice(self, group: str) -> str:
        target = str(_mapping(self.config.get(group)).get("_target_", group))
        return choices_of(self.hydra).get(group) or target.rpartition(".")[2]


def tasks_by_difficulty(predictions: Sequence[Mapping[str, Any]], metric: str) -> list[int]:
    """The indices of test tasks, sorted by metric, the worst first, and then by loss.

    Args:
        predictions: the lines of `test_predictions.jsonl`.
        metric: "accuracy" or "mse".
    """

    def rank(task: Mapping[str, Any]) -> tuple[float, float]:
        value = score(float(task[metric]), metric)
        loss = score(float(task.get("loss", 0.0)), "loss")
        return (-math.inf if math.isnan(value) else value, -math.inf if math.isnan(loss) else loss)

    with_metric = (task for task in predictions if metric in task)
    return [int(task["task"]) for task in sorted(with_metric, key=rank)]


def is_run(directory: Path) -> bool:
    """Whether a directory is a run directory."""
    return any((directory / name).is_file() for name in (RESULTS_FILE, METRICS_FILE, CONFIG_FILE))


def read_run_record(directory: Path) -> RunRecord:
    """Read the record of a run that has finished, is in progress or has crashed.

    Raises:
        UserError: the directory is no run directory, or a file cannot be read.
    """
    if not is_run(directory):
        raise UserError(
            f"{directory} holds no run (no {RESULTS_FILE}, {METRICS_FILE} or {CONFIG_FILE}): give "
            "a run directory."
        )
    path = directory / METRICS_FILE
    failure, results = read_failure(directory), read_results(directory)
    return RunRecord(
        directory=directory,
        config=read_config(directory),
        hydra=read_hydra(directory),
        overrides=read_overrides(directory) or list((failure or {}).get("overrides", ())),
        metrics=read_metrics(path) if path.exists() else [],
        results=results,
        error=read_error(directory),
        environment=_read_environment(directory, results),
        predictions=read_test_predictions(directory) or [],
        test_tasks=read_json(directory / TEST_TASKS_DATA_FILE, ExampleTasks, directory) or {},
        written=_time_of(path),
        started=_time_of(directory / CONFIG_FILE),
    )


def read_error(directory: Path) -> str:
    """The message and traceback of the error that ended a run; "" without one.

    A finished run may have one too, of what follows its results, such as closing a logger.

    Raises:
        UserError: `failure.json` cannot be read.
    """
    try:
        text = read_regular(directory / ERROR_FILE, "replace", within=directory).strip()
    except OSError:
        text = ""
    if text or (directory / RESULTS_FILE).exists():
        return text
    failure = read_failure(directory)
    return "" if failure is None else str(failure.get("error") or "failed")


def error_status(error: str) -> Literal["failed", "stopped"]:
    """The status of a run that ended with an error.

    Args:
        error: the result of `read_error`, not empty.
    """
    return "stopped" if error.startswith(_STOPPED) else "failed"


def format_time(seconds: float) -> str:
    """Format a time, given in seconds since 1970, as local time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _time_of(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _read_environment(directory: Path, results: Mapping[str, Any] | None) -> dict[str, Any]:
    environment = read_json(directory / ENVIRONMENT_FILE, within=directory) or {}
    recorded = results or {}
    workers = {name: recorded[name] for name in ("world_size", "strategy") if name in recorded}
    return {**environment, **_mapping(recorded.get("environment")), **workers}


def _count(value: Any, default: int) -> int:
    """A number of a file that may be damaged."""
    return value if type(value) is int else default


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
