"""Replay a single task of a run: metadist replay RUN --key 0,train,17,3.

Prints the loss of the task and its gradient for each parameter, with the same bits as in the run,
and plots the task into RUN/replays. A key is seed,split,iteration,index, as reported for a task
with a non-finite loss.
"""

import argparse
from pathlib import Path

from metadist.cli.main import exit_status
from metadist.config import load_experiment
from metadist.training.replay import parse_key, replay


def main() -> int:
    """Replay from the command line; returns the exit status."""
    _, description = (__doc__ or "").split("\n\n", 1)
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("directory", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--key", required=True, help="seed,split,iteration,index")
    parser.add_argument("--checkpoint", type=Path, help="load the parameters from this checkpoint")
    parser.add_argument(
        "--trust-code", action="store_true", help="build any class that the run names"
    )
    options = parser.parse_args()

    def show() -> None:
        key = parse_key(options.key)
        experiment = load_experiment(options.directory.resolve(), trust_code=options.trust_code)
        print("\n".join(replay(experiment, key, options.checkpoint).lines()))

    return exit_status(show)
