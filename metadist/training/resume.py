"""What a checkpoint of a run contains, and how a run is restored from one."""

import contextlib
import logging
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import NoneType
from typing import Any

import numpy as np
import optree
from torch import Tensor

from metadist.algorithms import Learner
from metadist.distributed import get_rank
from metadist.errors import UserError, state_dict_reason
from metadist.reports import CHECKPOINT_DIRECTORY, config_fingerprint, read_results
from metadist.training.callbacks import Callback, EarlyStopping
from metadist.training.checkpoints import (
    Checkpoints,
    CorruptCheckpointError,
    read_checkpoint,
    rename_checkpoint,
    write_checkpoint,
)
from metadist.training.experiment import Experiment, TrainState
from metadist.training.results import BEST
from metadist.training.weights_file import SUFFIX, read_weights

_log = logging.getLogger(__name__)

_SPLIT_KEYS = ("class_split", "split_seed", "dataset_seed", "classes", "class_names")
"""What a protocol says about the division of the classes."""
_LATER_KEYS = {"trainer.precision": "float32"}
"""Keys that the fingerprint got later, with the value of configurations without them."""


def checkpoints_of(experiment: Experiment) -> Checkpoints:
    """The checkpoints in the run's directory."""
    return Checkpoints(
        experiment.directory / CHECKPOINT_DIRECTORY, experiment.trainer_config.keep_checkpoints
    )


def checkpoint_contents(experiment: Experiment) -> dict[str, Any]:
    """Everything that the rest of a run depends on, and what its learner is built from.

    States of random generators are not needed: tasks and what is random in them (dropout) are
    keyed by (seed, split, iteration, index), and the generators of the process are set from
    (seed, iteration) before the optimizer's step.
    """
    trains_another = experiment.evaluated_learner is not experiment.learner
    return {
        **asdict(experiment.state),
        "fingerprint": config_fingerprint(experiment.configuration),
        # What the learner is built from where there is no dataset.
        "configuration": experiment.configuration,
        "task": {
            "input_shape": [int(size) for size in experiment.tasks.input_shape],
            "outputs": int(experiment.tasks.outputs),
            "regression": bool(experiment.tasks.regression),
        },
        "protocol": {name: str(value) for name, value in experiment.tasks.protocol().items()},
        **_learner_contents(experiment.evaluated_learner),
        # What training goes on with, if something else is evaluated.
        **({"trained": _learner_contents(experiment.learner)} if trains_another else {}),
        "optimizer": experiment.optimizer.state_dict(),
        "scheduler": experiment.scheduler.state_dict(),
        "callbacks": {
            name: _callback_state(name, each) for name, each in experiment.callbacks.items()
        },
    }


def _learner_contents(learner: Learner) -> dict[str, Any]:
    """The learner's state, and its non-persistent buffers, which change in training too."""
    state = learner.state_dict()
    buffers = {name: buffer for name, buffer in learner.named_buffers() if name not in state}
    return {"learner": state, "buffers": buffers}


def _callback_state(name: str, callback: Callback) -> dict[str, Any]:
    """A callback's state, with NumPy's scalars as numbers.

    Raises:
        TypeError: it holds something that a checkpoint cannot.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Tensor) or type(value) in (str, int, float, bool, NoneType):
            return value
        if type(value) in (list, tuple):
            return type(value)(map(plain, value))
        if type(value) in (dict, OrderedDict):
            return type(value)((plain(key), plain(each)) for key, each in value.items())
        raise TypeError(
            f"{type(callback).__name__}.state_dict (callbacks.{name}) holds a "
            f"{type(value).__name__}: return tensors, numbers, strings, None, and dicts, lists and "
            "tuples of them."
        )

    state: dict[str, Any] = plain(callback.state_dict())
    return state


def restore(experiment: Experiment) -> None:
    """Restore an experiment from the checkpoint that its `resume` names, if any.

    Every rank calls it, before any work starts; only drivers have something to restore. Rank zero
    also creates the run's directory, and renames corrupt checkpoints and those of later
    iterations.

    Raises:
        UserError: a checkpoint that is not there, is damaged or does not fit; a directory that
            holds another run or cannot be written.
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
        found = _newest_intact(saved)
    else:
        path = _checkpoint_file(Path(experiment.resume))
        found = path, read_checkpoint(path)
    if found is not None:
        restore_from(experiment, *found)
        if get_rank() == 0:
            _require_best(experiment, found[0])
    elif get_rank() == 0:
        _log.info(
            "resume=auto: %s has no checkpoint, so the run starts at iteration 0; to resume an "
            "earlier run, give its directory, as in hydra.run.dir=DIR",
            experiment.directory,
        )
    if get_rank() == 0:
        saved.rename_later(experiment.state.iteration)
        if experiment.state.should_stop:
            _log.info(
                "a callback ended training after iteration %d: only the test is left; leave the "
                "callback out to train on",
                experiment.state.iteration,
            )


def _checkpoint_file(path: Path) -> Path:
    """A checkpoint's path, or of a run's directory that of the newest one."""
    if not path.is_dir():
        return path
    candidates = Checkpoints(path / CHECKPOINT_DIRECTORY).candidates()
    if not candidates:
        raise UserError(f"{path} holds no checkpoint: give the directory of a run, or a file.")
    return candidates[0]


def restore_from(experiment: Experiment, path: Path, contents: Mapping[str, Any]) -> None:
    """Bring an experiment to the state of a checkpoint's contents.

    Raises:
        UserError: it is of another run, of other shapes, or beyond the run's end.
    """
    saved = contents.get("fingerprint")
    if not isinstance(saved, Mapping):
        raise UserError(
            f"the checkpoint {path} does not say which run it is of: choose another one."
        )
    configured = config_fingerprint(contents.get("configuration") or {})
    later = {key: configured.get(key, value) for key, value in _LATER_KEYS.items()}
    _require_same(path, {**later, **saved}, config_fingerprint(experiment.configuration))
    own = experiment.tasks.protocol()
    if different := split_differences(contents.get("protocol") or own, own):
        raise UserError(
            f"the checkpoint {path} was trained on another division of the classes "
            f"({', '.join(different)}), so that classes of training may be those of the test now: "
            "restore the dataset, or start another run."
        )
    missing = sorted(checkpoint_contents(experiment).keys() - contents.keys() - {"protocol"})
    if missing:
        raise UserError(
            f"the checkpoint {path} lacks {', '.join(missing)}: it is of another version of "
            "metadist or damaged; choose another one."
        )
    _load(path, experiment, contents)
    _forget_other_validations(experiment, contents)
    if experiment.state.iteration > experiment.trainer_config.iterations:
        raise UserError(
            f"the checkpoint {path} has {experiment.state.iteration} iterations done, more than "
            f"trainer.iterations={experiment.trainer_config.iterations}: ask for more iterations."
        )


def split_differences(training: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """What says that the classes were divided otherwise in training.

    Args:
        training: the protocol of the tasks that a learner was trained on.
        own: that of other tasks.
    """
    return [
        f"{key} is {training.get(key)} there and {own.get(key)} here"
        for key in _SPLIT_KEYS
        if str(training.get(key)) != str(own.get(key))
    ]


def _forget_other_validations(experiment: Experiment, contents: Mapping[str, Any]) -> None:
    """Forget validations so far if they were of other tasks than those that follow."""
    saved = (contents.get("configuration") or {}).get("trainer") or {}
    trainer = experiment.trainer_config
    now = {"eval_seed": trainer.eval_seed, "validation_tasks": trainer.validation_tasks}
    different = [
        f"trainer.{key} was {saved[key]} and is {value}"
        for key, value in now.items()
        if saved.get(key, value) != value
    ]
    if not different:
        return
    state = experiment.state
    state.best, state.validation, state.validated = {}, {}, 0
    for callback in experiment.callbacks.values():
        if isinstance(callback, EarlyStopping):
            state.should_stop = False
            callback.load_state_dict({"best": None, "validations_since_best": 0})
    if get_rank() == 0:
        _log.warning(
            "%s: validations before and after the resume are of other tasks, so the best one and "
            "early stopping depend on those that follow alone",
            ", ".join(different),
        )


def _require_best(experiment: Experiment, path: Path) -> None:
    """Copy the best checkpoint so far from beside a checkpoint, if the run will test it.

    Raises:
        UserError: it is missing or damaged.
    """
    best = experiment.state.best.get("iteration")
    target = checkpoints_of(experiment).best_path(int(best or 0))
    if experiment.trainer_config.test_checkpoint != "best" or best is None:
        return
    source = path.with_name(target.name)
    if target.exists() and source.exists() and source.samefile(target):
        return
    if target.exists():  # of another run in the same directory
        rename_checkpoint(target, "superseded")
    if not source.exists():
        raise UserError(
            f"{source} is missing, the best checkpoint so far, which trainer.test_checkpoint=best "
            "may test: copy it there from the directory of the run, or resume with "
            "trainer.test_checkpoint=last."
        )
    write_checkpoint(target, read_checkpoint(source))


def load_best(experiment: Experiment) -> int:
    """Load the learner of the best checkpoint by validation; the iteration of that checkpoint.

    Raises:
        UserError: there is none, for every validation came to NaN, or it is damaged.
    """
    saved = checkpoints_of(experiment)
    best = experiment.state.best.get("iteration")
    if best is None:
        raise UserError(
            f"{saved.directory} holds no best checkpoint, because no validation had a finite "
            "result: resume with trainer.test_checkpoint=last to test the last state."
        )
    contents = read_checkpoint(saved.best_path(int(best)))
    load_learner_state(experiment.evaluated_learner, contents)
    return int(contents["iteration"])


def tested_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """The file and the contents of a checkpoint.

    Args:
        path: of a checkpoint, of a weights file (`metadist export`), which has part of the
            contents, or of a run directory. Of a finished run it is the state that was tested; of
            another one the state that it would test: the best checkpoint with
            `trainer.test_checkpoint=best`, else the newest one.

    Raises:
        UserError: there is no checkpoint, or it cannot be read.
    """
    if path.suffix == SUFFIX:
        return path, read_weights(path)
    if not path.is_dir():
        return path, read_checkpoint(path)
    saved = Checkpoints(path / CHECKPOINT_DIRECTORY)
    candidates = saved.candidates()
    if not candidates:
        raise UserError(
            f"{path} holds no checkpoint: give the directory of a run, or the path of a checkpoint "
            "file."
        )
    contents, results, best = read_checkpoint(candidates[0]), read_results(path), None
    with contextlib.suppress(KeyError, TypeError):  # no validation yet, or foreign results
        if results is not None and contents["iteration"] <= results["iterations"]:
            if results["protocol"]["checkpoint"] == BEST:
                best = int(results["tested_iteration"])
        elif contents["configuration"]["trainer"]["test_checkpoint"] == "best":
            best = int(contents["best"]["iteration"])
    if best is None:
        return candidates[0], contents
    return saved.best_path(best), read_checkpoint(saved.best_path(best))


def _newest_intact(saved: Checkpoints) -> tuple[Path, dict[str, Any]] | None:
    """The newest intact checkpoint; rank zero renames corrupt newer ones.

    Raises:
        UserError: all checkpoints are corrupt.
    """
    corrupt = []
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
            "without resume=auto, in another hydra.run.dir, or restore an intact copy."
        )
    return None


def _require_same(path: Path, saved: Mapping[str, str], current: Mapping[str, str]) -> None:
    kept = _callback_names(saved) & _callback_names(current)  # others may come and go
    for key in [*saved, *current]:
        group, _, option = key.partition(".")
        if group == "callbacks" and option.partition(".")[0] not in kept:
            continue
        if saved.get(key) != current.get(key):
            raise UserError(
                f"the checkpoint {path} is of another run: {key} was {saved.get(key)} there and is "
                f"{current.get(key)} now; resume with the options that it was trained with, or "
                f"start another run with init_from={path}."
            )


def _callback_names(fingerprint: Mapping[str, str]) -> set[str]:
    return {key.split(".")[1] for key in fingerprint if key.startswith("callbacks.")}


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


def load_learner_state(learner: Learner, contents: Mapping[str, Any]) -> None:
    """Load a checkpoint's parameters and buffers into a learner.

    Raises:
        RuntimeError: they are of another learner.
        KeyError: the contents are not a checkpoint's.
    """
    learner.load_state_dict(contents["learner"])
    buffers = dict(learner.named_buffers())
    for name, saved in contents["buffers"].items():
        buffers[name].copy_(saved)


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
    except (RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise UserError(
            f"the checkpoint {path} is of another model or optimizer than the configuration asks "
            f"for ({state_dict_reason(error)}): give the options that it was trained with."
        ) from None
    for name, saved in contents["callbacks"].items():
        if name in experiment.callbacks:
            experiment.callbacks[name].load_state_dict(saved)
        else:
            state.should_stop = False  # the callback that asked for it may be this one


def state_tensors(experiment: Experiment) -> list[Tensor]:
    """The tensors that drivers must have equal: of the learner and of the optimizer's state."""
    optimizer: Any = experiment.optimizer.state_dict()
    states = [leaf for leaf in optree.tree_leaves(optimizer) if isinstance(leaf, Tensor)]
    return [*experiment.learner.parameters(), *experiment.learner.buffers(), *states]
