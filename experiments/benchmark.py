"""Benchmarks: python experiments/benchmark.py {baselines,scaling,overhead,gpu} [OPTIONS].

baselines  training speed of metadist and of other implementations on the same tasks
scaling    step time by workers, tasks and parameters, and a cost model for more workers
overhead   cost of the framework itself
gpu        correctness and speed on one GPU
"""

import argparse
import signal
import sys

from benchmarks import baselines, gpu, overhead, scaling

COMMANDS = {"baselines": baselines, "scaling": scaling, "overhead": overhead, "gpu": gpu}


def main() -> None:
    """Run a benchmark from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in COMMANDS.items():
        command = commands.add_parser(
            name, description=module.__doc__, formatter_class=argparse.RawTextHelpFormatter
        )
        module.add_arguments(command)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that programs are terminated
    COMMANDS[options.command].run(options)


if __name__ == "__main__":
    main()
