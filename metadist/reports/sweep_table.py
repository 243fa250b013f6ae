"""The runs of a sweep as a table: one row per setting, mean and 95% interval over seeds."""

import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from metadist.errors import UserError
from metadist.loggers import METRICS_FILE
from metadist.metrics import format_estimate, score
from metadist.plots.points import short_names
from metadist.reports.comparison import (
    MISSING,
    TEST_TASK_KEYS,
    config_fingerprint,
    is_runtime_key,
)
from metadist.reports.run_directory import (
    CONFIG_FILE,
    ENVIRONMENT_FILE,
    ERROR_FILE,
    FAILURE_FILE,
    RESULTS_FILE,
    read_results,
)
from metadist.reports.run_record import RunRecord
from metadist.reports.statistics import mean_and_ci95


@dataclass(frozen=True)
class MetricEstimate:
    """A mean and half the width of its 95% interval, which is None if a single run has none."""

    mean: float
    ci95: float | None

    def format(self, metric: str) -> str:
        """The rounded mean and interval, as percentages for accuracy."""
        return format_estimate(self.mean, self.ci95, metric)


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed.

    Attributes:
        values: the values of the swept keys, in the order of the keys.
        runs: the finished runs, the last one of each seed.
        failed: the failed runs.
        unfinished: the runs that have neither finished nor failed.
        repeated: the finished runs with the same seed as a later run.
        test: the test metric, accuracy (0 to 1) or MSE; None if no run has finished. The interval
            is over seeds, or over test tasks if there is a single run.
        validation: the validation metric of the tested states, over seeds; None if a run has none.
        train_loss: the loss of the last iteration, over seeds; None if a run has none.
    """

    values: tuple[str, ...]
    runs: tuple[RunRecord, ...]
    failed: tuple[RunRecord, ...]
    unfinished: tuple[RunRecord, ...]
    repeated: tuple[RunRecord, ...]
    test: MetricEstimate | None
    validation: MetricEstimate | None
    train_loss: MetricEstimate | None

    @property
    def interval(self) -> str:
        """A description of what the interval of the test metric is over; "" without one."""
        if self.test is None or self.test.ci95 is None:
            return ""
        return "over seeds" if len(self.runs) > 1 else "over test tasks"


@dataclass(frozen=True)
class SweepTable:
    """The settings of a sweep.

    Attributes:
        keys: the swept keys, without the seed.
        metric: "accuracy" or "mse".
        settings: the settings, in the order of their first runs.
        best: the index of the best setting in `settings`; None if no setting's metric is a number.
        selected_by: the split whose metric selects `best`: "validation", or "test" without
            validation.
    """

    keys: tuple[str, ...]
    metric: str
    settings: tuple[Setting, ...]
    best: int | None
    selected_by: Literal["validation", "test"]

    @property
    def runs(self) -> list[RunRecord]:
        """The finished runs of all settings."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def repeated(self) -> list[RunRecord]:
        """Finished runs that are left out because a run that is later by name has the same setting
        and seed.
        """
        return [run for setting in self.settings for run in setting.repeated]

    def describe(self, setting: Setting, short: bool = False) -> str:
        """A setting as overrides for the command line, or with short names of the keys."""
        pairs = zip(short_names(self.keys) if short else self.keys, setting.values, strict=True)
        return " ".join(f"{key}={value}" for key, value in pairs) or "the only setting"

    @cached_property
    def described(self) -> dict[str, list[str]]:
        """The different values of the finished runs for each key of `RunRecord.described`."""
        runs = [run.described for run in self.runs]
        return {
            name: list(dict.fromkeys(each.get(name, MISSING) for each in runs))
            for name in dict.fromkeys(name for each in runs for name in each)
        }

    def descriptions(self) -> tuple[list[str], list[str]]:
        """Protocol and method of the finished runs, as lines such as `Protocol: ways 5, shots 1.`

        Returns:
            The lines of the keys that are equal in all runs, and those of the keys that differ.
        """
        equal: dict[str, list[str]] = {}
        different: dict[str, list[str]] = {}
        for name, values in self.described.items():
            part, _, key = name.partition(".")
            lines = equal if len(values) == 1 else different
            lines.setdefault(part, []).append(f"{key} {' or '.join(values)}")
        return (
            [f"{part.capitalize()}: {', '.join(pairs)}." for part, pairs in equal.items()],
            [f"Different {part}: {'; '.join(pairs)}." for part, pairs in different.items()],
        )

    def remarks(self) -> list[str]:
        """Sentences on omitted runs, unequal test tasks, and missing or non-finite results."""
        sentences = []
        protocols = [(run.results or {}).get("protocol") or {} for run in self.runs]
        if unequal := [
            key for key in TEST_TASK_KEYS if len({str(each.get(key)) for each in protocols}) > 1
        ]:
            sentences.append(
                f"the settings have different test tasks ({', '.join(unequal)}), so the best one "
                "may only have the easiest: compare settings of equal tasks"
            )
        if self.repeated:
            names = ", ".join(run.name for run in self.repeated)
            sentences.append(
                "left out, as another run, later by name, has the same setting and seed: " + names
            )
        best = None if self.best is None else self.settings[self.best]
        several = len(self.settings) > 1
        if several and best is not None and (lacking := [*best.failed, *best.unfinished]):
            names = ", ".join(run.name for run in lacking)
            sentences.append(
                f"the best setting ({self.describe(best)}) is compared without its failed or "
                f"unfinished runs: {names}"
            )
        if self.selected_by == "validation":
            sentences += [
                f"not compared, without validation: {self.describe(setting)}"
                for setting in self.settings
                if setting.test and not setting.validation
            ]
        tested = ((run.name, run.result(f"test_{self.metric}") or 0.0) for run in self.runs)
        if not_finite := [name for name, value in tested if not math.isfinite(value)]:
            sentences.append(f"the test result is not finite: {', '.join(not_finite)}")
        return sentences


def read_runs(folder: Path) -> list[RunRecord]:
    """All runs in a folder and its subfolders, sorted by name.

    Raises:
        UserError: there is no run.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is not a directory: give that of a run, or one that holds runs.")
    directories = {path for path in _directories(folder) if _holds_run(path)}
    # Inside a run directory, directories without a configuration have copies, such as MLflow's.
    directories = {
        directory
        for directory in directories
        if (directory / CONFIG_FILE).is_file() or directories.isdisjoint(directory.parents)
    }
    if not directories:
        raise UserError(
            f"{folder} holds no run (no {RESULTS_FILE} in it or below it): give the folder that "
            "holds the run directories."
        )
    runs = [RunRecord(path, str(path.relative_to(folder))) for path in directories]
    return sorted(runs, key=lambda run: _natural_order(run.name))


def _directories(folder: Path) -> Iterator[Path]:
    """Yield a folder and the folders below it once each; symbolic links are followed."""
    seen = set()
    for path, names, _ in os.walk(folder, followlinks=True):
        names[:] = [name for name in names if not name.startswith(".")]
        if (real := os.path.realpath(path)) in seen:
            names.clear()
            continue
        seen.add(real)
        yield Path(path)


def _holds_run(directory: Path) -> bool:
    """Whether a run has started in a directory. Other programs use some of the file names too."""
    names = (RESULTS_FILE, FAILURE_FILE, METRICS_FILE, ERROR_FILE)
    if not any((directory / name).is_file() for name in names):
        return False
    metadist_files = (Path(CONFIG_FILE).parent, FAILURE_FILE, ENVIRONMENT_FILE)
    if any((directory / name).exists() for name in metadist_files):
        return True
    try:
        return "protocol" in (read_results(directory) or {})
    except UserError:
        return False


def build_sweep_table(runs: Sequence[RunRecord]) -> SweepTable:
    """Group runs that differ only in their seed into one row.

    Raises:
        UserError: a run cannot be read, or classification and regression runs are mixed.
    """
    names = {name for run in runs for name in run.results or ()}
    metrics = [metric for metric in ("accuracy", "mse") if f"test_{metric}" in names]
    if len(metrics) > 1:
        regression = [run.name for run in runs if "test_mse" in (run.results or {})]
        raise UserError(
            "the folder holds both classification and regression runs: move the regression runs "
            f"({', '.join(regression)}) into a folder of their own, for a table of their own."
        )
    metric = metrics[0] if metrics else "accuracy"
    keys = tuple(_swept_keys(runs))
    groups: dict[tuple[str, ...], list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(tuple(run.value(key) for key in keys), []).append(run)
    settings = tuple(_build_setting(values, group, metric) for values, group in groups.items())
    selected_by: Literal["validation", "test"] = (
        "validation" if any(setting.validation for setting in settings) else "test"
    )
    best = _best_setting(settings, metric, selected_by)
    return SweepTable(keys, metric, settings, best, selected_by)


def _swept_keys(runs: Sequence[RunRecord]) -> list[str]:
    """The keys in which the runs differ, without the seed; keys of command lines come first."""
    overridden = dict.fromkeys(key for run in runs for key in run.override_values if key != "seed")
    keys = [key for key in overridden if not is_runtime_key(key)]
    keys = [key for key in keys if len({run.value(key) for run in runs}) > 1]
    groups = {key for key in keys if "." not in key}  # a chosen group sets other keys too
    if "experiment" in groups:
        return keys
    if groups:  # and other groups, as algorithm=reptile sets the optimizer
        choices = dict.fromkeys(group for run in runs for group in run.choices)
        differ = [group for group in choices if len({run.choices.get(group) for run in runs}) > 1]
        groups |= {group.partition("@")[0] for group in differ}
    # Keys that no command line set may differ too, for example in an edited configuration file.
    fingerprints = [config_fingerprint(run.config) for run in runs if run.config]
    names = dict.fromkeys(name for values in fingerprints for name in values if name != "seed")
    return keys + [
        name
        for name in names
        if name not in keys
        and name.partition(".")[0] not in groups
        and len({values.get(name) for values in fingerprints}) > 1
    ]


def _build_setting(values: tuple[str, ...], runs: Sequence[RunRecord], metric: str) -> Setting:
    # A sweeper may sample a setting twice: of runs with the same seed only the last one counts.
    by_seed = {run.results.get("seed"): run for run in runs if run.results is not None}
    finished = list(by_seed.values())
    test = _estimate(finished, f"test_{metric}")
    if test is not None and len(finished) == 1:
        half_width = finished[0].result("ci95")  # a single task has no interval
        has_interval = half_width is not None and math.isfinite(half_width)
        test = MetricEstimate(test.mean, half_width if has_interval else None)
    return Setting(
        values=values,
        runs=tuple(finished),
        failed=tuple(run for run in runs if run.failed),
        unfinished=tuple(run for run in runs if run.unfinished),
        repeated=tuple(run for run in runs if run.results is not None and run not in finished),
        test=test,
        validation=_estimate(finished, f"validation_{metric}"),
        train_loss=_estimate(finished, "train_loss"),
    )


def _estimate(runs: Sequence[RunRecord], name: str) -> MetricEstimate | None:
    """The estimate over all runs; None if one of them does not have the metric."""
    values = [value for run in runs if (value := run.result(name)) is not None]
    return MetricEstimate(*mean_and_ci95(values)) if values and len(values) == len(runs) else None


def _best_setting(
    settings: Sequence[Setting], metric: str, selected_by: Literal["validation", "test"]
) -> int | None:
    scores = {}
    for index, setting in enumerate(settings):
        estimate = setting.validation if selected_by == "validation" else setting.test
        if estimate is not None and not math.isnan(estimate.mean):
            scores[index] = score(estimate.mean, metric)
    return max(scores, key=scores.__getitem__) if scores else None


def _natural_order(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(int(part or 0), "") if part.isdecimal() else (0, part) for part in parts]
