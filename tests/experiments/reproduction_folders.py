"""Run directories as the reproduction leaves them."""

import json
from pathlib import Path

PROTOCOL = {
    **{"ways": 5, "shots": 1, "queries": 1, "dataset": "omniglot", "eval_inner_steps": 3},
    "test_rotations": True,
}


def overrides_of(preset: str, seed: int, *options: str) -> list[str]:
    """The overrides of a run with 600 iterations."""
    return [f"+experiment={preset}", f"seed={seed}", "trainer.iterations=600", *options]


def create_run(
    directory: Path, preset: str, seed: int, /, *options: str, **results: object
) -> None:
    """Create the directory of a run, finished if there are results, else unfinished."""
    (directory / ".hydra").mkdir(parents=True)
    overrides = overrides_of(preset, seed, *options)
    (directory / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
    if results:
        base: dict[str, object] = {
            "ci95": 0.02,
            "wall_seconds": 60.0,
            "strategy": "rpc",
            "world_size": 2,
        }
        base["method"] = {"algorithm": "MAML", "options": {"inner_lr": 0.4}}
        (directory / "results.json").write_text(json.dumps(base | results))


def create_failed_run(directory: Path, preset: str, seed: int, error: str, *options: str) -> None:
    """Create the directory of a run that failed before training."""
    directory.mkdir(parents=True, exist_ok=True)
    overrides = overrides_of(preset, seed, *options)
    failure = {"error": error, "exit_status": 1, "overrides": overrides}
    (directory / "failure.json").write_text(json.dumps(failure))
