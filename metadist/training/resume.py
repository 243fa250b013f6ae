"""Where a run starts from: nothing, or a checkpoint that fits."""

import logging
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from metadist.distributed import get_rank
from metadist.errors import UserError
from metadist.reports import CHECKPOINT_DIRECTORY, config_fingerprint
from metadist.training.checkpoints import (
    Checkpoints,
    DamagedCheckpoint,
    read_checkpoint,
    set_aside,
)
from metadist.training.experiment import Experiment, Progress

_log = logging.getLogger(__name__)


def checkpoints_of(experiment: Experiment) -> Checkpoints:
    """The checkpoints in the run's directory."""
    return Checkpoints(
        experiment.directory / CHECKPOINT_DIRECTORY, experiment.trainer.keep_checkpoints
    )


def contents_of(experiment: Experiment) -> dict[str, Any]:
    """Everything that a run's future follows from, beside its configuration.

    No random generator's state is among it, for none outlives a step: tasks and what is random
    in them (dropout) are keyed by (seed, split, iteration, index), and the generators of the
    process are set from (seed, iteration) before the optimizer's step. Where the record stands
    follows from the iteration.
    """
    x = experiment
    learner = x.learner.state_dict()
    return {
        **asdict(x.progress),
        "fingerprint": config_fingerprint(x.configuration),
        "learner": learner,
        # Buffers that a module keeps out of its state all the same change as it learns.
        "buffers": {
            name: buffer for name, buffer in x.learner.named_buffers() if name not in learner
        },
        "optimizer": x.optimizer.state_dict(),
        "scheduler": x.scheduler.state_dict(),
    }


def restore(experiment: Experiment) -> None:
    """Bring an experiment to where the run goes on, before any work starts.

    Every rank calls it; those that only serve have nothing to restore. Rank zero also makes the
    run's directory, sets damaged checkpoints aside, and those of a course that is left.

    Raises:
        UserError: a checkpoint that is not there, is damaged or does not fit; a directory that
            holds another run or cannot be written.
    """
    if get_rank() == 0:
        _make_writable(experiment.directory)
    if not experiment.strategy.runs_loop():
        return
    saved = checkpoints_of(experiment)
    if experiment.resume is None:
        if saved.candidates():
            raise UserError(
                f"{experiment.directory} holds the checkpoints of an earlier run: add resume=auto "
                "to go on with it, or choose another hydra.run.dir."
            )
        return
    if experiment.resume == "auto":
        found = _newest_good(saved)
    else:
        path = Path(experiment.resume)
        found = path, read_checkpoint(path)
    if found is not None:
        restore_from(experiment, *found)
    if get_rank() == 0:
        saved.set_aside_later(experiment.progress.iteration)


def restore_from(experiment: Experiment, path: Path, contents: Mapping[str, Any]) -> None:
    """Bring an experiment to the state of a checkpoint's contents.

    Raises:
        UserError: it is of another run, of other shapes, or beyond the run's end.
    """
    saved = contents.get("fingerprint")
    if not isinstance(saved, Mapping):
        raise UserError(f"the checkpoint {path} does not say which run it is of: take another one.")
    _require_same(path, saved, config_fingerprint(experiment.configuration))
    _load(path, experiment, contents)
    if experiment.progress.iteration > experiment.trainer.iterations:
        raise UserError(
            f"the checkpoint {path} has {experiment.progress.iteration} iterations done, more than "
            f"trainer.iterations={experiment.trainer.iterations}: ask for more iterations."
        )


def use_best(experiment: Experiment) -> int:
    """Put the best state by validation into the learner; at which iteration it was saved.

    The ranks that run the loop call it after training.

    Raises:
        UserError: there is none, for every validation came to NaN, or it is damaged.
    """
    saved = checkpoints_of(experiment)
    found = [path for number, path in saved.bests() if number <= experiment.progress.iteration]
    if not found:
        raise UserError(
            f"{saved.directory} holds no best checkpoint, for no validation came to a finite "
            "figure: resume with trainer.test_checkpoint=last to test the last state."
        )
    contents = read_checkpoint(found[-1])
    _load_learner(experiment, contents)
    return int(contents["iteration"])


def _newest_good(saved: Checkpoints) -> tuple[Path, dict[str, Any]] | None:
    """The newest checkpoint that is whole; rank zero sets those before it aside.

    Raises:
        UserError: there are some, and all are damaged.
    """
    damaged = []
    for path in saved.candidates():
        try:
            return path, read_checkpoint(path)
        except DamagedCheckpoint:
            damaged.append(path)
            if get_rank() == 0:
                aside = set_aside(path)
                _log.warning(
                    "%s is damaged: set aside as %s, going on from the one before it",
                    path,
                    aside.name,
                )
        except UserError:
            if path.exists():
                raise
            # Rank zero has set it aside in the meantime.
    if damaged:
        raise UserError(
            f"every checkpoint in {saved.directory} is damaged and was set aside: start anew "
            "without resume=auto, in another hydra.run.dir, or bring back a good copy."
        )
    return None


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


def _load_learner(experiment: Experiment, contents: Mapping[str, Any]) -> None:
    experiment.learner.load_state_dict(contents["learner"])
    buffers = dict(experiment.learner.named_buffers())
    for name, saved in contents["buffers"].items():
        buffers[name].copy_(saved)


def _load(path: Path, experiment: Experiment, contents: Mapping[str, Any]) -> None:
    try:
        _load_learner(experiment, contents)
        experiment.optimizer.load_state_dict(contents["optimizer"])
        experiment.scheduler.load_state_dict(contents["scheduler"])
        # Checkpoints of earlier versions say no more of how long the run had taken.
        saved = {"wall_seconds": contents["train_seconds"], **contents}
        progress = Progress(**{key: saved[key] for key in Progress.__dataclass_fields__})
        if not isinstance(progress.iteration, int) or progress.iteration < 0:
            raise ValueError(f"iteration {progress.iteration!r}")
        for seconds in (progress.train_seconds, progress.wall_seconds):
            if not isinstance(seconds, float) or not 0 <= seconds < float("inf"):
                raise ValueError(f"{seconds!r} seconds")
        experiment.progress = progress
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        lines = [line.strip() for line in str(error).splitlines()]
        raise UserError(
            f"the checkpoint {path} is of another model or optimizer than the configuration asks "
            f"for ({lines[1] if len(lines) > 1 else lines[0]}): give the options that it was "
            "trained with."
        ) from None
