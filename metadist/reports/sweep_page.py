"""The HTML report on a sweep, made from its table and the metrics of its runs."""

import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from metadist import __version__
from metadist.loggers import METRICS_FILE
from metadist.metrics import format_metric, metric_label
from metadist.plots import (
    Figure,
    SettingData,
    compared_curves,
    heat_map,
    parallel_coordinates,
    settings_with_intervals,
)
from metadist.plots.points import sort_key
from metadist.reports.comparison import MISSING
from metadist.reports.html_document import write_html
from metadist.reports.run_directory import HTML_FILE
from metadist.reports.run_record import RunRecord, format_time
from metadist.reports.sweep_table import MetricEstimate, Setting, SweepTable

_MAX_CURVES = 60
_MAX_SETTINGS = 60
_MAX_METRICS_BYTES = 200_000_000


def write_sweep_page(
    folder: Path,
    table: SweepTable,
    runs: Sequence[RunRecord],
    warnings: Sequence[str],
) -> Path:
    """Write `report.html` into a folder of runs. One process calls it.

    Args:
        folder: the folder with the run directories.
        table: the settings of the runs.
        runs: all runs, including failed and unfinished ones.
        warnings: the differences between the protocols in keys that were not swept.

    Raises:
        UserError: the metrics of a run cannot be read, or the file cannot be written.
    """
    figures = sweep_figures(table)
    context = _context(folder, table, runs, warnings)
    return write_html(folder / HTML_FILE, "sweep.html.jinja", context, figures)


def sweep_figures(table: SweepTable) -> dict[str, Figure]:
    """The figures of the report by the id of their HTML element; {} if no run has finished."""
    metric, points = table.metric, setting_points(table)
    if not points:
        return {}
    data = [point for point, _ in points]
    best = sorted(data, key=lambda point: sort_key(point.mean, metric))[:_MAX_SETTINGS]
    shown = [pair for pair in points if pair[0].best or pair[0] in best]
    names = [table.describe(setting, short=True) for _, setting in shown]
    figures = {"settings": settings_with_intervals([point for point, _ in shown], names, metric)}
    if table.keys and len(data) > 1:
        figures["parallel"] = parallel_coordinates(data, table.keys, metric)
        if (cells := heat_map(data, table.keys, metric)) is not None:
            figures["heat-map"] = cells
    metrics: dict[str, Sequence[Mapping[str, Any]]] = {}
    groups: dict[str, str] = {}
    size = 0
    for name, (_, setting) in zip(names, shown, strict=True):
        for run in setting.runs:
            path = run.directory / METRICS_FILE
            if path.exists() and len(metrics) < _MAX_CURVES and size < _MAX_METRICS_BYTES:
                size += path.stat().st_size
                metrics[run.name], groups[run.name] = run.metrics, name
    if metrics:
        figures["curves"] = compared_curves(metrics, metric, groups)
    return figures


def setting_points(table: SweepTable) -> list[tuple[SettingData, Setting]]:
    """The settings with a test metric, each with the data of its point in plots."""
    points = []
    for index, setting in enumerate(table.settings):
        if (test := setting.test) is not None:
            values = ((run.name, run.result(f"test_{table.metric}")) for run in setting.runs)
            seeds = {name: value for name, value in values if value is not None}
            best = index == table.best
            points.append((SettingData(setting.values, test.mean, test.ci95, best, seeds), setting))
    return points


def _context(
    folder: Path, table: SweepTable, runs: Sequence[RunRecord], warnings: Sequence[str]
) -> dict[str, Any]:
    failed = [run for run in runs if run.failed]
    unfinished = [run for run in runs if run.unfinished]
    return {
        "version": __version__,
        "made": format_time(time.time()),
        "title": f"{len(runs) - len(table.repeated)} runs of {folder.name}",
        "directory": str(folder),
        "metric_name": metric_label(table.metric),
        "selected_by": table.selected_by,
        "best": _best(table),
        "facts": [
            ("finished", str(len(table.runs))),
            ("failed", str(len(failed))),
            ("unfinished", str(len(unfinished))),
            ("settings", str(len(table.settings))),
        ],
        "keys": table.keys,
        "incomplete": bool(failed or unfinished),
        "rows": [_row(table, index) for index in range(len(table.settings))],
        "finished": len(table.runs),
        "different": table.descriptions()[1],
        "warnings": warnings,
        "remarks": table.remarks(),
        "failed": [{"name": run.name, "failure": run.error} for run in failed],
        "protocol": [
            (name.partition(".")[2], values[0])
            for name, values in table.described.items()
            if len(values) == 1
        ],
        "commands": [
            ("Make this report again", f"metadist report {shlex.quote(str(folder))}"),
            *(
                (
                    f"Report on run {run.name}",
                    f"metadist report {shlex.quote(str(run.directory))}",
                )
                for run in [*failed, *unfinished][:3]
            ),
        ],
    }


def _best(table: SweepTable) -> dict[str, str] | None:
    if table.best is None or (estimate := table.settings[table.best].test) is None:
        return None
    setting = table.settings[table.best]
    return {
        "value": format_metric(estimate.mean, table.metric),
        "interval": "" if estimate.ci95 is None else format_metric(estimate.ci95, table.metric),
        "setting": table.describe(setting, short=True),
        "over": setting.interval,
    }


def _row(table: SweepTable, index: int) -> dict[str, Any]:
    setting = table.settings[index]
    all_runs = [*setting.runs, *setting.failed, *setting.unfinished]
    return {
        "cells": setting.values,
        "best": index == table.best,
        "seeds": len(setting.runs),
        "incomplete": len(setting.failed) + len(setting.unfinished),
        "numbers": [
            _cell(setting.validation, table.metric),
            _cell(setting.test, table.metric),
            _cell(setting.train_loss, "loss"),
        ],
        "runs": [
            {
                "name": run.name,
                # Without ./ a name such as "a:b" would be read as a URL scheme.
                "link": f"./{quote(os.fsencode(run.name))}/{HTML_FILE}" if _has_page(run) else "",
            }
            for run in all_runs
        ],
    }


def _has_page(run: RunRecord) -> bool:
    return run.name != "." and (run.directory / HTML_FILE).is_file()


def _cell(estimate: MetricEstimate | None, metric: str) -> dict[str, Any]:
    if estimate is None:
        return {"value": "", "text": MISSING}
    return {"value": estimate.mean, "text": estimate.format(metric)}
