"""Reproduce published results: python experiments/reproduce.py maml_sinusoid --seeds 3 --jobs 2.

`--help` lists the options, `--list` the presets.
"""

import sys

from reproduction.command import main

if __name__ == "__main__":
    sys.exit(main())
