"""The table and the picture of a folder of runs: python experiments/sweep.py FOLDER.

It writes sweep.csv, sweep.md and sweep.png into the folder, as a sweep does at its end, and says
which setting was best. Runs that differ in their seed alone are one row, with the mean and its 95%
interval; what the runs' command lines set to different values are the columns.
"""

import argparse
import sys
from pathlib import Path

from metadist.cli import exit_status
from metadist.training import report_on


def main() -> int:
    """Read the command line and report; the exit status."""
    about = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=about[1])
    parser.add_argument("folder", type=Path, help="holds the runs' directories, at any depth")
    folder = parser.parse_args().folder.resolve()
    return exit_status(lambda: print("\n".join(report_on(folder).lines())))


if __name__ == "__main__":
    sys.exit(main())
