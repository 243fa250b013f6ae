"""Restores a run from a checkpoint."""

import contextlib
import logging
import os
import tempfile
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from metadist.distributed import get_rank
from metadist.errors import UserError, state_dict_reason
from metadist.files import REDIRECT_RUN
from metadist.reports import config_fingerprint
from metadist.training.checkpoints import (
    Checkpoints,
    CorruptCheckpointError,
    read_checkpoint,
    rename_checkpoint,
    write_checkpoint,
)
from metadist.training.experiment import Experiment, TrainState
from metadist.training.saved_state import (
    CONTENTS_ERRORS,
    checkpoint_contents,
    checkpoints_of,
    load_learner_state,
    split_differences,
)

_log = logging.getLogger(__name__)


def restore(experiment: Experiment) -> None:
    """Restore an experiment from the checkpoint that its `resume` names, if any.

    Every rank calls it, before any work starts; only drivers restore their experiment. Rank zero
    also creates the run's directory, and renames corrupt checkpoints. The run may still be refused,
    so the other files are left to `replace_later_checkpoints`.

    Raises:
        UserError: the checkpoint does not exist, is damaged or does not fit, or the directory holds
            another run or cannot be written.
    """
    if get_rank() == 0:
        _make_writable(experiment.directory)
    if not experiment.strategy.is_driver:
        return
    saved = checkpoints_of(experiment)
    if experiment.resume is None:
        if saved.candidates():
            raise UserError(
                f"{experiment.directory} holds the checkpoints of an earlier run: add resume=auto "
                "to resume it, or choose another hydra.run.dir."
            )
        return
    if experiment.resume == "auto":
        checkpoint = _newest_intact(saved)
    else:
        path = _checkpoint_file(Path(experiment.resume).expanduser())
        checkpoint = path, read_checkpoint(path)
    if checkpoint is not None:
        restore_from(experiment, *checkpoint)
        experiment.restored_from = checkpoint[0]
        if get_rank() == 0:
            _best_source(experiment, checkpoint[0])  # an error is raised before the run starts
    elif get_rank() == 0:
        _log.info(
            "resume=auto: %s has no checkpoint, so the run starts at iteration 0; to resume an "
            "earlier run, give its directory, as in hydra.run.dir=DIR",
            experiment.directory,
        )
    if get_rank() == 0 and experiment.state.should_stop:
        _log.info(
            "a callback ended training after iteration %d: only the test is left; leave the "
            "callback out to train on",
            experiment.state.iteration,
        )


_ADVICE_ON_NUMBERS = (
    " Hydra takes 2024_11_27 for the number 20241127: write 'resume=\"2024_11_27\"'."
)


def _checkpoint_file(path: Path) -> Path:
    """The path of a checkpoint, or of the newest one in a run's directory."""
    if not path.exists():
        raise UserError(
            f"resume={path} does not exist: give a checkpoint file, or a run's directory for its "
            "newest checkpoint; resume=auto takes that of hydra.run.dir, if there is one."
            + (_ADVICE_ON_NUMBERS if str(path).isdigit() else "")
        )
    return Checkpoints(path).first_candidate() if path.is_dir() else path


def restore_from(experiment: Experiment, path: Path, contents: Mapping[str, Any]) -> None:
    """Restore an experiment from a checkpoint's contents.

    Args:
        experiment: the experiment, newly built.
        path: the checkpoint's path, for error messages.
        contents: the contents of the checkpoint.

    Raises:
        UserError: the checkpoint is of another run, has other shapes, or is beyond the run's end.
    """
    missing = sorted(checkpoint_contents(experiment).keys() - contents.keys() - {"protocol"})
    if missing:
        raise UserError(
            f"the checkpoint {path} lacks {', '.join(missing)}: it is of another version of "
            "metadist or damaged; choose another one."
        )
    saved = config_fingerprint(contents["configuration"])
    current = config_fingerprint(experiment.configuration)
    unrecorded = {}  # options that a class of the user's did not have, or without a value then
    for key, value in config_fingerprint(experiment.defaults).items():
        target = f"{key.rpartition('.')[0]}._target_"
        if saved.get(target) == current[target]:
            unrecorded[key] = value
    _require_same(path, {**unrecorded, **saved}, current)
    protocol = experiment.tasks.protocol()
    if different := split_differences(contents.get("protocol") or protocol, protocol):
        raise UserError(
            f"the checkpoint {path} was trained on another division of the classes "
            f"({', '.join(different)}), so that classes of training may be those of the test now: "
            "restore the dataset, or start another run."
        )
    trained_on = (contents.get("protocol") or {}).get("data_checksum")
    if trained_on not in (None, protocol.get("data_checksum")):
        raise UserError(
            f"the checkpoint {path} was trained on other data: classes or images of the dataset "
            "are not the same; give the data that it was trained on, as in dataset.root=DIR, or "
            f"start another run with init_from={path}."
        )
    _load(path, experiment, contents)
    _forget_other_validations(experiment, contents)
    if experiment.state.iteration > experiment.trainer_config.iterations:
        raise UserError(
            f"the checkpoint {path} has {experiment.state.iteration} iterations done, more than "
            f"trainer.iterations={experiment.trainer_config.iterations}: set trainer.iterations to "
            f"{experiment.state.iteration} or more."
        )


def _forget_other_validations(experiment: Experiment, contents: Mapping[str, Any]) -> None:
    """Discard earlier validations if later ones use other tasks."""
    saved = contents["configuration"].get("trainer") or {}
    trainer = experiment.trainer_config
    current = {"eval_seed": trainer.eval_seed, "validation_tasks": trainer.validation_tasks}
    different = [
        f"trainer.{key} was {saved[key]} and is {value}"
        for key, value in current.items()
        if saved.get(key, value) != value
    ]
    if not different:
        return
    state = experiment.state
    state.best, state.validation, state.validated = {}, {}, 0
    for callback in experiment.callbacks.values():
        callback.reset_validations(state)
    if get_rank() == 0:
        _log.warning(
            "%s: validations before and after the resume are of other tasks, so the best one and "
            "early stopping depend on those that follow alone",
            ", ".join(different),
        )


def _best_source(experiment: Experiment, path: Path) -> Path | None:
    """The best checkpoint in the folder of the restored one, if the run may test it.

    Raises:
        UserError: it is missing.
    """
    best = experiment.state.best.get("iteration")
    if experiment.trainer_config.test_checkpoint != "best" or best is None:
        return None
    source = path.with_name(checkpoints_of(experiment).best_path(int(best)).name)
    if not source.exists():
        raise UserError(
            f"{source} is missing, the best checkpoint so far, which trainer.test_checkpoint=best "
            "may test: copy it there from the directory of the run, or resume with "
            "trainer.test_checkpoint=last."
        )
    return source


def replace_later_checkpoints(experiment: Experiment) -> None:
    """Make the checkpoints in the run's directory those of the restored state.

    Those of later iterations, and best ones whose validation does not count, such as one of other
    tasks, are renamed. The best checkpoint is copied from the folder of the restored checkpoint if
    the run may test it. `Trainer` calls it on every rank, when the run is no longer refused; rank
    zero changes the files, and later calls do nothing.

    Raises:
        UserError: the best checkpoint is missing or damaged.
    """
    path, experiment.restored_from = experiment.restored_from, None
    if path is None or get_rank() != 0:
        return
    saved, best = checkpoints_of(experiment), experiment.state.best.get("iteration")
    source = _best_source(experiment, path)
    for number, other in saved.bests():
        # Until the next checkpoint is saved, the run resumes from `path`.
        if number > (best or 0) and not other.samefile(path):
            rename_checkpoint(other, "superseded")
    if source is not None:
        target = saved.best_path(int(best or 0))
        if not target.exists() or not source.samefile(target):
            if target.exists():  # of another run in the same directory
                rename_checkpoint(target, "superseded")
            write_checkpoint(target, read_checkpoint(source))
    saved.rename_later(experiment.state.iteration)


def _newest_intact(saved: Checkpoints) -> tuple[Path, dict[str, Any]] | None:
    """The newest intact checkpoint; rank zero renames corrupt newer ones.

    Raises:
        UserError: all checkpoints are corrupt, or an earlier resume has found that they are.
    """
    corrupt = sorted(saved.directory.glob("*.corrupt*"))
    for path in saved.candidates():
        try:
            return path, read_checkpoint(path)
        except CorruptCheckpointError:
            corrupt.append(path)
            if get_rank() == 0:
                renamed = rename_checkpoint(path, "corrupt")
                _log.warning(
                    "%s is corrupt: renamed to %s, resuming from the one before it",
                    path,
                    renamed.name,
                )
        except UserError:
            if path.exists():
                raise
            # Rank zero has renamed it in the meantime.
    if corrupt:
        raise UserError(
            f"every checkpoint in {saved.directory} is corrupt and was renamed: start again "
            "in another hydra.run.dir, or restore an intact copy."
        )
    return None


def _require_same(path: Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    kept = _callback_names(saved) & _callback_names(current)  # others may be added or removed
    different = []
    for key in sorted({*saved, *current}):
        group, _, option = key.partition(".")
        target = f"{group}._target_"
        in_both = key == target or (key in saved and key in current)
        if saved.get(target) != current.get(target) and not in_both:
            continue  # an option that only one of the two classes has
        if group == "callbacks" and option.partition(".")[0] not in kept:
            continue
        if group == "callbacks" and os.sep in saved.get(key, "") + current.get(key, ""):
            continue  # a path, such as one in the run's directory
        if not _equal(saved.get(key), current.get(key)):
            was, now = (values.get(key, "not set") for values in (saved, current))
            different.append(f"{key} was {was} there and is {now} now")
    if different:
        raise UserError(
            f"the checkpoint {path} is of another run: {', '.join(different)}; resume with the "
            "options that it was trained with, or start another run, in another hydra.run.dir "
            f"(of a sweep: hydra.sweep.dir) or with init_from={path}."
        )


def _equal(first: str | None, second: str | None) -> bool:
    """Whether two texts are equal, or the same number, as 1 and 1.0 are."""
    with contextlib.suppress(InvalidOperation):
        return first == second or Decimal(first or "") == Decimal(second or "")
    return False


def _callback_names(fingerprint: Mapping[str, str]) -> set[str]:
    return {key.split(".")[1] for key in fingerprint if key.startswith("callbacks.")}


def _make_writable(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise UserError(
            f"the run's directory {directory} cannot be written ({error.strerror}): {REDIRECT_RUN}."
        ) from None


def _load(path: Path, experiment: Experiment, contents: Mapping[str, Any]) -> None:
    try:
        load_learner_state(experiment.learner, contents.get("trained", contents))
        experiment.optimizer.load_state_dict(contents["optimizer"])
        experiment.scheduler.load_state_dict(contents["scheduler"])
        state = TrainState(**{key: contents[key] for key in TrainState.__dataclass_fields__})
        if not isinstance(state.iteration, int) or state.iteration < 0:
            raise ValueError(f"iteration {state.iteration!r}")
        for seconds in (state.train_seconds, state.wall_seconds):
            if not isinstance(seconds, float) or not 0 <= seconds < float("inf"):
                raise ValueError(f"{seconds!r} seconds")
        experiment.state = state
    except CONTENTS_ERRORS as error:
        raise UserError(
            f"the checkpoint {path} is of another model or optimizer than the configuration asks "
            f"for ({state_dict_reason(error)}): give the options that it was trained with."
        ) from None
    for name, saved in contents["callbacks"].items():
        if name in experiment.callbacks:
            experiment.callbacks[name].load_state_dict(saved)
        else:
            state.should_stop = False  # the missing callback may have set it
