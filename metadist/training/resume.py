"""Where a run starts from: nothing, or a checkpoint that fits."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from metadist.algorithms import Learner
from metadist.distributed import get_rank
from metadist.errors import UserError
from metadist.training.checkpoints import Checkpoints, read_checkpoint
from metadist.training.experiment import Experiment, Progress


def checkpoints_of(experiment: Experiment) -> Checkpoints:
    """The checkpoints in the run's directory."""
    return Checkpoints(experiment.directory / "checkpoints", experiment.trainer.keep_checkpoints)


def restore(experiment: Experiment) -> None:
    """Bring learner, optimizer and progress to where the run goes on, before any work starts.

    Every rank calls it; those that only serve have nothing to restore. Rank zero also makes the
    run's directory.

    Raises:
        UserError: a checkpoint that is not there, is damaged or does not fit; a directory that
            holds another run or cannot be written.
    """
    if get_rank() == 0:
        _make_writable(experiment.directory)
    if not experiment.strategy.runs_loop():
        return
    newest = checkpoints_of(experiment).newest()
    if experiment.resume is None:
        if newest is not None:
            raise UserError(
                f"{experiment.directory} holds the checkpoints of an earlier run: add resume=auto "
                "to go on with it, or choose another hydra.run.dir."
            )
        return
    path = newest if experiment.resume == "auto" else Path(experiment.resume)
    if path is None:
        return
    contents = read_checkpoint(path)
    _require_same(path, contents.get("identity", {}), identity(experiment.configuration))
    _load(path, experiment.learner, experiment.optimizer, contents)
    experiment.progress = Progress(**{key: contents[key] for key in Progress.__dataclass_fields__})
    if experiment.progress.iteration > experiment.trainer.iterations:
        raise UserError(
            f"the checkpoint {path} has {experiment.progress.iteration} iterations done, more than "
            f"trainer.iterations={experiment.trainer.iterations}: ask for more iterations."
        )
    if get_rank() == 0:
        for iteration, later in checkpoints_of(experiment).iterations():
            if iteration > experiment.progress.iteration:
                later.rename(later.with_suffix(".pt.aside"))  # of the course that is left


_IDENTITY = ("seed", "model", "algorithm", "task", "dataset", "optimizer", "reducer")
_MAY_CHANGE = ("dataset.root", "dataset.download")


def identity(configuration: Mapping[str, Any]) -> dict[str, str]:
    """What a run's numbers follow from, as dotted keys with their values as text.

    How long it runs, where, how it is carried out and what it logs do not belong to it.
    """
    found: dict[str, str] = {}

    def flatten(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, each in value.items():
                flatten(each, f"{path}.{key}")
        elif path not in _MAY_CHANGE:
            found[path] = str(value)

    for key in _IDENTITY:
        flatten(configuration.get(key), key)
    flatten(configuration["trainer"]["meta_batch_size"], "trainer.meta_batch_size")
    return found


def _require_same(path: Path, saved: Mapping[str, str], asked: Mapping[str, str]) -> None:
    for key in [*saved, *asked]:
        if saved.get(key) != asked.get(key):
            raise UserError(
                f"the checkpoint {path} is of another run: {key} was {saved.get(key)} there and is "
                f"{asked.get(key)} now; resume with the options that it was trained with."
            )


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"the run's directory {directory} cannot be written ({error.strerror}): choose another "
            "one, as in hydra.run.dir=DIR."
        ) from None


def _load(
    path: Path, learner: Learner, optimizer: torch.optim.Optimizer, contents: Mapping[str, Any]
) -> None:
    try:
        learner.load_state_dict(contents["learner"])
        optimizer.load_state_dict(contents["optimizer"])
    except (RuntimeError, ValueError, KeyError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UserError(
            f"the checkpoint {path} is of another model or optimizer than the configuration asks "
            f"for ({lines[1] if len(lines) > 1 else lines[0]}): give the options that it was "
            "trained with."
        ) from None
