"""Explanations of the errors that a model or an algorithm raises in a task."""

import re
import traceback
from inspect import isfunction
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from metadist.algorithms import Learner
from metadist.errors import UserError, first_line, user_frame
from metadist.tasks import TaskDistribution, task_keys
from metadist.training.episode_check import ALGORITHMS


def raise_explained(
    error: Exception, tasks: TaskDistribution, learner: Learner, split: str, computed: str
) -> NoReturn:
    """Raise an error in a task, or the exception that explains it.

    Args:
        error: the error.
        tasks: this rank's tasks.
        learner: the learner.
        split: the split of the tasks.
        computed: what was being computed, such as "a train task".

    Raises:
        UserError: the error is one of those that the user can correct.
        RuntimeError: the error was raised in the user's own code; the message names file and line.
        Exception: any other error, as it is.
    """
    if (explained := _explain(error, tasks, learner, split, computed)) is None:
        raise error
    if isinstance(explained, UserError) or error.__traceback__ is None:
        raise explained from error
    # One traceback, which ends in the user's code, and what the user's error was raised from.
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    raise explained.with_traceback(error.__traceback__.tb_next) from cause


def _explain(
    error: Exception, tasks: TaskDistribution, learner: Learner, split: str, computed: str
) -> Exception | None:
    """The exception to raise instead of an error; None to raise the error itself."""
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    raised_in, method = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    missing = isinstance(error, NotImplementedError) and not str(error)  # torch's have a text
    if missing and raised_in.startswith(ALGORITHMS):
        return UserError(
            f"{type(learner).__name__} has no {method} of its own: implement it, as "
            "described in metadist.algorithms.Learner."
        )
    location = user_frame(error)
    inputs = tasks.sample(task_keys(0, split, 0, range(1))[0]).query.inputs
    of_type = "dtype" in str(error) or "not implemented for" in str(error)
    if of_type and not (inputs.is_floating_point() or inputs.is_complex()):
        place = f"{location}: " if location else ""
        return UserError(
            f"the model cannot process inputs of {inputs.dtype} ({place}{first_line(error)}): let "
            "the dataset give float32, as by .float() of numbers or .float() / 255 of pixels, or "
            "take a model with an embedding, for indices such as token numbers."
        )
    if re.search(r"more than (1|one) value per channel", str(error)):
        return UserError(
            f"batch norm cannot normalize a single value per channel, in {computed}: take a model "
            "without it, as with model.batch_norm=false of mlp, or more support examples, as in "
            "task.shots=10."
        )
    if location:
        hint = f"in {computed}"
        if split != "train" and "does not require grad" in str(error):
            hint += ", where gradients are disabled: adapt within torch.enable_grad()"
        # An index error often means too few outputs.
        if isinstance(error, IndexError) and (output := _model_output(learner, tasks, inputs)):
            hint += output.description
        return RuntimeError(f"{location}: {type(error).__name__}: {error} ({hint})")
    output = _model_output(learner, tasks, inputs)
    if output is not None and not isinstance(output.returned, Tensor):
        return UserError(
            f"{type(learner.model).__name__}.forward returned a {type(output.returned).__name__}: "
            f"return a tensor of shape (n, {tasks.outputs}) for n inputs."
        )
    base = next((c for c in type(learner).__mro__ if c.__module__.startswith(ALGORITHMS)), Learner)
    own = [
        name
        for name, member in vars(type(learner)).items()
        if isfunction(member) and name[0] != "_" and hasattr(base, name)
    ]
    is_none = "NoneType" in str(error) and raised_in.startswith("metadist.")
    if is_none and own and base is not type(learner):
        return UserError(
            f"a value of {type(learner).__name__} is None, in {computed} ({first_line(error)}): "
            f"check that its methods end with return ({', '.join(own)}), and its attributes."
        )
    if not isinstance(error, ValueError | RuntimeError | IndexError):
        return None
    if "require grad" in str(error):
        return UserError(
            f"{type(learner).__name__} cannot differentiate {computed} ({first_line(error)}): "
            "compute predictions from the learner's parameters, without detach() or "
            "torch.no_grad(), and let the tensors that an own initial() returns require grad."
        )
    return UserError(
        f"the model and the algorithm cannot process {computed} of this shape "
        f"({first_line(error)}){'' if output is None else output.description}: "
        "change model, algorithm or task."
    )


class _ModelOutput(NamedTuple):
    """What the model returned for a task's queries, and a description of it."""

    returned: Any
    description: str


def _model_output(learner: Learner, tasks: TaskDistribution, inputs: Tensor) -> _ModelOutput | None:
    """The model's output for a task's queries; None if the model raises an error."""
    try:
        with torch.no_grad():
            output = learner.model(inputs.to(next(learner.parameters()).device))
    except Exception:
        return None
    returned = f"a {type(output).__name__}"
    if isinstance(output, Tensor):
        returned = f"shape {tuple(output.shape)}"
    return _ModelOutput(
        output,
        f"; for inputs of shape {tuple(inputs.shape)} the model returned {returned}, and the task "
        f"has {tasks.outputs} outputs",
    )
