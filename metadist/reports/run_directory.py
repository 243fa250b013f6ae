"""The files in a run directory: their names, and functions that read and write them."""

import contextlib
import json
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from metadist.errors import UserError, first_line
from metadist.files import REDIRECT_RUN, atomic_write, locked_directory, read_regular
from metadist.loggers import METRICS_FILE, json_value
from metadist.reports.file_schema import (
    Failure,
    HydraNode,
    Node,
    Prediction,
    Results,
    mismatch,
)

RESULTS_FILE = "results.json"

TEST_PREDICTIONS_FILE = "test_predictions.jsonl"
"""One JSON object per test task: the names of its classes, the labels and predictions of its
queries, and its metrics."""

FAILURE_FILE = "failure.json"
"""The error, exit status and overrides of a failed job of a sweep."""

ERROR_FILE = "error.txt"
"""The message of the error that ended the run, with its traceback. A later attempt removes it."""

ENVIRONMENT_FILE = "environment.json"
"""Versions, commit, device and workers; written when the run starts."""

WORKER_ERROR_FILE = "worker_error.txt"
"""The error of a worker whose job a launcher started; the launcher reads and deletes the file."""

CONFIG_FILE = ".hydra/config.yaml"
OVERRIDES_FILE = ".hydra/overrides.yaml"
HYDRA_FILE = ".hydra/hydra.yaml"

CHECKPOINT_DIRECTORY = "checkpoints"
PROFILE_DIRECTORY = "profile"
REPLAY_DIRECTORY = "replays"

TRUSTED_PACKAGES = (
    "metadist.algorithms",
    "metadist.distributed.reducers",
    "metadist.models",
    "metadist.tasks",
    "metadist.training",
    "torch.optim",
    "torch.optim.lr_scheduler",
    "torchvision.transforms.v2",
)
"""Packages of the classes that a saved run may name without `--trust-code`."""

_NOT_BUILT = ("callbacks", "default_partition", "launcher", "logger", "partition", "strategy")
"""Configuration groups that are never built from a saved run."""

LEARNING_CURVES_FILE = "learning_curves.png"
TEST_TASKS_FILE = "test_tasks.png"
VALIDATION_TASKS_FILE = "validation_tasks.png"
"""Written at every validation if a logger shows images."""

TEST_TASKS_DATA_FILE = "test_tasks.json"
"""Images or points of the hardest and of some typical test tasks."""

HTML_FILE = "report.html"

CONTENTS: Mapping[str, str] = {
    HTML_FILE: "report for a browser",
    RESULTS_FILE: "these metrics and the protocol",
    METRICS_FILE: "one line per iteration",
    TEST_PREDICTIONS_FILE: "one line per test task",
    CHECKPOINT_DIRECTORY: "to resume from, with resume=auto",
    "tensorboard": "tensorboard --logdir",
    "wandb": "wandb sync",
    "mlflow.db": "mlflow ui --backend-store-uri sqlite:///mlflow.db",
    PROFILE_DIRECTORY: "time per named range of a step; traces for ui.perfetto.dev",
}
"""Descriptions, for the console, of the files and directories that a finished run may have."""


def read_json(path: Path, schema: Any = Node, within: Path | None = None) -> dict[str, Any] | None:
    """Read a JSON object such as `results.json`; None if the file does not exist.

    Args:
        path: the path of the file.
        schema: the types of its values; see `metadist.reports.file_schema`.
        within: the directory that the file must be in; see `read_regular`.

    Raises:
        UserError: the file cannot be read, or its values have other types.
    """
    try:
        content = json.loads(read_regular(path, within=within))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): restore a good copy, or remove it to run the job "
            "again."
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is not a JSON object: remove it to run the job again.")
    if reason := mismatch(content, schema):
        raise UserError(
            f"{path} is damaged ({reason}): restore a good copy, or remove it to run the job again."
        )
    return content


def write_json(path: Path, content: Mapping[str, Any], redirect: str = REDIRECT_RUN) -> None:
    """Write a JSON object atomically; see `metadist.loggers.json_value`.

    Args:
        path: the path of the file.
        content: the object.
        redirect: see `wrap_write_errors`.

    Raises:
        UserError: the file cannot be written.
    """
    text = json.dumps(json_value(content), indent=2, allow_nan=False)
    atomic_write(path, f"{text}\n".encode(), redirect)


def read_results(directory: Path) -> dict[str, Any] | None:
    """Read `results.json` of a run directory; None if the run has not finished.

    A run that continues an earlier one renames its results when it starts, so that results are
    always those of a finished run.

    Raises:
        UserError: the file cannot be read.
    """
    return read_json(directory / RESULTS_FILE, Results, directory)


def require_results(directory: Path) -> dict[str, Any]:
    """Read `results.json` of the directory of a finished run.

    Raises:
        UserError: there is no such directory or file, or the file cannot be read.
    """
    results = read_results(directory)
    if results is None:
        reason, remedy = "does not exist", ""
        if directory.exists():
            reason, remedy = f"holds no {RESULTS_FILE}", ", or finish this one with resume=auto"
        raise UserError(
            f"{directory} {reason}: give the directory of a run that has finished{remedy}."
        )
    return results


def write_results(directory: Path, results: Mapping[str, Any]) -> None:
    """Write `results.json` atomically; for non-finite numbers see `json_value`.

    Raises:
        UserError: the file cannot be written.
    """
    redirect = "copy the directory to another disk; resume=auto then finishes the run"
    write_json(directory / RESULTS_FILE, results, redirect)


def read_test_predictions(path: str | Path) -> list[dict[str, Any]] | None:
    """Read the predictions of a test; None if there are none.

    Args:
        path: a run directory, or the JSON file of `metadist evaluate`.

    Raises:
        UserError: the predictions cannot be read.
    """
    path = Path(path)
    run = None if path.is_file() else path
    path = predictions_of_evaluation(path) if run is None else run / TEST_PREDICTIONS_FILE
    try:
        records = [json.loads(line) for line in read_regular(path, within=run).splitlines()]
        if reason := mismatch(records, list[Prediction]):
            raise ValueError(reason)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): restore a good copy, or test the run again with "
            "resume=auto."
        ) from None
    return records


def predictions_of_evaluation(path: Path) -> Path:
    """The file of the predictions beside a JSON file of `metadist evaluate`."""
    return path.with_name(f"{path.name.removesuffix('.json')}.predictions.jsonl")


def write_test_predictions(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Write the lines of `test_predictions.jsonl` atomically.

    Args:
        path: the path of the file.
        records: one record per test task; see `metadist.training.results.prediction_records`.

    Raises:
        UserError: the file cannot be written.
    """
    lines = (
        json.dumps(json_value(record), separators=(",", ":"), allow_nan=False) for record in records
    )
    atomic_write(path, "".join(f"{line}\n" for line in lines).encode())


def read_failure(directory: Path) -> dict[str, Any] | None:
    """Read `failure.json` of a run directory; None if the job has not failed.

    Raises:
        UserError: the file cannot be read.
    """
    return read_json(directory / FAILURE_FILE, Failure, directory)


def write_failure(directory: Path, overrides: Sequence[str], error: str, exit_status: int) -> None:
    """Write `failure.json` for a failed job, atomically. Called by rank zero or by the launcher.

    The error is reported elsewhere too, so that a directory is left alone if it cannot be written
    to, if another run is writing to it, or if it holds results: the job was refused to keep those
    of another run, or failed after its own were written.
    """
    failure = {"error": error, "exit_status": exit_status, "overrides": list(overrides)}
    with contextlib.suppress(OSError, UserError), locked_directory(directory):
        if not (directory / RESULTS_FILE).exists():
            write_json(directory / FAILURE_FILE, failure)


def pop_worker_error(directory: Path) -> str:
    """Read and delete `worker_error.txt`: the error of the workers in one line, "" if unknown."""
    path = directory / WORKER_ERROR_FILE
    try:
        lines = read_regular(path).strip().splitlines()
        path.unlink()
    except OSError:
        return ""
    return lines[-1] if lines else ""


def read_config(directory: Path) -> dict[str, Any]:
    """Read the composed configuration of a run, with interpolations unresolved; {} without one.

    Raises:
        UserError: the file cannot be read.
    """
    content = _read_yaml(directory, CONFIG_FILE)
    return content if isinstance(content, dict) else {}


def read_overrides(directory: Path) -> list[str]:
    """Read the overrides of a run's command line; [] without any.

    Raises:
        UserError: the file cannot be read.
    """
    content = _read_yaml(directory, OVERRIDES_FILE) or []
    _check_yaml(directory / OVERRIDES_FILE, content, list)
    return [str(override) for override in content]


def read_hydra(directory: Path) -> dict[str, Any]:
    """Read the node `hydra` of a run: job, command line, choices and sources; {} without it.

    Raises:
        UserError: the file cannot be read.
    """
    content = _read_yaml(directory, HYDRA_FILE)
    node = content.get("hydra") if isinstance(content, dict) else None
    _check_yaml(directory / HYDRA_FILE, node or {}, HydraNode)
    return node or {}


def directory_override(key: str, directory: Path) -> str:
    """An override such as `hydra.run.dir=DIR`, quoted for Hydra and for a shell."""
    value = str(directory)
    if not re.fullmatch(r"[\w/:.+@% -]+", value, re.ASCII):
        from hydra.core.override_parser.types import Quote, QuotedString  # takes time to import

        value = QuotedString(value, Quote.single).with_quotes()
    return shlex.quote(f"{key}={value}")


def trust_option(config: Mapping[str, Any]) -> str:
    """The option " --trust-code" for a command on a run with user-defined classes, else ""."""

    def is_known(node: Any) -> bool:
        if isinstance(node, Mapping):
            package = str(node.get("_target_", "metadist.")).rpartition(".")[0]
            known = package in TRUSTED_PACKAGES or package.partition(".")[0] == "metadist"
            return known and all(map(is_known, node.values()))
        return not isinstance(node, list) or all(map(is_known, node))

    built = {group: node for group, node in config.items() if group not in _NOT_BUILT}
    return "" if is_known(built) else " --trust-code"


def refuse_aliases(text: str) -> None:
    """Refuse YAML with aliases: a short text could stand for any number of values.

    Raises:
        yaml.YAMLError: the text has an alias, or is no YAML.
    """
    if "*" in text and any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text)):
        raise yaml.YAMLError("it has an alias (*name), which metadist does not write")


def _check_yaml(path: Path, content: Any, schema: Any) -> None:
    """Raise `UserError` if a file's content has other types."""
    if reason := mismatch(content, schema):
        raise UserError(f"{path} is damaged ({reason}): remove or restore it.")


def _read_yaml(directory: Path, name: str) -> Any:
    path = directory / name
    try:
        text = read_regular(path, within=directory)
        refuse_aliases(text)
        return yaml.safe_load(text)
    except FileNotFoundError:
        return None
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        reason = first_line(error)
        raise UserError(f"{path} cannot be read ({reason}): remove or restore it.") from None
