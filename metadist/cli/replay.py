"""Replay a single task of a run: metadist replay RUN --key 0,train,17,3.

Prints the loss of the task and the norm of its gradient for each parameter, and plots the task into
RUN/replays. On CPUs the bits are those of the run; they are equal up to rounding if it was compiled
or used distributed autograd or the engine "ddp". A key is seed,split,iteration,index, as reported
for a task with a non-finite loss.
"""

from pathlib import Path

from metadist.cli.command import add_trust_code, argument_parser
from metadist.config import load_experiment
from metadist.loggers.console import print_plain
from metadist.training.replay import parse_key, replay


def main() -> None:
    """Replay from the command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("directory", metavar="RUN", type=Path, help="the run's directory")
    parser.add_argument("--key", required=True, help="seed,split,iteration,index")
    parser.add_argument("--checkpoint", type=Path, help="load the parameters from this checkpoint")
    parser.add_argument("--device", help="where to compute: cpu, cuda; default: the run's device")
    add_trust_code(parser)
    options = parser.parse_args()
    key = parse_key(options.key)
    overrides = [f"device={options.device}"] if options.device else []
    directory = options.directory.resolve()
    experiment = load_experiment(directory, *overrides, trust_code=options.trust_code)
    print_plain("\n".join(replay(experiment, key, options.checkpoint).lines()))
