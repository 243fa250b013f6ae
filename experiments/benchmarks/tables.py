"""Results of the baselines benchmark: table, Markdown and plot."""

import statistics
from pathlib import Path

from benchmarks.programs import REFERENCE, machine
from rich.table import Table

from metadist.plots.style import BLUE, GREY, INK, new_figure, save_figure, style_axes

Speeds = dict[str, dict[str, list[float | None]]]
"""Tasks per second by setting, program and round; None for a failed run."""

HEAD = f"tasks/s (relative to {REFERENCE})"


def ratio(found: dict[str, list[float | None]], program: str) -> float | None:
    """The median over rounds of a program's speed relative to the reference; None without one."""
    pairs = zip(found.get(program, []), found[REFERENCE], strict=False)
    ratios = [speed / reference for speed, reference in pairs if None not in (speed, reference)]
    return statistics.median(ratios) if ratios else None


def cells(speeds: Speeds, program: str, timeout: float) -> list[str]:
    """The cells in the row of a program, one per setting."""
    row = []
    for program_speeds in speeds.values():
        if program not in program_speeds:
            row.append("")
            continue
        finished = [speed for speed in program_speeds[program] if speed is not None]
        relative = ratio(program_speeds, program)
        failed = f"failed or over {timeout:.0f} s" if None in program_speeds[program] else ""
        value = f"{statistics.median(finished):.1f}" if finished else ""
        value += "" if relative is None else f" ({relative:.2f})"
        row.append("; ".join(part for part in (value, failed) if part))
    return row


def programs_of(speeds: Speeds) -> list[str]:
    """The names of the programs, in order."""
    return list(dict.fromkeys(program for programs in speeds.values() for program in programs))


def rounds_of(speeds: Speeds) -> int:
    """The number of rounds that all programs have completed."""
    return min(len(rounds) for programs in speeds.values() for rounds in programs.values())


def _title(speeds: Speeds) -> str:
    processor, *versions = machine().items()
    parts = [processor[1], *(f"{name} {value}" for name, value in versions)]
    return f"{', '.join(parts)}; medians of {rounds_of(speeds)} rounds"


def table_of(speeds: Speeds, timeout: float) -> Table:
    """A table with one row per program and one column per setting."""
    table = Table(title=_title(speeds))
    table.add_column(HEAD)
    for setting in speeds:
        table.add_column(setting, justify="right")
    for program in programs_of(speeds):
        table.add_row(program, *cells(speeds, program, timeout))
    return table


def markdown(speeds: Speeds, timeout: float) -> str:
    """The table in Markdown."""
    rows = [[HEAD, *speeds], ["---"] * (1 + len(speeds))]
    rows += [[program, *cells(speeds, program, timeout)] for program in programs_of(speeds)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", f"{_title(speeds)}."]) + "\n"


def plot_speedups(speeds: Speeds, path: Path) -> None:
    """Bar chart of the relative speeds, one panel per setting."""
    programs = programs_of(speeds)
    figure = new_figure(
        max(9.5, 3.0 + 2.6 * len(speeds)),
        1.7 + 0.42 * len(programs),
        "MAML training speed relative to a hand-written PyTorch loop",
    )
    grid = figure.subplots(1, len(speeds), squeeze=False, sharey=True)[0]
    most = max(ratio(values, name) or 0 for values in speeds.values() for name in programs)
    for axes, (setting, program_speeds) in zip(grid, speeds.items(), strict=True):
        for index, program in enumerate(programs):
            relative = ratio(program_speeds, program)
            ours = program.startswith("metadist")
            axes.barh(index, relative or 0, color=BLUE if ours else GREY, height=0.7)
            text = "no result" if relative is None else f"{relative:.2f}×"
            axes.text(
                (relative or 0) + 0.03 * most, index, text, va="center", fontsize=9, color=INK
            )
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, 1.25 * most)
        axes.set_yticks(range(len(programs)), programs, fontsize=9)
        axes.invert_yaxis() if axes is grid[0] else None
        axes.set_title(_describe(setting), fontsize=9, color=INK)
        style_axes(axes, grid=None)
    figure.supxlabel(_title(speeds), fontsize=8, color=GREY)
    save_figure(figure, path)


def _describe(setting: str) -> str:
    """A panel title for a setting such as `20-way T8 K1 Q15 S5 max`."""
    *prefix, tasks, shots, queries, steps, model = setting.split()
    ways = next((part for part in prefix if part.endswith("-way")), "5-way")
    size = "".join(f" {part}" for part in prefix if "×" in part)
    names = {"max": "conv4 with max-pooling", "stride": "conv4 with stride 2"}
    query_count = "1 query" if queries == "Q1" else f"{queries[1:]} queries"
    return (
        f"{tasks[1:]} tasks per step, {ways} {shots[1:]}-shot\n"
        f"{query_count} per class, {steps[1:]} inner step{'s' * (steps != 'S1')}\n"
        f"{names.get(model, 'sine waves, MLP 40-40')}{size}"
    )
