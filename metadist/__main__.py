"""python -m metadist, and torchrun … -m metadist: the `metadist` command."""

import sys

from metadist.cli.command import main

if __name__ == "__main__":
    sys.exit(main())
