"""Show what SLURM would get: python experiments/slurm.py maml hydra/launcher=submitit_slurm.

It composes the script of one job of a sweep, as `python experiments/maml.py -m …` with the same
words behind `-m` submits it (through submitit, `pip install -e '.[sweeps]'`), and submits nothing.
Each job starts a world of its own with launcher=torchrun launcher.nproc_per_node=4
hydra.launcher.gpus_per_node=4.
"""

import argparse
import sys
from pathlib import Path

from metadist.cli import exit_status
from metadist.launchers.slurm import slurm_script


def main() -> int:
    """Read the command line and print the script; the exit status."""
    about = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=about[1])
    parser.add_argument("experiment", choices=["maml", "ddp"])
    parser.add_argument("overrides", nargs="*", help="the words of the sweep's command")
    options = parser.parse_args()
    conf = Path(__file__).resolve().parent.parent / "conf"
    return exit_status(lambda: print(slurm_script(conf, options.experiment, options.overrides)))


if __name__ == "__main__":
    sys.exit(main())
