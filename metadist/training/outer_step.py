"""The outer step of a chunk of tasks as a pure function, run eagerly or compiled.

The compiled form is what `make_fx` records of the eager one, including the inner gradients and the
derivative through them, compiled with TorchInductor. It has one shape: chunks with fewer tasks are
padded with tasks that count zero times.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import optree
import torch
from torch import Tensor

from metadist.algorithms import Learner, TaskResult
from metadist.distributed.reducers import leaf_dtypes
from metadist.errors import first_line
from metadist.kernels import pytorch_operations
from metadist.profile_ranges import profile_range
from metadist.tasks import Episode, Examples
from metadist.training.batching import forward_batched
from metadist.training.precision import Precision
from metadist.training.signals import raise_if_interrupted

_log = logging.getLogger(__name__)

_PLAIN = frozenset((bool, int, float, str))
_COMPARED = frozenset((list, tuple, dict, Tensor))
_CALLS_UNTIL_READY = 3
"""A CUDA graph is recorded in the second call and replayed from the third one on."""


class StepSum(NamedTuple):
    """The weighted sum of the tasks' results and gradients.

    Attributes:
        result: the results, in float64.
        gradients: of the loss with respect to each trainable parameter, in float64; None where no
            loss depends on it.
        dtypes: of the leaves of a task's result, None for what is no real tensor.
    """

    result: TaskResult
    gradients: list[Tensor | None]
    dtypes: list[torch.dtype | None]


class StepArguments(NamedTuple):
    """What an outer step computes.

    Attributes:
        learner: with `supports_batched_tasks`, in training mode.
        parameters: all of the learner's, by name.
        trainable: names of the parameters to differentiate with respect to.
        episodes: the tasks, every tensor with a first dimension of tasks.
        weights: how often each task counts, float64, shape (tasks,).
        precision: of the computation.
    """

    learner: Learner
    parameters: Mapping[str, Tensor]
    trainable: Sequence[str]
    episodes: Episode
    weights: Tensor
    precision: Precision = "float32"


def outer_step(arguments: StepArguments) -> StepSum:
    """Run a chunk of tasks, and differentiate their losses with respect to the parameters.

    With learner, tasks and weights on a GPU it does not synchronize with it, unless the learner
    reads values.

    Args:
        arguments: learner, parameters and tasks.
    """
    learner, parameters, trainable, episodes, weights, precision = arguments
    with profile_range("forward"):
        result, own = forward_batched(learner, parameters, episodes, precision)
    gradients: Sequence[Tensor | None] = [None] * len(trainable)
    if result.loss.requires_grad and trainable:
        with profile_range("backward"):
            inputs = [own[name] for name in trainable]
            gradients = torch.autograd.grad(result.loss.sum(), inputs, allow_unused=True)
    with profile_range("reduce"):
        return weighted_step_sum(result, gradients, weights)


def weighted_step_sum(
    result: TaskResult, gradients: Sequence[Tensor | None], weights: Tensor
) -> StepSum:
    """The weighted sum of results, without predictions, and gradients with a first dimension of
    tasks.
    """

    def total(leaf: Tensor) -> Tensor:
        values, weight = leaf.detach(), weights.to(leaf.device)
        if values.is_contiguous():
            return torch.tensordot(weight, values.double(), 1)
        # In the order of the memory: another one would be copied.
        order = sorted(range(1, leaf.dim()), key=leaf.stride, reverse=True)
        summed = torch.tensordot(weight, values.permute(0, *order).double(), 1)
        return summed.permute([order.index(dimension) for dimension in range(1, leaf.dim())])

    result = result._replace(predictions=None)
    tree: Any = result
    summed: Any = optree.tree_map(total, tree)
    sums = [None if gradient is None else total(gradient) for gradient in gradients]
    return StepSum(summed, sums, leaf_dtypes(result))


class CompileOptions(NamedTuple):
    """What a compiled step depends on beside its arguments.

    Attributes:
        configuration: a digest of what the learner was built from. Learners of one digest differ
            in the values of their parameters only.
        chunk_size: tasks of a compiled chunk.
    """

    configuration: str
    chunk_size: int


class CompiledSteps:
    """Compiled forms of `outer_step`, one for each configuration and shape of a task.

    A form that cannot be compiled is run eagerly, which is logged once.
    """

    def __init__(self) -> None:
        self._steps: dict[Any, Callable[..., StepSum] | str] = {}
        self._attributes: dict[Any, list[dict[str, Any]]] = {}
        self._logged: set[tuple[CompileOptions, str]] = set()

    def __call__(self, options: CompileOptions, arguments: StepArguments) -> StepSum:
        """The same as `outer_step` up to rounding.

        Args:
            options: of the run.
            arguments: see `outer_step`, with at most `options.chunk_size` tasks.
        """
        found, inputs = self._find(options, arguments)
        if isinstance(found, str):
            if (options, found) not in self._logged:
                self._logged.add((options, found))
                _log.warning("the outer step runs eagerly: it cannot be compiled (%s)", found)
            return outer_step(arguments)
        with profile_range("compiled_step"):
            return found(*inputs)

    def compile(self, options: CompileOptions, arguments: StepArguments) -> str | None:
        """Compile what a call with these arguments runs, unless it has been compiled before.

        Returns:
            Why it cannot be compiled; None if it can.
        """
        found, _ = self._find(options, arguments)
        return found if isinstance(found, str) else None

    def _find(
        self, options: CompileOptions, arguments: StepArguments
    ) -> tuple[Callable[..., StepSum] | str, Any]:
        """The compiled form, or why there is none, and the tensors that it takes."""
        episodes, weights = arguments.episodes, arguments.weights
        shapes = tuple((each.shape[1:], each.dtype) for part in episodes for each in part)
        trainable, device = tuple(arguments.trainable), episodes.query.inputs.device
        key = (options, trainable, shapes, device, arguments.precision)
        padding = options.chunk_size - len(weights)
        if padding:
            weights = torch.cat([weights, weights.new_zeros(padding)])
        # Padded or not, tensors have one layout: another one would be compiled again.
        episodes = Episode(*(Examples(_pad(x, padding), _pad(y, padding)) for x, y in episodes))
        inputs = ([each.detach() for each in arguments.parameters.values()], episodes, weights)
        # The compiled form has the values that these have when it is made.
        attributes = _constant_attributes(arguments.learner)
        first = self._attributes.setdefault(key, attributes)
        if attributes != first:
            changed = _changed_names(arguments.learner, first)
            self._steps[key] = f"the learner's {', '.join(changed)} changed during training"
        if key not in self._steps:
            try:
                compiled = compile_outer_step(functools.partial(_eager, arguments), inputs)
                for _ in range(_CALLS_UNTIL_READY if replays_graph(device) else 1):
                    compiled(*inputs)
                self._steps[key] = compiled
            except Exception as error:
                raise_if_interrupted(error)
                self._steps[key] = f"{type(error).__name__}: {first_line(error)}"
        return self._steps[key], inputs


def _constant_attributes(learner: Learner) -> list[dict[str, Any]]:
    """The values of those attributes of each module that a compiled form has as constants, by name:
    numbers and texts, and outside of `nn.Module`'s own attributes lists and the like of these, and
    tensors that are neither parameters nor buffers.
    """
    return [
        {
            name: value if type(value) in _PLAIN else _snapshot(value)
            for name, value in vars(module).items()
            if type(value) in _PLAIN or (type(value) in _COMPARED and name[0] != "_")
        }
        for module in learner.modules()
    ]


def _snapshot(value: Any) -> Any:
    """What differs once a list, tuple, dictionary or tensor has changed, also in place."""
    if isinstance(value, Tensor):
        return id(value), value._version  # noqa: SLF001  (counts changes in place)
    items = tuple(value.items() if isinstance(value, dict) else value)
    flat = (part for each in items for part in (each if isinstance(value, dict) else (each,)))
    return items if all(type(part) in _PLAIN for part in flat) else id(value)


def _changed_names(learner: Learner, before: list[dict[str, Any]]) -> list[str]:
    """What has other values than `before`: attributes by name, or all of a module."""
    modules, now = dict(learner.named_modules()), _constant_attributes(learner)
    if len(now) != len(before):
        return ["modules"]
    changed = []
    for path, new, old in zip(modules, now, before, strict=True):
        prefix = f"{path}." if path else ""
        names = [name for name in {**old, **new} if new.get(name) != old.get(name)]
        changed += [f"{prefix}{name}" for name in names]
    return changed


compiled_steps = CompiledSteps()
"""The compiled steps of this process."""


def _eager(
    like: StepArguments, parameters: list[Tensor], episodes: Episode, weights: Tensor
) -> StepSum:
    by_name = {
        name: value.detach().requires_grad_(parameter.requires_grad)
        for (name, parameter), value in zip(like.parameters.items(), parameters, strict=True)
    }
    return outer_step(like._replace(parameters=by_name, episodes=episodes, weights=weights))


def compile_outer_step(step: Callable[..., StepSum], arguments: Any) -> Callable[..., StepSum]:
    """A compiled function of the arguments' structure and shapes.

    Args:
        step: of parameters, episodes and weights.
        arguments: those three.
    """
    structure: Any = None
    dtypes: list[torch.dtype | None] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        nonlocal structure, dtypes
        given: Any = optree.tree_unflatten(inputs, leaves)
        found = step(*given)
        dtypes = found.dtypes
        sums: Any = (found.result, found.gradients)
        outputs, structure = optree.tree_flatten(sums)
        return outputs

    from torch.fx.experimental.proxy_tensor import make_fx  # takes time to import

    leaves, inputs = optree.tree_flatten(arguments)
    with pytorch_operations():
        # With fake tensors, control flow that depends on values is an error, not recorded once.
        graph = make_fx(flat, tracing_mode="fake")(*leaves)
    for node in reversed(graph.graph.nodes):
        if getattr(node.target, "namespace", "") == "profiler":  # would split the graph
            graph.graph.erase_node(node)
    graph.recompile()
    replays = replays_graph(leaves[0].device)
    run = torch.compile(graph, dynamic=False, mode="reduce-overhead" if replays else None)

    def compiled(*arguments: Any) -> StepSum:
        with torch.no_grad():
            given: Any = arguments
            outputs: Any = run(*optree.tree_leaves(given))
            if replays:  # the next replay writes into the same memory
                outputs = [each.clone() for each in outputs]
            result, gradients = cast(Any, optree.tree_unflatten(structure, outputs))
        return StepSum(result, gradients, dtypes)

    return compiled


def replays_graph(device: torch.device) -> bool:
    """Whether a compiled step is replayed as a CUDA graph."""
    return device.type == "cuda"


def _pad(tensor: Tensor, tasks: int) -> Tensor:
    """Append copies of the first task; contiguous."""
    if not tasks:
        return tensor.contiguous()
    return torch.cat([tensor, tensor[:1].expand(tasks, *tensor.shape[1:])])
