"""Fault injection on real runs: `make faults ARGS="PART … --number 20 --seed 0"`.

Processes are killed, frozen or disconnected. The outcome of each fault is printed and saved as a
table in outputs/faults/. Parts: kills, restarts, endings, inputs, ports, scans, hosts.
"""

import argparse
import datetime
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from faults import endings, hosts, inputs, kills, listening_ports, restarts
from faults.runs import ROOT
from faults.tables import print_table, save

PARTS: dict[str, Callable[[Path, argparse.Namespace], Sequence[Any]]] = {
    "kills": lambda folder, options: kills.rows(folder, options.number, options.seed),
    "restarts": lambda folder, options: restarts.rows(folder, options.restarts, options.seed),
    "endings": lambda folder, options: endings.rows(
        folder, options.timeout, options.only, options.processes
    ),
    "inputs": lambda folder, options: inputs.rows(options.seed),
    "ports": lambda folder, options: listening_ports.rows(folder),
    "scans": lambda folder, options: listening_ports.scans(folder),
    "hosts": lambda folder, options: hosts.rows(folder, options.timeout, options.processes),
}


def main() -> int:
    """Run the chosen parts.

    Returns:
        The exit status: 1 if any row of a table failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m faults")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}: all")
    parser.add_argument("--number", type=int, default=20, help="kills (20)")
    parser.add_argument("--restarts", type=int, default=10, help="restarts in a row (10)")
    parser.add_argument("--seed", type=int, default=0, help="of the random moments (0)")
    parser.add_argument("--timeout", type=float, default=30.0, help="timeout_seconds (30)")
    parser.add_argument("--only", default="", help="endings: faults whose name contains this")
    parser.add_argument("--processes", type=int, default=2, help="endings, hosts: of a run (2)")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown part {', '.join(unknown)}: choose from {', '.join(PARTS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that runs are ended
    stamp = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    results = ROOT / "outputs" / "faults" / stamp
    passed = True
    for part in options.parts or PARTS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="metadist-faults-") as folder:
            rows = PARTS[part](Path(folder), options)
        passed &= all(row.passed for row in rows)
        save(results, part, rows)
        print_table(part, rows, time.monotonic() - started)
    print(f"\ntables in {results}")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
