"""The command: python experiments/bad_inputs."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bad_inputs.report import main

if __name__ == "__main__":
    sys.exit(main())
