"""Folders of runs as the reproduction leaves them."""

import json
from pathlib import Path

PROTOCOL = {"ways": 5, "shots": 1, "queries": 1, "dataset": "omniglot", "eval_inner_steps": 3}


def fake(directory: Path, preset: str, seed: int, **results) -> None:
    """A run's folder, finished if there are results."""
    directory.mkdir(parents=True)
    plan = {"preset": preset, "seed": seed, "iterations": 600, "options": []}
    (directory / "reproduction.json").write_text(json.dumps(plan))
    (directory / "log.txt").write_text("a line\nerror: the disk is full.\nanother\n")
    if results:
        base = {"ci95": 0.02, "wall_seconds": 60.0, "strategy": "rpc", "world_size": 2}
        (directory / "results.json").write_text(json.dumps(base | results))
