"""Table and plot of a folder of runs: python experiments/sweep.py FOLDER.

Writes sweep.csv, sweep.md and sweep.png into the folder, as at the end of a sweep, and prints the
best setting. Runs that differ in their seed alone are one row, with mean and 95% interval; the
columns are the keys that the command lines of the runs set to different values.
"""

import argparse
import sys
from pathlib import Path

from metadist.cli import exit_status
from metadist.reports import write_sweep_report


def main() -> int:
    """Write the report of the folder on the command line; returns the exit status."""
    about = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=about[1])
    parser.add_argument("folder", type=Path, help="holds the runs' directories, at any depth")
    folder = parser.parse_args().folder.resolve()
    return exit_status(lambda: print("\n".join(write_sweep_report(folder).summary_lines())))


if __name__ == "__main__":
    sys.exit(main())
