"""The outer step of a chunk of tasks, as a pure function."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from metadist.algorithms import Learner, TaskResult
from metadist.distributed.reducers import finish_sum, leaf_dtypes
from metadist.profile_ranges import profile_range
from metadist.tasks import Episode
from metadist.training.batching import forward_batched
from metadist.training.precision import Precision


class StepSum(NamedTuple):
    """The weighted sum of the tasks' results and gradients.

    Attributes:
        result: the sum of the results, in float64.
        gradients: the gradient with respect to each parameter that requires grad, in float64; None
            if no loss depends on the parameter.
        dtypes: the dtype of each leaf of a task's result; None for leaves that are no real tensors.
    """

    result: TaskResult
    gradients: list[Tensor | None]
    dtypes: list[torch.dtype | None]


class FinishedStep(NamedTuple):
    """The reduced result of a meta-batch, and the gradient of its loss.

    Attributes:
        result: the result, in the types of a task's result.
        gradients: the gradient with respect to each parameter that requires grad, in its type;
            None if the loss does not depend on the parameter.
        flat_gradient: all gradients as one vector, in float64, for their norm.
    """

    result: TaskResult
    gradients: list[Tensor | None]
    flat_gradient: Tensor


class StepArguments(NamedTuple):
    """The arguments of `outer_step`.

    Attributes:
        learner: a learner with `supports_batched_tasks`, in training mode.
        parameters: all of the learner's parameters, by name.
        episodes: the tasks, every tensor with a first dimension of tasks.
        weights: the weight of each task in the sum, float64, shape (tasks,).
        precision: the precision of the tasks' computation.
    """

    learner: Learner
    parameters: Mapping[str, Tensor]
    episodes: Episode
    weights: Tensor
    precision: Precision = "float32"


def outer_step(arguments: StepArguments) -> StepSum:
    """Run a chunk of tasks, and differentiate their losses with respect to the parameters that
    require grad.

    With learner, tasks and weights on a GPU, there is no synchronization, unless the learner reads
    values.

    Args:
        arguments: learner, parameters and tasks.
    """
    learner, parameters, episodes, weights, precision = arguments
    with profile_range("forward"):
        result, task_parameters = forward_batched(learner, parameters, episodes, precision)
    gradients = gradients_of(result.loss, task_parameters.values())
    with profile_range("reduce"):
        return weighted_step_sum(result, gradients, weights)


def gradients_of(loss: Tensor, parameters: Iterable[Tensor]) -> Sequence[Tensor | None]:
    """The gradient of the sum of losses by each parameter that requires grad; None if there is no
    dependence.
    """
    inputs = [parameter for parameter in parameters if parameter.requires_grad]
    if not loss.requires_grad or not inputs:
        return [None] * len(inputs)
    with profile_range("backward"):
        return torch.autograd.grad(loss, inputs, torch.ones_like(loss), allow_unused=True)


def weighted_step_sum(
    result: TaskResult, gradients: Sequence[Tensor | None], weights: Tensor
) -> StepSum:
    """The weighted sum over tasks of results and gradients, without predictions.

    Args:
        result: the tasks' results, every tensor with a first dimension of tasks.
        gradients: the tasks' gradient with respect to each parameter that requires grad, shape
            (tasks, …); None if no loss depends on the parameter.
        weights: the weight of each task, float64, shape (tasks,).
    """

    def total(leaf: Tensor | None) -> Tensor | None:
        if leaf is None:
            return None
        values, weight = leaf.detach(), weights.to(leaf.device)
        if values.dim() == 1:
            # A padding task has weight zero, and zero times infinity would be NaN.
            return weight.dot(values.double().where(weight != 0, 0))
        if values.is_contiguous():
            return (weight @ values.double().flatten(1)).view(values.shape[1:])
        # In memory order, since another order would copy the tensor.
        order = sorted(range(1, leaf.dim()), key=leaf.stride, reverse=True)
        summed = torch.tensordot(weight, values.permute(0, *order).double(), 1)
        return summed.permute([order.index(dimension) for dimension in range(1, leaf.dim())])

    tree: Any = result._replace(predictions=None)
    leaves, structure = optree.tree_flatten(tree, none_is_leaf=True)
    sums: Any = optree.tree_unflatten(structure, map(total, leaves))
    return StepSum(sums, [*map(total, gradients)], leaf_dtypes(leaves))


def finish_step(
    step: StepSum, dtypes: Sequence[torch.dtype], divisor: float | None
) -> FinishedStep:
    """Divide the sums over all tasks of a meta-batch, and round them.

    Args:
        step: the sums.
        dtypes: the dtypes of the parameters that require grad.
        divisor: the number to divide by; None for a sum.
    """
    result = finish_sum(step.result, divisor, step.dtypes)
    gradients = [
        None if total is None else (total / (divisor or 1)).to(dtype).contiguous()
        for total, dtype in zip(step.gradients, dtypes, strict=True)
    ]
    flat = [gradient.flatten() for gradient in gradients if gradient is not None]
    vector = torch.cat(flat).double() if flat else torch.zeros(0, dtype=torch.float64)
    return FinishedStep(result, gradients, vector)
