"""The table of the baselines benchmark."""

import statistics

from benchmarks.programs import REFERENCE, machine_title
from benchmarks.results import table

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


def table_of(speeds: Speeds, timeout: float) -> str:
    """A table with one row per program and one column per setting."""
    rows = [[program, *cells(speeds, program, timeout)] for program in programs_of(speeds)]
    title = f"{machine_title()}; medians of {rounds_of(speeds)} rounds"
    return table(title, [HEAD, *speeds], rows)
