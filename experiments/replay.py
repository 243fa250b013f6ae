"""Replay a task: python experiments/replay.py RUN --key 0,train,17,3, or metadist replay."""

import sys

from metadist.cli.replay import main

if __name__ == "__main__":
    sys.exit(main())
