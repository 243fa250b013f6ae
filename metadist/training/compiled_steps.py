"""Compiled and captured forms of the outer step.

On a GPU, the eager step is captured as a CUDA graph. On other devices, it is recorded with
`make_fx`, including the inner gradients and the derivative through them, and compiled with
TorchInductor. Both have one shape: chunks with fewer tasks are padded with tasks of weight zero.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Tensor

from metadist.distributed import get_rank
from metadist.errors import first_line
from metadist.kernels import pytorch_operations
from metadist.profile_ranges import profile_range
from metadist.tasks import Episode, Examples
from metadist.training.compiled_constants import Constants
from metadist.training.cuda_graph import capture
from metadist.training.outer_step import FinishedStep, StepArguments, StepSum, outer_step

_log = logging.getLogger(__name__)

_RECOMPILE_LIMIT = 8
"""The most compiled steps of a run: one for each shape of tasks and set of trained parameters."""

Finish = Callable[[StepSum, list[torch.dtype]], FinishedStep]
"""(sums over the tasks, dtypes of the parameters that require grad) -> finished step."""


class _CompiledStep(NamedTuple):
    """A compiled form of `outer_step`, or the reason why it cannot be compiled.

    Attributes:
        run: the compiled function of parameters, episodes and weights; None if it cannot be
            compiled.
        error: the reason why it cannot be compiled.
        constants: the learner's constants when it was compiled; None if it cannot be.
    """

    run: Callable[..., Any] | None
    error: str
    constants: Constants | None


class CompiledSteps:
    """Compiled forms of a run's `outer_step` on one worker, one for each shape of tasks.

    If a form cannot be compiled, the step runs eagerly, which is logged once. The learner, its
    device and the precision are the same in all calls, or the learner is a copy.

    Args:
        chunk_size: number of tasks in a compiled chunk.
        captures: whether to capture the eager step as a CUDA graph, with the same bits in chunks of
            `chunk_size` tasks, instead of compiling it with TorchInductor.
        finish: a function that is compiled with the step, for `find`. Default: none.

    Attributes:
        errors: the reasons why steps ran eagerly.
    """

    def __init__(
        self, chunk_size: int, captures: bool = False, finish: Finish | None = None
    ) -> None:
        self.chunk_size = chunk_size
        self.captures = captures
        self._finish = finish
        self.errors: set[str] = set()
        self._steps: dict[Any, _CompiledStep] = {}

    def __call__(self, arguments: StepArguments) -> StepSum:
        """The same as `outer_step` up to rounding.

        Args:
            arguments: the arguments of `outer_step`, with at most `chunk_size` tasks.
        """
        inputs = self._padded_inputs(arguments)
        step = self._find(arguments, inputs)
        if step.run is not None:
            with profile_range("compiled_step"):
                return step.run(*inputs)
        self._log_once(step.error)
        return outer_step(arguments)

    def find(self, arguments: StepArguments) -> Callable[..., FinishedStep] | None:
        """The compiled function of parameters, episodes and weights that returns a finished step.

        It can be called until anything but the values of the tensors changes.

        Args:
            arguments: the arguments of `outer_step`, with `chunk_size` tasks.

        Returns:
            The function; None if it cannot be compiled, which is logged once.
        """
        step = self._find(arguments, self._padded_inputs(arguments))
        if step.run is None:
            self._log_once(step.error)
        return step.run

    def compile(self, arguments: StepArguments) -> str:
        """Compile the step that a call with these arguments runs, unless it is compiled already.

        Returns:
            The reason why it cannot be compiled; "" if it can.
        """
        return self._find(arguments, self._padded_inputs(arguments)).error

    def _log_once(self, error: str) -> None:
        if error not in self.errors:
            self.errors.add(error)
            self.log_eager(error)

    def log_eager(self, reason: str, where: str = "", advice: str = "") -> None:
        """Log on rank zero that the step runs eagerly, as a warning unless it is captured."""
        if get_rank() == 0:
            level = logging.INFO if self.captures else logging.WARNING
            done = "captured as a CUDA graph" if self.captures else "compiled"
            message = f"{where}it cannot be {done} ({reason}){advice}"
            _log.log(level, "the outer step runs eagerly: %s", message)

    def _find(self, arguments: StepArguments, inputs: Any) -> _CompiledStep:
        episodes = arguments.episodes
        shapes = tuple((tensor.shape[1:], tensor.dtype) for part in episodes for tensor in part)
        layouts = tuple(
            (p.dtype, p.shape, p.stride(), p.requires_grad) for p in arguments.parameters.values()
        )
        key = (shapes, layouts)
        step, learner = self._steps.get(key), arguments.learner
        if step is None:
            if len(self._steps) < _RECOMPILE_LIMIT:
                step = _compile(arguments, inputs, self.captures, self._finish)
            else:
                error = (
                    f"more than {_RECOMPILE_LIMIT} combinations of task shapes and trained "
                    "parameters: keep them equal, or set trainer.compile=false"
                )
                step = _CompiledStep(None, error, None)
            self._steps[key] = step
        elif step.constants is not None and (changed := step.constants.changed_names(learner)):
            error = f"the learner's {', '.join(changed)} changed during training"
            step = self._steps[key] = _CompiledStep(None, error, None)
        return step

    def _padded_inputs(self, arguments: StepArguments) -> Any:
        """Parameters, episodes and weights of a chunk, padded to `chunk_size` tasks with weight
        zero.

        Episodes and weights are contiguous, padded or not, since a compiled step has one layout.
        """
        weights = arguments.weights
        padding = self.chunk_size - len(weights)
        if padding:
            weights = torch.cat([weights, weights.new_zeros(padding)])
        episodes = Episode(
            *(Examples(_pad(x, padding), _pad(y, padding)) for x, y in arguments.episodes)
        )
        return [p.detach() for p in arguments.parameters.values()], episodes, weights


def _compile(
    arguments: StepArguments, inputs: Any, captures: bool, finish: Finish | None
) -> _CompiledStep:
    constants = None
    try:
        constants = Constants(arguments.learner)
        step: Callable[..., Any] = functools.partial(_eager, arguments)
        if finish is None:
            compiled = compile_outer_step(step, inputs, captures)
        else:
            dtypes = [p.dtype for p in arguments.parameters.values() if p.requires_grad]
            step = functools.partial(_finished, step, finish, dtypes)
            compiled = compile_function(step, inputs, captures)
        compiled(*inputs)
        if changed := constants.changed_names(arguments.learner):
            raise RuntimeError(f"its forward changes the learner's {', '.join(changed)}")
        _require_same_loss(step, compiled, inputs)
    except Exception as error:
        return _CompiledStep(None, f"{type(error).__name__}: {first_line(error)}", None)
    return _CompiledStep(compiled, "", constants)


def _require_same_loss(step: Callable[..., Any], compiled: Callable[..., Any], inputs: Any) -> None:
    """Compare losses for other weights of the tasks than those of the compilation.

    Random numbers would be other ones in a compiled step, or constants.
    """
    parameters, episodes, weights = inputs
    others = torch.linspace(1, 2, len(weights), dtype=weights.dtype, device=weights.device)
    expected, again, found = (
        each(parameters, episodes, others).result.loss for each in (step, step, compiled)
    )
    # Not equal bits: on a GPU, the order of a sum may change from call to call.
    if not torch.allclose(again, expected, rtol=1e-6, atol=0, equal_nan=True):
        raise RuntimeError("its forward draws random numbers")
    if not torch.allclose(found, expected, rtol=0.01, equal_nan=True):
        raise RuntimeError("its loss differs from that of the eager step")


def _eager(
    like: StepArguments, parameters: list[Tensor], episodes: Episode, weights: Tensor
) -> StepSum:
    by_name = {
        name: value.detach().requires_grad_(parameter.requires_grad)
        for (name, parameter), value in zip(like.parameters.items(), parameters, strict=True)
    }
    return outer_step(like._replace(parameters=by_name, episodes=episodes, weights=weights))


def _finished(
    step: Callable[..., StepSum], finish: Finish, dtypes: list[torch.dtype], *inputs: Any
) -> FinishedStep:
    return finish(step(*inputs), dtypes)


def compile_outer_step(
    step: Callable[..., StepSum], arguments: Any, captures: bool
) -> Callable[..., StepSum]:
    """Compile or capture a step for the structure and the shapes of its arguments.

    Args:
        step: a function of parameters, episodes and weights.
        arguments: examples of parameters, episodes and weights.
        captures: see `CompiledSteps`.
    """
    dtypes: list[torch.dtype | None] = []

    def sums(*arguments: Any) -> Any:
        nonlocal dtypes
        step_sum = step(*arguments)
        dtypes = step_sum.dtypes
        return step_sum.result, step_sum.gradients

    run = compile_function(sums, arguments, captures)

    def compiled(*arguments: Any) -> StepSum:
        result, gradients = run(*arguments)
        return StepSum(result, gradients, dtypes)

    return compiled


def compile_function(
    function: Callable[..., Any], arguments: Any, captures: bool
) -> Callable[..., Any]:
    """Compile or capture a function for the structure and the shapes of its arguments.

    Args:
        function: a function of trees of tensors, which returns such a tree.
        arguments: examples of its arguments.
        captures: see `CompiledSteps`.
    """
    structure: Any = None

    def flat(*leaves: Tensor) -> list[Tensor]:
        nonlocal structure
        function_arguments: Any = optree.tree_unflatten(inputs, leaves)
        outputs, structure = optree.tree_flatten(function(*function_arguments))
        return outputs

    leaves, inputs = optree.tree_flatten(arguments)
    run = (capture if captures else _inductor_compiled)(flat, leaves)

    def compiled(*arguments: Any) -> Any:
        with torch.no_grad():
            tree: Any = arguments
            outputs: Any = run(*optree.tree_leaves(tree))
            if captures:  # the next replay writes into the same memory
                outputs = [output.clone() for output in outputs]
            return optree.tree_unflatten(structure, outputs)

    return compiled


def _inductor_compiled(
    function: Callable[..., list[Tensor]], leaves: list[Any]
) -> Callable[..., Any]:
    from torch import _inductor  # these take time to import
    from torch.fx.experimental.proxy_tensor import make_fx

    with pytorch_operations():
        # With fake tensors, control flow that depends on values raises an error. With real ones,
        # only one branch would be recorded.
        graph = make_fx(function, tracing_mode="fake")(*leaves)
    for node in reversed(graph.graph.nodes):
        if getattr(node.target, "namespace", "") == "profiler":  # would split the graph
            graph.graph.erase_node(node)
    graph.recompile()
    # `torch.compile` would check the inputs in each call, which takes 90 microseconds: the key of
    # `CompiledSteps` has what the code depends on. A C++ wrapper of the kernels is called faster.
    with torch.no_grad():
        return _inductor.compile(graph, leaves, options={"cpp_wrapper": True})


def _pad(tensor: Tensor, tasks: int) -> Tensor:
    """Append copies of the first task; the result is contiguous."""
    if not tasks:
        return tensor.contiguous()
    return torch.cat([tensor, tensor[:1].expand(tasks, *tensor.shape[1:])])
