"""Table and plot of a folder of runs: metadist report FOLDER.

Writes sweep.csv, sweep.md and sweep.png into the folder, as a sweep does at its end, and prints the
best setting. Runs that differ in the seed only are one row with mean and 95% interval; the columns
are the overrides that differ between runs. The folder may also be a single run's directory.
"""

import argparse
from pathlib import Path

from metadist.cli.main import exit_status
from metadist.reports.sweep_report import write_sweep_report


def main() -> int:
    """Report from the command line; returns the exit status."""
    _, description = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("folder", type=Path, help="contains the run directories, at any depth")
    folder = parser.parse_args().folder.resolve()
    return exit_status(lambda: print("\n".join(write_sweep_report(folder).summary_lines())))
