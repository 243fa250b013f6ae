"""The command: `make fuzz ARGS="--configurations 200 --files 200 --seed 0"`."""

import sys

from fuzzing.corpus import main

if __name__ == "__main__":
    sys.exit(main())
