"""Arguments after the script are passed to every process unchanged.

    torchrun --standalone --nproc_per_node=2 experiments/primitives/arguments.py 1 2 --name "a b"

Options before the script are torchrun's.
"""

import argparse
import os


def main() -> None:
    """Parse and print the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--name", default="none")
    arguments = parser.parse_args()
    rank = os.environ.get("RANK", "-")
    print(f"[{rank}] numbers={arguments.numbers} name={arguments.name!r}\n", end="")


if __name__ == "__main__":
    main()
