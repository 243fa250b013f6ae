"""Faults, for real: `make faults`, or `python experiments/faults PART … --number 20 --seed 0`.

Real processes are killed, frozen and cut off; tables say what became of them, here and under
outputs/faults/. The parts: kills, restarts, endings, inputs, doors, hosts.
"""

import argparse
import datetime
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import doors
import endings
import hosts
import inputs
import kills
import restarts
from runs import ROOT
from tables import save, show

PARTS: dict[str, Callable[[Path, argparse.Namespace], Sequence[Any]]] = {
    "kills": lambda folder, options: kills.rows(folder, options.number, options.seed),
    "restarts": lambda folder, options: restarts.rows(folder, options.restarts, options.seed),
    "endings": lambda folder, options: endings.rows(folder, options.timeout, options.only),
    "inputs": lambda folder, options: inputs.rows(options.seed),
    "doors": lambda folder, options: doors.rows(folder),
    "hosts": lambda folder, options: hosts.rows(folder, options.timeout),
}


def main() -> int:
    """Run the chosen parts; 1 if anything was not as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, prog="experiments/faults")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}: all")
    parser.add_argument("--number", type=int, default=20, help="kills (20)")
    parser.add_argument("--restarts", type=int, default=10, help="restarts in a row (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (0)")
    parser.add_argument("--timeout", type=float, default=30.0, help="timeout_seconds (30)")
    parser.add_argument("--only", default="", help="endings: faults with this in their name")
    options = parser.parse_args()
    if strangers := set(options.parts) - set(PARTS):
        parser.error(f"no such part: {', '.join(strangers)}")
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    results = ROOT / "outputs" / "faults" / stamp
    good = True
    for part in options.parts or PARTS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="metadist-faults-") as folder:
            rows = PARTS[part](Path(folder), options)
        good &= all(row.good for row in rows)
        save(results, part, rows)
        show(part, rows, time.monotonic() - began)
    print(f"\ntables in {results}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
