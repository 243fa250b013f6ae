"""The papers' tables: python experiments/reproduce.py maml_sinusoid --seeds 3 --jobs 2.

`--help` says what can be asked for, `--list` which presets there are.
"""

import sys

from reproduction.command import main

if __name__ == "__main__":
    sys.exit(main())
