"""Everything that a finished or unfinished run has recorded in its directory."""

import contextlib
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from metadist.errors import UserError
from metadist.files import read_regular
from metadist.loggers import METRICS_FILE, flatten_values, read_metrics
from metadist.metrics import score, task_metric
from metadist.reports.file_schema import ExampleTasks
from metadist.reports.run_directory import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    ERROR_FILE,
    RESULTS_FILE,
    TEST_TASKS_DATA_FILE,
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

_DEFAULT = "(default)"
"""The value of a key that neither the overrides nor the configuration have."""


@dataclass(frozen=True)
class RunRecord:
    """The record of a run that has finished, is in progress or has failed.

    A file is read when it is first used. If it cannot be read, a `UserError` is raised then.

    Attributes:
        directory: the run directory.
        name: a name that tells the run from others.
    """

    directory: Path
    name: str = ""

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The composed configuration, with interpolations unresolved; {} without one."""
        return read_config(self.directory)

    @cached_property
    def hydra(self) -> Mapping[str, Any]:
        """The configuration node `hydra`; {} without one."""
        return read_hydra(self.directory)

    @cached_property
    def choices(self) -> Mapping[str, str]:
        """The choice in each configuration group, also in groups that no override set."""
        choices = (self.hydra.get("runtime") or {}).get("choices") or {}
        return {group: choice for group, choice in choices.items() if isinstance(choice, str)}

    @cached_property
    def overrides(self) -> Sequence[str]:
        """The overrides on the command line."""
        # A job may have failed before it saved its own overrides.
        return self._failure.get("overrides") or read_overrides(self.directory)

    @cached_property
    def override_values(self) -> Mapping[str, str]:
        """The value of each key that an override set; keys have no leading plus."""
        pairs = [override.lstrip("+").partition("=") for override in self.overrides]
        return {key: _normalize(value) for key, equals, value in pairs if equals}

    @cached_property
    def metrics(self) -> Sequence[Mapping[str, Any]]:
        """The lines of `metrics.jsonl`."""
        path = self.directory / METRICS_FILE
        return read_metrics(path) if path.exists() else []

    @cached_property
    def results(self) -> Mapping[str, Any] | None:
        """The content of `results.json`; None if the run has not finished."""
        return read_results(self.directory)

    @cached_property
    def error(self) -> str:
        """The message and traceback of the error that ended the run; "" without one.

        A finished run may have one too, of what follows its results, such as closing a logger.
        """
        try:
            text = read_regular(self.directory / ERROR_FILE, "replace", within=self.directory)
        except OSError:
            text = ""
        text = text.strip()
        # The failure is that of a later job: a job that is stopped records none.
        if self._failure and (not text or text.startswith(_STOPPED)):
            return self._failure.get("error") or "failed"
        return text

    @property
    def error_line(self) -> str:
        """The error without its traceback, in one line; "" without one."""
        lines = self.error.splitlines() or [""]
        return " ".join(str(self._failure.get("error") or lines[-1]).split())

    @cached_property
    def _failure(self) -> Mapping[str, Any]:
        """The content of `failure.json`; {} if the run has finished or has not failed."""
        failure = read_failure(self.directory)
        return failure if failure is not None and self.results is None else {}

    @cached_property
    def environment(self) -> Mapping[str, Any]:
        """The versions, commit, device and workers."""
        environment = read_json(self.directory / ENVIRONMENT_FILE, within=self.directory) or {}
        results = self.results or {}
        workers = {name: results[name] for name in ("world_size", "strategy") if name in results}
        return {**environment, **results.get("environment", {}), **workers}

    @cached_property
    def predictions(self) -> Sequence[Mapping[str, Any]]:
        """The lines of `test_predictions.jsonl`; empty without the file."""
        return read_test_predictions(self.directory) or []

    @cached_property
    def test_tasks(self) -> Mapping[str, Sequence[Mapping[str, Any]]]:
        """The data of the "hardest" and of some "typical" test tasks; {} if not saved."""
        path = self.directory / TEST_TASKS_DATA_FILE
        return read_json(path, ExampleTasks, self.directory) or {}

    @property
    def written(self) -> float | None:
        """When the newest metrics were written, in seconds since 1970; None without metrics."""
        return _time_of(self.directory / METRICS_FILE)

    def status(self, now: float) -> Status:
        """The status of the run.

        Args:
            now: the current time, in seconds since 1970.
        """
        if self.results is not None:
            return "finished"
        if self.error:
            return "failed" if self.failed else "stopped"
        # Without metrics, the time when the newest attempt saved its configuration.
        last = self.written or _time_of(self.directory / CONFIG_FILE)
        recent = last is not None and now - last < _RUNNING_SECONDS
        return "running" if recent else "ended without results"

    @property
    def failed(self) -> bool:
        """Whether an error, and not a signal, ended the run before it had results."""
        return self.results is None and self.error != "" and not self.error.startswith(_STOPPED)

    @property
    def unfinished(self) -> bool:
        """Whether the run is in progress, was stopped or was killed."""
        return self.results is None and not self.failed

    def value(self, key: str) -> str:
        """The value of a dotted key, from the overrides or else from the configuration."""
        if key in self.override_values:
            return self.override_values[key]
        if key in self.choices:
            return self.choices[key]
        value = self._config_value(key, _DEFAULT)
        if isinstance(value, Mapping):
            return _DEFAULT
        return "null" if value is None else _normalize(value)

    def _config_value(self, key: str, default: Any = None) -> Any:
        node: Any = self.config
        for part in key.split("."):
            node = node.get(part, default) if isinstance(node, Mapping) else default
        return node

    def result(self, name: str) -> float | None:
        """A metric in `results.json`; None if the run does not have it."""
        value = (self.results or {}).get(name)
        return None if value is None else float(value)

    @cached_property
    def described(self) -> dict[str, str]:
        """The protocol and method as strings, by dotted key, such as `method.options.inner_lr`."""
        results = self.results or {}
        values = {part: results.get(part) or {} for part in ("protocol", "method")}
        return {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in flatten_values(values).items()
        }

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
        task = self._config_value("task")
        task = {**(task if isinstance(task, Mapping) else {}), **protocol}
        algorithm = (self.results or {}).get("method", {}).get("algorithm")
        algorithm = algorithm or self._choice("algorithm")
        dataset = protocol.get("dataset") or self._choice("dataset")
        ways = "" if self.metric == "mse" else f"{task.get('ways', '?')}-way "
        return f"{algorithm} on {dataset}, {ways}{task.get('shots', '?')}-shot"

    @property
    def preset(self) -> str:
        """The name of the run's preset in `conf/experiment`; "" without one."""
        return self.override_values.get("experiment", "")

    @property
    def iterations(self) -> tuple[int, int | None]:
        """The finished training iterations, and the planned ones; None if these are unknown."""
        finished = int((self.results or {}).get("iterations", 0))  # metrics.jsonl may be missing
        logged = (int(record["iteration"]) for record in self.metrics if "train_loss" in record)
        done = max([finished, *logged])
        planned = self._config_value("trainer.iterations")
        return done, planned if isinstance(planned, int) else None

    def commands(self) -> dict[str, str]:
        """Commands that repeat the run, resume it and replay tasks.

        The first two are omitted for a run of the user's own program, which is not recorded.
        """
        name = (self.hydra.get("job") or {}).get("config_name") or "maml"
        workers = _count(self.environment.get("world_size"), 1)
        launcher = self.choices.get("launcher", "none")
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
        sources = (self.hydra.get("runtime") or {}).get("config_sources") or ()
        overrides = (self.hydra.get("overrides") or {}).get("hydra") or ()
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
        return _count(protocol.get("eval_seed", self._config_value("trainer.eval_seed")), 0)

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
        target = str(self._config_value(f"{group}._target_", group))
        return self.choices.get(group) or target.rpartition(".")[2]


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
    """The record of a run that has finished, is in progress or has failed.

    Raises:
        UserError: the directory is no run directory.
    """
    if not is_run(directory):
        raise UserError(
            f"{directory} holds no run (no {RESULTS_FILE}, {METRICS_FILE} or {CONFIG_FILE}): give "
            "a run directory."
        )
    return RunRecord(directory)


def format_time(seconds: float) -> str:
    """Format a time, given in seconds since 1970, as local time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _time_of(path: Path) -> float | None:
    return path.stat().st_mtime if path.exists() else None


def _count(value: Any, default: int) -> int:
    """A number of a file that may be damaged."""
    return value if type(value) is int else default


def _normalize(value: object) -> str:
    """The canonical spelling of a value: 0.10 and 1e-1 are equal, and so are 1.0 and 1."""
    text = str(value).strip()
    if text.startswith("[") and not set(text[1:-1]) & set("[]{}"):
        return f"[{','.join(map(_normalize, text[1:-1].split(',')))}]"
    if text.startswith("["):
        return re.sub(r",\s+", ",", text)
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    with contextlib.suppress(ValueError):
        return str(int(text))
    try:
        number = float(text)
    except ValueError:
        return text.lower() if text.lower() in ("true", "false", "null") else text
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)
