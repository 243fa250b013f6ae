"""metadist and its rivals on the same tasks, in turn, as ratios.

python experiments/benchmark.py --rounds 5

Each program runs in fresh processes, A B C A B C …, so that what else the machine does meets all
alike; a round's ratio compares neighbours in time, and the table has the median over rounds. A
step is a whole one: data, partition, gradient, reduce, outer step. Rivals that are not installed
(pip install -e '.[baselines]') are left out; one that ends with an error, or gives no result within
--patience seconds and is killed, is not started at that setting again.
"""

import argparse
import json
from pathlib import Path

from benchmarks.programs import PROGRAMS, SETTINGS, Failed, Program, Setting, installed, machine
from benchmarks.tables import Figures, bars, markdown, table_of
from rich.console import Console


def main() -> None:
    """Run the rounds; save table, picture and figures after each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="settings whose name holds this")
    parser.add_argument("--programs", default="", help="beside the rival, those that hold this")
    parser.add_argument("--patience", type=float, default=180, help="seconds a program may take")
    parser.add_argument("--out", type=Path, default=Path("outputs/benchmark"))
    asked = parser.parse_args()
    settings = [setting for setting in SETTINGS if asked.only in str(setting)]
    programs = [
        program
        for place, program in enumerate(PROGRAMS)
        if installed(program.needs) and (not place or asked.programs in program.name)
    ]
    if not settings:
        parser.error(f"no setting's name holds {asked.only!r}: {', '.join(map(str, SETTINGS))}")
    figures: Figures = {str(s): {program.name: [] for program in programs} for s in settings}
    console = Console(highlight=False)
    for number in range(1, asked.rounds + 1):
        for setting in settings:
            for program in programs:
                so_far = figures[str(setting)][program.name]
                said = one(program, setting, so_far, asked.patience)
                console.print(f"round {number}, {setting}, {program.name}: {said}")
            save(asked.out, figures, asked.patience)
    console.print(table_of(figures, asked.patience))
    console.print(f"saved: {asked.out}/benchmark.txt, .md, .json, .png")


def one(program: Program, setting: Setting, so_far: list[float | None], patience: float) -> str:
    """One run: its tasks a second are added to those so far, None if it came to nothing, now or
    before. Returns what to say of it.
    """
    if None in so_far:
        so_far.append(None)
        return "not started again"
    try:
        found = program.measure(setting, patience)
    except Failed as error:
        so_far.append(None)
        return f"no result: {error}"
    so_far.append(found)
    return f"{found:.1f} tasks a second"


def save(out: Path, figures: Figures, patience: float) -> None:
    """Write what is known so far."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "benchmark.txt").open("w", encoding="utf-8") as file:
        Console(file=file, width=140).print(table_of(figures, patience))
    (out / "benchmark.md").write_text(markdown(figures, patience), encoding="utf-8")
    report = {"machine": machine(), "tasks_per_second": figures, "killed_after": patience}
    (out / "benchmark.json").write_text(json.dumps(report, indent=1), encoding="utf-8")
    bars(figures, out / "benchmark.png")
