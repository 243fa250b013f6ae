"""Training speed of metadist and of the baselines on the same tasks.

python experiments/benchmark.py baselines --rounds 5

Every program runs in new processes, interleaved (A B C A B C …), so that background load affects
all of them. The table has the medians of the ratios within a round. A step is complete: data,
partition, gradient, reduce, outer step. Baselines that are not installed (pip install -e
'.[baselines]') are skipped. A program that fails, or takes longer than --timeout seconds and is
killed, is not run again at that setting.
"""

import argparse
from pathlib import Path

from benchmarks.programs import (
    PROGRAMS,
    REFERENCE,
    SETTINGS,
    Program,
    ProgramFailed,
    Setting,
    installed,
)
from benchmarks.results import console, save
from benchmarks.tables import Speeds, table_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="settings whose name contains this")
    parser.add_argument("--programs", default="", help="programs whose name contains this")
    parser.add_argument("--timeout", type=float, default=180, help="seconds per program")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark"))


def run(options: argparse.Namespace) -> None:
    """Run the rounds and save the results after each setting."""
    settings = [setting for setting in SETTINGS if options.only in str(setting)]
    programs = [
        program
        for program in PROGRAMS
        if installed(program.requires)
        and (program.name == REFERENCE or options.programs in program.name)
    ]
    if not settings:
        raise SystemExit(
            f"error: --only {options.only} matches no setting: choose from "
            f"{', '.join(map(str, SETTINGS))}"
        )
    speeds: Speeds = {
        str(setting): {program.name: [] for program in programs if setting.model in program.models}
        for setting in settings
    }
    for number in range(1, options.rounds + 1):
        for setting in settings:
            for program in [p for p in programs if p.name in speeds[str(setting)]]:
                measured = speeds[str(setting)][program.name]
                message = measure(program, setting, measured, options.timeout)
                console.print(f"round {number}, {setting}, {program.name}: {message}")
            save_speeds(options.out, speeds, options.timeout)
    save_speeds(options.out, speeds, options.timeout, show=True)


def measure(
    program: Program, setting: Setting, measured: list[float | None], timeout: float
) -> str:
    """Run a program once and append its tasks per second, or None if it fails, to `measured`.

    A program that has failed before is not run again.

    Returns:
        A message for the console.
    """
    if None in measured:
        measured.append(None)
        return "skipped after a failure"
    try:
        speed = program.measure(setting, timeout)
    except ProgramFailed as error:
        measured.append(None)
        return f"no result: {error}"
    measured.append(speed)
    return f"{speed:.1f} tasks/s"


def save_speeds(out: Path, speeds: Speeds, timeout: float, show: bool = False) -> None:
    """Save the rounds so far; see `save`."""
    data = {"tasks_per_second": speeds, "timeout": timeout}
    save(out / "benchmark", data, [table_of(speeds, timeout)], show)
