"""Paired comparison of two runs that were tested on the same tasks."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from metadist.errors import UserError, did_you_mean
from metadist.metrics import result_metric
from metadist.reports.comparison import (
    TEST_TASK_KEYS,
    format_differences,
    protocol_differences,
)
from metadist.reports.file_schema import Evaluation
from metadist.reports.run_directory import (
    predictions_of_evaluation,
    read_json,
    read_test_predictions,
    require_results,
)
from metadist.reports.statistics import mean_and_ci95

_TASK_KEYS = ("classes", "query_images", "labels", "targets")
"""The keys that are equal in two records of the same task."""


class PairedDifference(NamedTuple):
    """The difference of two runs over their common test tasks.

    Attributes:
        metric: "accuracy" or "mse".
        means: the means of the first and the second run.
        difference: the mean over tasks of the second run's value minus the first run's value.
        ci95: half the width of the difference's 95% interval; None for a single task or values that
            are not finite.
        tasks: the number of tasks.
    """

    metric: str
    means: tuple[float, float]
    difference: float
    ci95: float | None
    tasks: int


def compare_runs(
    first: str | Path, second: str | Path, ignore: Sequence[str] = ()
) -> PairedDifference:
    """The difference between two runs' test metrics, paired by task.

    Hard and easy tasks affect both runs, so the interval of the difference is narrower than the
    intervals of the two means suggest. It is Student's interval over the tasks' differences: it
    describes the variation between tasks, not between training seeds.

    Args:
        first: the directory of the first run, or the JSON file of a `metadist evaluate` of it.
        second: the same of the second run.
        ignore: keys of the protocol that may differ, such as "backbone".

    Raises:
        UserError: a run has not finished or has no predictions, the protocols differ, or the test
            tasks are not the same.
    """
    first, second = Path(first), Path(second)
    results = {"first": _results(first), "second": _results(second)}
    protocols = {name: result.get("protocol") or {} for name, result in results.items()}
    known = {key for protocol in protocols.values() for key in protocol}
    for key in ignore:
        if key not in known:
            raise UserError(
                f"--ignore {key} is no key of the protocol{did_you_mean(key, known)}: choose one "
                f"of {', '.join(sorted(known))}."
            )
    metrics = [result_metric(result) for result in results.values()]
    records = [_predictions(path) for path in (first, second)]
    comparable = metrics[0] == metrics[1] and _same_tasks(*records)
    if not all(record.get("query_images") or record.get("targets") for record in records[0]):
        # Labels alone may be equal for different tasks.
        others = sorted(known - {*TEST_TASK_KEYS, "eval_seed"})
        comparable &= not protocol_differences(protocols, others)
    if differences := protocol_differences(protocols, ignore):
        keys = " ".join(f"--ignore {key}" for key in differences)
        hint = f", or, if that is what you compare, add {keys}" if comparable else ""
        raise UserError(
            f"{first} and {second} were tested under different protocols "
            f"({'; '.join(format_differences(differences))}): test both under the same one{hint}."
        )
    if not comparable:
        raise UserError(
            f"{first} and {second} were not tested on the same tasks: give both the same dataset, "
            "task, trainer.eval_seed and trainer.eval_tasks."
        )
    metric = metrics[0]
    for path, run_records in zip((first, second), records, strict=True):
        if not all(metric in record for record in run_records):
            raise UserError(f"{path} has test tasks without {metric}: test it again.")
    values = [[float(record[metric]) for record in run_records] for run_records in records]
    difference, ci95 = mean_and_ci95([b - a for a, b in zip(*values, strict=True)])
    means = (mean_and_ci95(values[0])[0], mean_and_ci95(values[1])[0])
    return PairedDifference(metric, means, difference, ci95, len(values[0]))


def _results(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        return require_results(path)
    with contextlib.suppress(UserError):
        results = read_json(path, Evaluation)
        if results is not None and predictions_of_evaluation(path).exists():
            return results
    raise UserError(
        f"{path} is not a file that this version of metadist evaluate has written: evaluate again, "
        "or give a run's directory."
    )


def _predictions(path: Path) -> Sequence[Mapping[str, Any]]:
    records = read_test_predictions(path)
    if not records:
        raise UserError(
            f"{path} has no predictions, because an earlier version of metadist tested it: test it "
            "again, with resume=auto."
        )
    return records


def _same_tasks(first: Sequence[Mapping[str, Any]], second: Sequence[Mapping[str, Any]]) -> bool:
    return len(first) == len(second) and all(
        first_task.get(key) == second_task.get(key)
        for first_task, second_task in zip(first, second, strict=True)
        for key in _TASK_KEYS
    )
