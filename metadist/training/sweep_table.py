"""A sweep's table: a row for each setting, the mean and its 95% interval over seeds."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from metadist.errors import UserError
from metadist.loggers import mean_and_interval
from metadist.training.swept_runs import SweptRun, swept_keys

OVER_SEEDS = "over seeds"
OVER_TASKS = "over test tasks"


@dataclass(frozen=True)
class Figure:
    """A mean and half the width of its 95% interval, None where one run does not settle it."""

    mean: float
    ci95: float | None


@dataclass(frozen=True)
class Setting:
    """Runs that differ in their seed alone.

    Attributes:
        values: of the swept keys, in their order.
        runs: those that finished, one a seed: the last of them.
        failed: those that failed.
        unfinished: those that did neither.
        test: the test's figure: accuracy (0 to 1) or MSE; None if no run finished. Its interval
            is over seeds, or over the test's tasks where there is one run alone.
        validation: the newest validation's, over seeds; None without any.
        train_loss: of the last iteration.
    """

    values: tuple[str, ...]
    runs: tuple[SweptRun, ...]
    failed: tuple[SweptRun, ...]
    unfinished: tuple[SweptRun, ...]
    test: Figure | None
    validation: Figure | None
    train_loss: Figure | None

    @property
    def interval(self) -> str:
        """What the test's interval is over."""
        return OVER_SEEDS if len(self.runs) > 1 else OVER_TASKS if self.runs else ""


@dataclass(frozen=True)
class SweepTable:
    """The settings of a sweep.

    Attributes:
        keys: what was swept, but for the seed.
        metric: "accuracy" or "mse".
        settings: in the order of their first runs.
        best: the place in `settings` of the one with the best validation, None if none finished.
        chosen_by: "validation", or "test" where runs have no validation.
    """

    keys: tuple[str, ...]
    metric: str
    settings: tuple[Setting, ...]
    best: int | None
    chosen_by: str

    @property
    def runs(self) -> list[SweptRun]:
        """Those that finished."""
        return [run for setting in self.settings for run in setting.runs]


def tabulate(runs: Sequence[SweptRun]) -> SweepTable:
    """Put runs that differ in their seed alone into one row.

    Raises:
        UserError: some are judged by accuracy and some by squared error.
    """
    results = [run.results for run in runs if run.results is not None]
    metrics = [
        metric for metric in ("accuracy", "mse") if any(f"test_{metric}" in r for r in results)
    ]
    if len(metrics) > 1:
        raise UserError(
            "some of these runs are of classes and some of regression: tabulate them one by one."
        )
    metric = metrics[0] if metrics else "accuracy"
    keys = tuple(swept_keys(runs))
    groups: dict[tuple[str, ...], list[SweptRun]] = {}
    for run in runs:
        groups.setdefault(tuple(run.value(key) for key in keys), []).append(run)
    settings = tuple(_setting(values, group, metric) for values, group in groups.items())
    chosen_by = "validation" if any(setting.validation for setting in settings) else "test"
    return SweepTable(keys, metric, settings, _best(settings, metric, chosen_by), chosen_by)


def _setting(values: tuple[str, ...], runs: Sequence[SweptRun], metric: str) -> Setting:
    # A search may come back to a setting: the same run twice is no second seed.
    seeds = {run.results.get("seed"): run for run in runs if run.results is not None}
    done = list(seeds.values())
    test = _figure(done, f"test_{metric}")
    if test is not None and len(done) == 1:
        test = Figure(test.mean, _number(done[0], "ci95"))
    return Setting(
        values=values,
        runs=tuple(done),
        failed=tuple(run for run in runs if run.failed),
        unfinished=tuple(run for run in runs if run.unfinished),
        test=test,
        validation=_figure(done, f"validation_{metric}"),
        train_loss=_figure(done, "train_loss"),
    )


def _figure(runs: Sequence[SweptRun], name: str) -> Figure | None:
    values = [_number(run, name) for run in runs]
    known = [value for value in values if value is not None]
    return Figure(*mean_and_interval(known)) if known and len(known) == len(values) else None


def _number(run: SweptRun, name: str) -> float | None:
    value = (run.results or {}).get(name)
    if isinstance(value, str) and value in ("NaN", "Infinity", "-Infinity"):
        return float(value)
    return float(value) if isinstance(value, int | float) else None


def _best(settings: Sequence[Setting], metric: str, chosen_by: str) -> int | None:
    sign = -1 if metric == "mse" else 1
    found = {
        place: sign * figure.mean
        for place, setting in enumerate(settings)
        if (figure := getattr(setting, chosen_by)) is not None and figure.mean == figure.mean
    }
    return max(found, key=found.__getitem__) if found else None


def as_csv(table: SweepTable) -> str:
    """The table for programs: plain numbers, and each setting's protocol."""
    protocols = [_flat(run.results) for run in table.runs]
    names = list(dict.fromkeys(name for protocol in protocols for name in protocol))
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    figures = ("test", "validation", "train_loss")
    columns = [f"test_{table.metric}", f"validation_{table.metric}", "train_loss"]
    pairs = [name for each in columns for name in (each, f"{each}_ci95")]
    rows.writerow(
        [
            *table.keys,
            "runs",
            "failed",
            "unfinished",
            *pairs,
            "test_interval",
            "best",
            *(f"protocol.{name}" for name in names),
        ]
    )
    for place, each in enumerate(table.settings):
        numbers = [number for name in figures for number in _pair(getattr(each, name))]
        flats = [_flat(run.results) for run in each.runs]
        rows.writerow(
            [
                *each.values,
                len(each.runs),
                len(each.failed),
                len(each.unfinished),
                *numbers,
                f"95% {each.interval}" if each.interval else "",
                "yes" if place == table.best else "",
                *(
                    " | ".join(dict.fromkeys(flat.get(name, "") for flat in flats))
                    for name in names
                ),
            ]
        )
    return text.getvalue()


def _pair(figure: Figure | None) -> tuple[object, object]:
    if figure is None:
        return "", ""
    return figure.mean, "" if figure.ci95 is None else figure.ci95


def _flat(results: Mapping[str, Any] | None) -> dict[str, str]:
    return {
        str(key): value if isinstance(value, str) else json.dumps(value)
        for part in ("protocol", "method")
        for key, value in ((results or {}).get(part) or {}).items()
    }


def as_markdown(table: SweepTable) -> str:
    """The table for people, with the protocol below it."""
    alone = any(len(each.runs) == 1 for each in table.settings)
    metric = "accuracy" if table.metric == "accuracy" else "MSE"
    spared = [] if any(each.failed or each.unfinished for each in table.settings) else ["failed"]
    heads = [
        *table.keys,
        "seeds",
        *(["failed or unfinished"] if not spared else []),
        f"validation {metric}",
        f"test {metric}",
        "training loss",
        "",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for place, each in enumerate(table.settings):
        lost = [str(len(each.failed) + len(each.unfinished))] if not spared else []
        cells = [
            *each.values,
            str(len(each.runs)),
            *lost,
            told(each.validation, table.metric),
            told(each.test, table.metric),
            told(each.train_loss, "loss"),
            "best" if place == table.best else "",
        ]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    over = "over seeds (Student's t)"
    if alone:
        over += "; of the test with one seed alone: over its tasks"
    lines += [
        "",
        f"± is half the width of a 95% interval {over}. The best is chosen by {table.chosen_by}.",
    ]
    return "\n".join([*lines, "", *_protocol_lines(table), *_failure_lines(table)]) + "\n"


def told(figure: Figure | None, metric: str) -> str:
    """A figure for people: a percentage for accuracy."""
    if figure is None:
        return "—"

    def say(value: float) -> str:
        return f"{100 * value:.2f}%" if metric == "accuracy" else f"{value:.4g}"

    return say(figure.mean) + ("" if figure.ci95 is None else f" ± {say(figure.ci95)}")


def _protocol_lines(table: SweepTable) -> list[str]:
    protocols = [_flat(run.results) for run in table.runs]
    names = dict.fromkeys(name for protocol in protocols for name in protocol)
    found = {name: list(dict.fromkeys(p.get(name, "—") for p in protocols)) for name in names}
    common = ", ".join(f"{name} {values[0]}" for name, values in found.items() if len(values) == 1)
    varied = [f"{name} {' or '.join(values)}" for name, values in found.items() if len(values) > 1]
    lines = [f"Protocol: {common}."] if common else []
    return lines + ([f"Differing: {'; '.join(varied)}."] if varied else [])


def _failure_lines(table: SweepTable) -> list[str]:
    failed = [run for setting in table.settings for run in setting.failed]
    if not failed:
        return []
    return ["", "Failed:", "", *(f"- {run.name}: {run.failure}" for run in failed)]
