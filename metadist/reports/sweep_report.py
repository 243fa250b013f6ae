"""The report on a sweep: `sweep.csv`, `sweep.md`, `sweep.png`, `report.html`, and a summary."""

import csv
import html
import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from metadist.errors import UserError, first_line
from metadist.files import REDIRECT_REPORT, atomic_write
from metadist.loggers import json_value
from metadist.metrics import counted, metric_label
from metadist.plots import plot_sweep
from metadist.reports.comparison import format_differences, protocol_differences
from metadist.reports.run_directory import HTML_FILE
from metadist.reports.sweep_page import setting_points, write_sweep_page
from metadist.reports.sweep_table import (
    MetricEstimate,
    Setting,
    SweepTable,
    build_sweep_table,
    read_runs,
)

SWEEP_CSV_FILE = "sweep.csv"
SWEEP_MARKDOWN_FILE = "sweep.md"
SWEEP_PLOT_FILE = "sweep.png"


@dataclass(frozen=True)
class SweepReport:
    """The report on a folder of runs.

    Attributes:
        table: the table of settings.
        files: the files that were written.
        warnings: the differences between the protocols in keys that were not swept.
        failed: the names of failed runs.
        unfinished: the names of runs that have neither finished nor failed.
        missing: the reasons why `sweep.png` or `report.html` was not written.
    """

    table: SweepTable
    files: tuple[Path, ...]
    warnings: tuple[str, ...]
    failed: tuple[str, ...]
    unfinished: tuple[str, ...]
    missing: tuple[str, ...] = ()

    def summary_lines(self) -> list[str]:
        """The lines of the summary to print."""
        counts = f"{counted(len(self.table.runs), 'run')} finished"
        if self.failed:
            counts += f", {len(self.failed)} failed"
        if self.unfinished:
            counts += f", {len(self.unfinished)} unfinished"
        lines = ["", counts, *self._best_lines()]
        lines += [f"warning: not comparable, {warning}" for warning in self.warnings]
        remarks = (*self.table.remarks(), *self.missing)
        lines += [f"warning: {remark}" for remark in remarks]
        return [*lines, *(f"  {path}" for path in self.files)]

    def _best_lines(self) -> list[str]:
        table = self.table
        if table.best is None:
            line = f"no best setting: no {table.selected_by} metric is a number"
            return [line] if table.runs else []
        best = table.settings[table.best]
        metric = metric_label(table.metric, short=True)
        test = f"test {metric} {_format(best.test, table.metric)}"
        if best.interval:
            test += f" ({best.interval})"
        if best.validation is not None:
            test = f"validation {metric} {_format(best.validation, table.metric)}, {test}"
        names = ", ".join(run.name for run in best.runs)
        runs = f"  {'directory' if len(best.runs) == 1 else 'directories'}: {names}"
        if len(table.settings) == 1:
            return [f"  {test}", runs]
        lines = [f"best: {table.describe(best)}", f"  {test}", runs]
        ties = [
            table.describe(setting)
            for setting in table.settings
            if setting is not best and _is_tie(setting, best, table.selected_by)
        ]
        if ties:
            lines.append(f"  equal by {table.selected_by}: {'; '.join(ties)}")
        if table.selected_by == "test":
            lines.append(
                "  selected by the test metric, because no setting has a validation of every "
                "seed: optimistically biased"
            )
        return lines


def write_sweep_report(folder: Path) -> SweepReport:
    """Write `sweep.csv`, `sweep.md`, `sweep.png` and `report.html` into a folder of runs.

    One process calls it. It only warns if `sweep.png` or `report.html` cannot be written.

    Raises:
        UserError: there are no runs, a run cannot be read, classification and regression are mixed,
            or the folder cannot be written.
    """
    runs = read_runs(folder)
    table = build_sweep_table(runs)
    warnings = format_differences(_unswept_differences(table))
    markdown = to_markdown(table)
    markdown += "".join(f"\n{remark[0].upper()}{remark[1:]}.\n" for remark in table.remarks())
    if warnings:
        markdown += "\n" + "".join(f"**Not comparable:** {warning}\n" for warning in warnings)
    files = [folder / SWEEP_CSV_FILE, folder / SWEEP_MARKDOWN_FILE]
    for path, text in zip(files, (to_csv(table), markdown), strict=True):
        # Names may not be UTF-8.
        atomic_write(path, text.encode(errors="replace"), REDIRECT_REPORT)
    missing = []
    if points := [point for point, _ in setting_points(table)]:
        path = folder / SWEEP_PLOT_FILE
        try:
            plot_sweep(points, table.keys, table.metric, path, _caption(table), table.selected_by)
            files.append(path)
        except Exception as error:  # the tables are written and the runs have finished
            missing.append(_not_written(path, error))
    try:
        files.append(write_sweep_page(folder, table, runs, warnings))
    except UserError as error:
        missing.append(str(error))
    except Exception as error:
        missing.append(_not_written(folder / HTML_FILE, error))
    return SweepReport(
        table,
        tuple(files),
        tuple(warnings),
        tuple(run.name for run in runs if run.failed),
        tuple(run.name for run in runs if run.unfinished),
        tuple(missing),
    )


def _not_written(path: Path, error: Exception) -> str:
    return f"{path.name} could not be written ({type(error).__name__}: {first_line(error)})"


def to_csv(table: SweepTable) -> str:
    """The table as CSV with plain numbers, and the protocol and method of each setting.

    The test metrics of all seeds are one JSON object.
    """
    names = list(table.described)
    metrics = (f"test_{table.metric}", f"validation_{table.metric}", "train_loss")
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(
        [
            *table.keys,
            *("runs", "failed", "unfinished"),
            *(column for metric in metrics for column in (metric, f"{metric}_ci95")),
            *("test_interval", f"test_{table.metric}_by_seed", "best", "directories"),
            *names,
        ]
    )
    for index, setting in enumerate(table.settings):
        descriptions = [run.described for run in setting.runs]
        columns = ([description.get(name, "") for description in descriptions] for name in names)
        numbers: list[object] = []
        for estimate in (setting.test, setting.validation, setting.train_loss):
            numbers += (None, None) if estimate is None else (estimate.mean, estimate.ci95)
        writer.writerow(  # None is an empty cell
            [
                *setting.values,
                *(len(setting.runs), len(setting.failed), len(setting.unfinished)),
                *numbers,
                f"95% {setting.interval}" if setting.interval else None,
                json.dumps(json_value(_by_seed(setting, f"test_{table.metric}")))
                if setting.runs
                else None,
                "yes" if index == table.best else None,
                " | ".join(run.name for run in setting.runs) or None,
                *(" | ".join(dict.fromkeys(column)) for column in columns),
            ]
        )
    return text.getvalue()


def _by_seed(setting: Setting, name: str) -> dict[str, float | None]:
    return {str((run.results or {}).get("seed")): run.result(name) for run in setting.runs}


def to_markdown(table: SweepTable) -> str:
    """The table as Markdown with rounded numbers; below it protocol, method and failures."""
    all_finished = not any(setting.failed or setting.unfinished for setting in table.settings)
    metric = metric_label(table.metric, short=True)
    header = [
        *table.keys,
        "seeds",
        *([] if all_finished else ["failed or unfinished"]),
        f"validation {metric}",
        f"test {metric}",
        "training loss",
        "",
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    for index, setting in enumerate(table.settings):
        cells = [
            *setting.values,
            str(len(setting.runs)),
            *([] if all_finished else [str(len(setting.failed) + len(setting.unfinished))]),
            _format(setting.validation, table.metric),
            _format(setting.test, table.metric),
            _format(setting.train_loss, "loss"),
            "best" if index == table.best else "",
        ]
        lines.append("| " + " | ".join(_as_text(cell).replace("|", "\\|") for cell in cells) + " |")
    over = "over seeds (Student's t) for these test tasks, without the error of choosing the tasks"
    counts = {len(setting.runs) for setting in table.settings if setting.runs}
    if counts == {1}:
        over = "over test tasks"
    elif 1 in counts:
        over += "; for the test metric of a single seed, over test tasks"
    equal, different = table.descriptions()
    lines += [
        "",
        f"± is half the width of a 95% interval {over}. "
        f"The best setting is selected by {table.selected_by}.",
        "",
        *"\n\n".join([*equal, *different]).splitlines(),
    ]
    failed = [run for setting in table.settings for run in setting.failed]
    if failed:
        lines += ["", "Failed:", ""]
        lines += [_as_text(f"- {run.name}: {run.error_line}") for run in failed]
    return "\n".join(lines) + "\n"


def _as_text(text: str) -> str:
    """Text that a Markdown viewer does not read as HTML."""
    return html.escape(text, quote=False)


def _unswept_differences(table: SweepTable) -> dict[str, dict[str, Any]]:
    """Differences between the protocols that do not follow from the swept keys."""
    protocols = {run.name: (run.results or {}).get("protocol") or {} for run in table.runs}
    varied = {key.rpartition(".")[2] for key in table.keys}
    if any(key.partition(".")[0] == "model" for key in table.keys):
        varied.add("backbone")
    # A swept group (dataset=…, algorithm=…) also varies the keys that depend on the choice.
    groups = [index for index, key in enumerate(table.keys) if "." not in key]
    for name in {name for protocol in protocols.values() for name in protocol} if groups else ():
        seen: dict[tuple[str, ...], set[str]] = {}
        for setting in table.settings:
            choice = tuple(setting.values[index] for index in groups)
            for run in setting.runs:
                seen.setdefault(choice, set()).add(str(protocols[run.name].get(name)))
        if all(len(values) == 1 for values in seen.values()):
            varied.add(name)
    return protocol_differences(protocols, varied)


def _caption(table: SweepTable) -> str:
    seeds = sorted({len(setting.runs) for setting in table.settings if setting.runs})
    if seeds == [1]:
        return "one seed; 95% intervals over test tasks"
    count = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
    single = ", of a single seed over test tasks" if seeds[0] == 1 else ""
    return f"mean of {count} seeds; 95% intervals over seeds, for these test tasks{single}"


def _is_tie(first: Setting, second: Setting, selected_by: str) -> bool:
    estimates = [
        setting.validation if selected_by == "validation" else setting.test
        for setting in (first, second)
    ]
    means = [estimate.mean for estimate in estimates if estimate is not None]
    return len(means) == 2 and abs(means[0] - means[1]) < 1e-9


def _format(estimate: MetricEstimate | None, metric: str) -> str:
    return "—" if estimate is None else estimate.format(metric)
