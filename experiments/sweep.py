"""Table and plot of a folder of runs: python experiments/sweep.py FOLDER, or metadist report."""

import sys

from metadist.cli.report import main

if __name__ == "__main__":
    sys.exit(main())
