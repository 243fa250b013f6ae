"""One task of a run once more: python experiments/replay.py RUN_DIRECTORY --key 0,train,17,3.

For debugging: it shows the task's loss and its gradient by each parameter, exactly as the run had
them, and draws the task into RUN_DIRECTORY/replays. A key is seed,split,iteration,index, as a run
reports it of a task that went wrong.
"""

import argparse
import sys
from pathlib import Path

from metadist.cli import exit_status
from metadist.config import load_experiment
from metadist.training import parse_key, replay


def main() -> int:
    """Read the command line and replay; the exit status."""
    about = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=about[1])
    parser.add_argument("directory", type=Path, help="the run's directory")
    parser.add_argument("--key", required=True, help="seed,split,iteration,index")
    parser.add_argument("--checkpoint", type=Path, help="take the state from this file, as it is")
    options = parser.parse_args()

    def show() -> None:
        key = parse_key(options.key)
        experiment = load_experiment(options.directory.resolve())
        print("\n".join(replay(experiment, key, options.checkpoint).lines()))

    return exit_status(show)


if __name__ == "__main__":
    sys.exit(main())
