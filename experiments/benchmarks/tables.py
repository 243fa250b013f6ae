"""What the rounds came to, as a table, as Markdown and as a picture."""

import statistics
from pathlib import Path

from benchmarks.programs import RIVAL, machine
from rich.table import Table

from metadist.plots.style import BLUE, GREY, INK, new_figure, save_figure, style_axes

Figures = dict[str, dict[str, list[float | None]]]
"""Tasks a second by setting, program and round; None for a run that came to nothing."""

HEAD = f"tasks a second (times {RIVAL})"


def ratio(found: dict[str, list[float | None]], program: str) -> float | None:
    """The median over rounds of a program's speed as a multiple of the rival's; None if it
    came to nothing.
    """
    pairs = zip(found[program], found[RIVAL], strict=True)
    ratios = [speed / other for speed, other in pairs if speed is not None and other is not None]
    return statistics.median(ratios) if ratios else None


def cells(figures: Figures, program: str, patience: float) -> list[str]:
    """A program's row, a cell a setting."""
    row = []
    for found in figures.values():
        speeds = [speed for speed in found[program] if speed is not None]
        times = ratio(found, program)
        hung = f"no result within {patience:.0f} s" if None in found[program] else ""
        figure = "" if times is None else f"{statistics.median(speeds):.1f} ({times:.2f})"
        row.append("; ".join(part for part in (figure, hung) if part))
    return row


def programs_of(figures: Figures) -> list[str]:
    """The programs' names, in order."""
    return list(next(iter(figures.values())))


def rounds_of(figures: Figures) -> int:
    """How many rounds all programs have run."""
    return min(len(each) for found in figures.values() for each in found.values())


def _title(figures: Figures) -> str:
    processor, *versions = machine().items()
    words = [processor[1], *(f"{name} {value}" for name, value in versions)]
    return f"{', '.join(words)}; medians of {rounds_of(figures)} rounds"


def table_of(figures: Figures, patience: float) -> Table:
    """A row a program, a column a setting."""
    table = Table(title=_title(figures))
    table.add_column(HEAD)
    for setting in figures:
        table.add_column(setting, justify="right")
    for program in programs_of(figures):
        table.add_row(program, *cells(figures, program, patience))
    return table


def markdown(figures: Figures, patience: float) -> str:
    """The same for a README."""
    rows = [[HEAD, *figures], ["---"] * (1 + len(figures))]
    rows += [[p, *cells(figures, p, patience)] for p in programs_of(figures)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([*lines, "", f"{_title(figures)}."]) + "\n"


def bars(figures: Figures, path: Path) -> None:
    """Each setting's ratios as bars, the rival's a line at 1."""
    programs = programs_of(figures)
    figure = new_figure(
        max(9.5, 3.0 + 2.6 * len(figures)),
        1.7 + 0.42 * len(programs),
        "Speed of MAML training: tasks a second, as multiples of a hand-written PyTorch loop",
    )
    grid = figure.subplots(1, len(figures), squeeze=False, sharey=True)[0]
    most = max(ratio(found, p) or 0 for found in figures.values() for p in programs)
    for axes, (setting, found) in zip(grid, figures.items(), strict=True):
        for place, program in enumerate(programs):
            times = ratio(found, program)
            ours = program.startswith("metadist")
            axes.barh(place, times or 0, color=BLUE if ours else GREY, height=0.7)
            text = "no result" if times is None else f"{times:.2f}×"
            axes.text((times or 0) + 0.03 * most, place, text, va="center", fontsize=9, color=INK)
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlim(0, 1.25 * most)
        axes.set_yticks(range(len(programs)), programs, fontsize=9)
        axes.invert_yaxis() if axes is grid[0] else None
        axes.set_title(_words(setting), fontsize=9, color=INK)
        style_axes(axes, grid=None)
    figure.supxlabel(_title(figures), fontsize=8, color=GREY)
    save_figure(figure, path)


def _words(setting: str) -> str:
    """`T8 K1 Q15 S5 max` for people."""
    tasks, shots, queries, steps, pooling = setting.split()
    asked = "1 query" if queries == "Q1" else f"{queries[1:]} queries"
    return (
        f"{tasks[1:]} tasks a step, 5-way {shots[1:]}-shot\n"
        f"{asked} a class, {steps[1:]} inner step{'s' * (steps != 'S1')}\n"
        f"conv4 with {'max-pooling' if pooling == 'max' else 'stride 2'}"
    )
