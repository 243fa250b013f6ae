"""Report on a run or a folder of runs: metadist report FOLDER.

For a run directory it writes report.html, only from the files in the directory; the run may have
finished, be in progress or have failed. For a folder of runs, such as a sweep, it writes
report.html, sweep.csv, sweep.md and sweep.png, as at the end of a sweep, and prints the best
setting. Runs that differ only in the seed are one row with mean and 95% interval; the columns are
the overrides that differ between runs.
"""

from pathlib import Path

from metadist.cli.command import argument_parser
from metadist.loggers.console import print_plain
from metadist.reports.run_record import is_run
from metadist.reports.run_report import write_run_report
from metadist.reports.sweep_report import write_sweep_report


def main() -> None:
    """Report from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument(
        "folder",
        metavar="FOLDER",
        type=Path,
        help="the directory of a run, or one that holds runs at any depth",
    )
    folder = parser.parse_args().folder.resolve()
    if is_run(folder):
        print_plain(str(write_run_report(folder)))
    else:
        print_plain("\n".join(write_sweep_report(folder).summary_lines()))
