"""Interactive figures of a sweep; see `run_figures`."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from metadist.metrics import is_percentage, larger_is_better, metric_label
from metadist.plots.points import SettingData, sort_key, sort_values, validation_or_training
from metadist.plots.run_figures import (
    BLUE,
    COLORS,
    GREEN,
    ORANGE,
    PURPLE,
    Figure,
    axis,
    error_bars,
    finite,
    text,
    thin,
)

_MARGIN, _LARGEST_MARGIN = 60, 240
"""The margins beside parallel coordinates, in pixels."""

_CHARACTER, _TICK = 6, 12
"""The width of a character of a label, and the length of a tick, in pixels."""

MAX_CELLS = 400
"""The most cells of a heat map."""


def parallel_coordinates(
    settings: Sequence[SettingData], keys: Sequence[str], metric: str
) -> Figure:
    """One line for each setting through its values of the swept keys and its test metric."""
    dimensions = [
        _dimension(key, [setting.values[index] for setting in settings])
        for index, key in enumerate(keys)
    ]
    means = finite([setting.mean for setting in settings])
    finite_means = [mean for mean in means if mean is not None]
    number = {"tickformat": ".1%"} if is_percentage(metric) else {}
    dimensions.append({"label": f"test {metric_label(metric)}", "values": means, **number})
    low, high = min(finite_means, default=0.0), max(finite_means, default=1.0)
    line = {
        "color": means,
        "colorscale": [[0, BLUE], [0.5, PURPLE], [1, ORANGE]],
        "reversescale": not larger_is_better(metric),
        "showscale": False,
        "cmin": low,
        "cmax": high if high > low else low + 1e-9,
    }
    data = [{"type": "parcoords", "line": line, "dimensions": dimensions}]
    # Plotly fits no margins to this type of figure.
    ticks = max(len(setting.values[0]) for setting in settings) * _CHARACTER + _TICK
    half_label = len(keys[0]) * _CHARACTER // 2  # the label is centered above the axis
    left = min(max(_MARGIN, ticks, half_label), _LARGEST_MARGIN)
    return {"data": data, "layout": {"margin": {"l": left, "r": _MARGIN, "t": 60, "b": 20}}}


def heat_map(settings: Sequence[SettingData], keys: Sequence[str], metric: str) -> Figure | None:
    """The mean test metric by two swept keys, averaged over settings of the other keys.

    The two keys are those with most values. None if fewer than two keys have several values, or if
    the settings fill less than half of the cells.
    """
    indices = range(len(keys))
    values = [sort_values([setting.values[index] for setting in settings]) for index in indices]
    varied = [index for index in indices if len(values[index]) > 1]
    ranked = sorted(varied, key=lambda index: -len(values[index]))
    if len(ranked) < 2:
        return None
    column, row = ranked[:2]
    cells: dict[tuple[str, str], list[float]] = {}
    for setting in settings:
        cells.setdefault((setting.values[row], setting.values[column]), []).append(setting.mean)
    size = len(values[row]) * len(values[column])
    if size > MAX_CELLS or len(cells) * 2 < size:
        return None
    grid = [
        [float(np.mean(cells[r, c])) if (r, c) in cells else np.nan for c in values[column]]
        for r in values[row]
    ]
    template = "%{z:.1%}" if is_percentage(metric) else "%{z:.3g}"
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": [text(value) for value in values[column]],
        "y": [text(value) for value in values[row]],
        "z": [finite(line) for line in grid],
        "colorscale": "Viridis",
        "reversescale": not larger_is_better(metric),
        "hovertemplate": f"{text(keys[column])} %{{x}}<br>{text(keys[row])} %{{y}}<br>"
        f"test {metric_label(metric)} {template}<extra></extra>",
        "colorbar": {"thickness": 12, **({"tickformat": ".0%"} if is_percentage(metric) else {})},
    }
    if len(values[column]) <= 10:
        trace["texttemplate"] = template
    layout = {
        "xaxis": axis(keys[column], type="category"),
        "yaxis": axis(keys[row], type="category"),
    }
    return {"data": [trace], "layout": layout}


def settings_with_intervals(
    settings: Sequence[SettingData], names: Sequence[str], metric: str
) -> Figure:
    """The test metric of each setting with its 95% interval and all seeds, the best first."""
    named = zip(settings, map(text, names), strict=True)
    ranked = sorted(named, key=lambda pair: sort_key(pair[0].mean, metric))
    labels = [label for _, label in ranked]
    means = {
        "type": "scatter",
        "mode": "markers",
        "name": "mean, 95% interval",
        "x": finite([setting.mean for setting, _ in ranked]),
        "y": labels,
        "error_x": error_bars(
            [setting.ci95 or 0.0 for setting, _ in ranked], thickness=1.5, color=BLUE
        ),
        "marker": {
            "size": 9,
            "color": [GREEN if setting.best else BLUE for setting, _ in ranked],
        },
    }
    points = [
        (label, run, value) for setting, label in ranked for run, value in setting.seeds.items()
    ]
    seeds = {
        "type": "scatter",
        "mode": "markers",
        "name": "one run",
        "x": finite([value for _, _, value in points]),
        "y": [label for label, _, _ in points],
        "text": [text(run) for _, run, _ in points],
        "hovertemplate": "run %{text}: %{x}<extra></extra>",
        "marker": {"symbol": "line-ns-open", "size": 11, "color": ORANGE},
    }
    layout = {
        "xaxis": axis(f"test {metric_label(metric)}", metric),
        "yaxis": {"type": "category", "automargin": True, "autorange": "reversed"},
        "height": 150 + 26 * len(settings),
        "hovermode": "closest",
    }
    return {"data": [means, seeds], "layout": layout}


def compared_curves(
    runs: Mapping[str, Sequence[Mapping[str, Any]]], metric: str, groups: Mapping[str, str]
) -> Figure:
    """The validation metric of several runs; the smoothed training metric without validation.

    Runs of one group, such as the seeds of a setting, have the same color. The axis of the
    iterations is logarithmic if some runs are ten times as long as others.

    Args:
        runs: the metrics of each run by its name.
        metric: "accuracy" or "mse".
        groups: the group of each run by its name.
    """
    colors = dict(zip(dict.fromkeys(groups.values()), cycle(COLORS), strict=False))
    data, ends = [], []
    shown: set[str] = set()
    for name, metrics in runs.items():
        iterations, values, note = validation_or_training(metrics, metric)
        iterations, values = thin(iterations, values)
        if not len(values):
            continue
        ends.append(int(iterations[-1]))
        group = groups[name]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers" if len(values) < 40 else "lines",
                "x": iterations.tolist(),
                "y": finite(values),
                "name": text(group + note),
                "legendgroup": text(group),
                "showlegend": group not in shown,
                "line": {"color": colors[group], "width": 1.6},
                "hovertemplate": f"{text(name)}{note}: %{{y}} at %{{x}}<extra></extra>",
            }
        )
        shown.add(group)
    logarithmic = bool(ends) and max(ends) >= 10 * min(ends)
    layout = {
        "xaxis": axis("training iteration", **({"type": "log"} if logarithmic else {})),
        "yaxis": axis(f"validation {metric_label(metric)}", metric),
        "legend": {"y": -0.35, "yanchor": "top"},
        "margin": {"t": 20},
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}


def _dimension(key: str, values: Sequence[str]) -> dict[str, Any]:
    """An axis with one tick for each value, evenly spaced, so that 0.001 and 0.01 stay apart."""
    distinct = sort_values(values)
    ticks = range(len(distinct))
    return {
        "label": text(key),
        "values": [distinct.index(value) for value in values],
        "tickvals": list(ticks),
        "ticktext": [text(value) for value in distinct],
        "range": [-0.05, max(len(distinct) - 0.95, 0.05)],
    }
