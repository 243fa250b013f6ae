"""Arguments after the script's name reach every copy of it unchanged.

    torchrun --standalone --nproc_per_node=2 experiments/primitives/arguments.py 1 2 --name "a b"

Options before the script's name are torchrun's own.
"""

import argparse
import os


def main() -> None:
    """Parse the command line, as any script would."""
    parser = argparse.ArgumentParser()
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--name", default="nobody")
    arguments = parser.parse_args()
    rank = os.environ.get("RANK", "-")
    print(f"[{rank}] numbers={arguments.numbers} name={arguments.name!r}\n", end="")


if __name__ == "__main__":
    main()
