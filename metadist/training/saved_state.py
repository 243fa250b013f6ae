"""The contents of an experiment's checkpoint, and the checkpoint that a run has tested."""

import contextlib
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
from metadist.errors import UserError
from metadist.reports import read_results
from metadist.training.callbacks import Callback
from metadist.training.checkpoints import (
    Checkpoints,
    read_checkpoint,
)
from metadist.training.experiment import Experiment
from metadist.training.results import BEST_CHECKPOINT
from metadist.training.weights_file import WEIGHTS_SUFFIX, read_weights

_SPLIT_KEYS = ("class_split", "split_seed", "dataset_seed", "classes", "class_names")
"""Keys of a protocol that describe the division of the classes."""


def checkpoints_of(experiment: Experiment) -> Checkpoints:
    """The checkpoints in the run's directory."""
    return Checkpoints(experiment.directory, experiment.trainer_config.keep_checkpoints)


def checkpoint_contents(experiment: Experiment) -> dict[str, Any]:
    """All state that the rest of a run depends on, and the configuration of its learner.

    States of random generators are not needed: tasks and their random numbers (as for dropout) are
    keyed by (seed, split, iteration, index), and the generators of the process are seeded with
    (seed, iteration) before the optimizer's step.
    """
    trains_another = experiment.evaluated_learner is not experiment.learner
    return {
        **asdict(experiment.state),
        # From these, the learner can be built without the dataset. A resumed run compares them.
        "configuration": experiment.configuration,
        "task": {
            "input_shape": [int(size) for size in experiment.tasks.input_shape],
            "outputs": int(experiment.tasks.outputs),
            "regression": bool(experiment.tasks.regression),
        },
        "protocol": {
            name: str(value)
            for part in (experiment.learner, experiment.tasks)
            for name, value in part.protocol().items()
        },
        **learner_contents(experiment.evaluated_learner),
        # The learner with which training continues, if another one is evaluated.
        **({"trained": learner_contents(experiment.learner)} if trains_another else {}),
        "optimizer": experiment.optimizer.state_dict(),
        "scheduler": experiment.scheduler.state_dict(),
        "callbacks": {
            name: _callback_state(name, callback) for name, callback in experiment.callbacks.items()
        },
    }


def learner_contents(learner: Learner) -> dict[str, Any]:
    """The learner's state, its non-persistent buffers and the names of its frozen parameters.

    Non-persistent buffers may also change in training; frozen parameters are not adapted.
    """
    state = learner.state_dict()
    buffers = {name: buffer for name, buffer in learner.named_buffers() if name not in state}
    frozen = [name for name, p in learner.named_parameters() if not p.requires_grad]
    return {"learner": state, "buffers": buffers, "frozen": frozen}


def _callback_state(name: str, callback: Callback) -> dict[str, Any]:
    """A callback's state, with NumPy scalars converted to numbers.

    Raises:
        UserError: the state holds a type that a checkpoint cannot hold.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, Tensor) or type(value) in (str, int, float, bool, NoneType):
            return value
        if type(value) in (list, tuple):
            return type(value)(map(plain, value))
        if type(value) in (dict, OrderedDict):
            return type(value)((plain(key), plain(item)) for key, item in value.items())
        raise UserError(
            f"{type(callback).__name__}.state_dict (callbacks.{name}) holds a "
            f"{type(value).__name__}: return tensors, numbers, strings, None, and dicts, lists and "
            "tuples of them."
        )

    state = callback.state_dict()
    if state is None:
        raise UserError(
            f"{type(callback).__name__}.state_dict (callbacks.{name}) returned None: return a "
            "dict, {} for no state."
        )
    return plain(state)


CONTENTS_ERRORS = (
    RuntimeError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError,
)  # fmt: skip
"""Errors in loading a checkpoint's contents that are damaged or of another learner."""


def load_learner_state(learner: Learner, contents: Mapping[str, Any]) -> None:
    """Load a checkpoint's parameters and buffers into a learner.

    `requires_grad` of each parameter is set as it was when the checkpoint was saved. It is left
    unchanged if the checkpoint has no list of frozen parameters.

    Raises:
        RuntimeError: the contents are of another learner.
        KeyError: the contents are not a checkpoint's.
    """
    learner.load_state_dict(contents["learner"])
    if "frozen" in contents:
        for name, parameter in learner.named_parameters():
            parameter.requires_grad_(name not in contents["frozen"])
    buffers = dict(learner.named_buffers())
    for name, saved in contents["buffers"].items():
        buffers[name].copy_(saved)


def load_best(experiment: Experiment) -> None:
    """Load the learner of the best checkpoint by validation. Rank zero calls it.

    Raises:
        UserError: there is none, because there was no validation with a finite result, or it is
            damaged.
    """
    saved = checkpoints_of(experiment)
    best = experiment.state.best.get("iteration")
    if best is None:
        raise UserError(
            f"{saved.directory} holds no best checkpoint, because there was no validation with a "
            "finite result: resume with trainer.test_checkpoint=last to test the last state."
        )
    contents = read_checkpoint(saved.best_path(int(best)))
    load_learner_state(experiment.evaluated_learner, contents)


def tested_checkpoint(path: Path) -> tuple[Path, dict[str, Any]]:
    """Read the checkpoint that a run tested, or would test; or the file that is given.

    Args:
        path: path of a checkpoint, of a weights file (`metadist export`), which has part of the
            contents, or of a run directory. For the directory of a finished run, the checkpoint
            that was tested is read; for another run, the best checkpoint with
            `trainer.test_checkpoint=best`, else the newest one.

    Raises:
        UserError: there is no checkpoint, or it cannot be read.
    """
    if not path.exists():
        raise UserError(
            f"{path} does not exist: give a run's directory, a checkpoint or a weights file."
        )
    if path.suffix == WEIGHTS_SUFFIX:
        return path, read_weights(path)
    if not path.is_dir():
        return path, read_checkpoint(path)
    saved = Checkpoints(path)
    newest = saved.first_candidate()
    contents, results, best = read_checkpoint(newest), read_results(path), None
    with contextlib.suppress(KeyError, TypeError):  # no validation yet, or foreign results
        if results is not None and contents["iteration"] <= results["iterations"]:
            if results["protocol"]["checkpoint"] == BEST_CHECKPOINT:
                best = int(results["tested_iteration"])
        elif contents["configuration"]["trainer"]["test_checkpoint"] == "best":
            best = int(contents["best"]["iteration"])
    if best is None:
        return newest, contents
    return saved.best_path(best), read_checkpoint(saved.best_path(best))


def state_tensors(experiment: Experiment) -> list[Tensor]:
    """The tensors that must be equal on all drivers: the learner's and the optimizer's state."""
    optimizer: Any = experiment.optimizer.state_dict()
    states = [leaf for leaf in optree.tree_leaves(optimizer) if isinstance(leaf, Tensor)]
    return [*experiment.learner.parameters(), *experiment.learner.buffers(), *states]


def split_differences(training: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Differences between the division of the classes in training and in other tasks.

    There are none if the tasks are of another dataset, or training's protocol is not known.

    Args:
        training: the protocol of the tasks on which a learner was trained.
        own: the protocol of the other tasks.

    Returns:
        A text for each difference.
    """
    if not training or training.get("dataset") != own.get("dataset"):
        return []
    return [
        f"{key} is {training.get(key)} there and {own.get(key)} here"
        for key in _SPLIT_KEYS
        if str(training.get(key)) != str(own.get(key))
    ]
