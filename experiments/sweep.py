"""Table and plot of a folder of runs: python experiments/sweep.py FOLDER.

Writes sweep.csv, sweep.md and sweep.png into the folder, as a sweep does at its end, and prints the
best setting. Runs that differ in the seed only are one row with mean and 95% interval; the columns
are the overrides that differ between runs.
"""

import argparse
import sys
from pathlib import Path

from metadist.launchers.answering import answer
from metadist.training import report_on


def main() -> int:
    """Report from the command line; returns the exit status."""
    _, description = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="contains the run directories, at any depth")
    folder = parser.parse_args().folder.resolve()
    return answer(lambda: print("\n".join(report_on(folder).lines())))


if __name__ == "__main__":
    sys.exit(main())
