"""Compiled and captured forms of the outer step.

On a GPU, the eager step is captured as a CUDA graph. On other devices, it is recorded with
`make_fx`, including the inner gradients and the derivative through them, and compiled with
TorchInductor. Both have one shape: chunks with fewer tasks are padded with tasks of weight zero.
"""

import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple, cast

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
from metadist.training.outer_step import StepArguments, StepSum, outer_step

_log = logging.getLogger(__name__)

_RECOMPILE_LIMIT = 8
"""The most compiled steps of a run: one for each shape of tasks and set of trained parameters."""


class CompileOptions(NamedTuple):
    """What a compiled step depends on besides its arguments.

    Attributes:
        configuration: a digest of the configuration that the learner was built from. Learners with
            the same digest differ in the values of their parameters only.
        chunk_size: number of tasks in a compiled chunk.
        captures: whether to capture the eager step as a CUDA graph, with the same bits in chunks of
            `chunk_size` tasks, instead of compiling it with TorchInductor.
    """

    configuration: str
    chunk_size: int
    captures: bool = False


class _CompiledStep(NamedTuple):
    """A compiled form of `outer_step`, or the reason why it cannot be compiled.

    Attributes:
        run: the compiled function of parameters, episodes and weights; None if it cannot be
            compiled.
        error: the reason why it cannot be compiled.
        constants: the learner's constants when it was compiled; None if it cannot be.
    """

    run: Callable[..., StepSum] | None
    error: str
    constants: Constants | None


class CompiledSteps:
    """Compiled forms of `outer_step`, one for each configuration and task shape.

    If a form cannot be compiled, the step runs eagerly, which is logged once.
    """

    def __init__(self) -> None:
        self._steps: dict[Any, _CompiledStep] = {}
        self._logged: set[tuple[CompileOptions, str]] = set()

    def __call__(self, options: CompileOptions, arguments: StepArguments) -> StepSum:
        """The same as `outer_step` up to rounding.

        Args:
            options: the run's options of compilation.
            arguments: the arguments of `outer_step`, with at most `options.chunk_size` tasks.
        """
        inputs = _padded_inputs(options, arguments)
        step = self._find(options, arguments, inputs)
        if step.run is not None:
            with profile_range("compiled_step"):
                return step.run(*inputs)
        if (options, step.error) not in self._logged:
            self._logged.add((options, step.error))
            log_eager(options, f"{failure(options)} ({step.error})")
        return outer_step(arguments)

    def compile(self, options: CompileOptions, arguments: StepArguments) -> str | None:
        """Compile the step that a call with these arguments runs, unless it is compiled already.

        Returns:
            The reason why it cannot be compiled; None if it can.
        """
        step = self._find(options, arguments, _padded_inputs(options, arguments))
        return None if step.run is not None else step.error

    def clear(self) -> None:
        """Forget the compiled steps, and free the GPU memory of captured ones."""
        self._steps.clear()
        self._logged.clear()

    def _find(
        self, options: CompileOptions, arguments: StepArguments, inputs: Any
    ) -> _CompiledStep:
        episodes = arguments.episodes
        shapes = tuple((tensor.shape[1:], tensor.dtype) for part in episodes for tensor in part)
        layouts = tuple(
            (p.dtype, p.shape, p.stride(), p.requires_grad) for p in arguments.parameters.values()
        )
        device = episodes.query.inputs.device
        key = (options, shapes, layouts, device, arguments.precision)
        step, learner = self._steps.get(key), arguments.learner
        if step is None:
            compiled = sum(known[0] == options for known in self._steps)
            if compiled < _RECOMPILE_LIMIT:
                step = _compile(options, arguments, inputs)
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


def failure(options: CompileOptions) -> str:
    """What the log says about a step that cannot be compiled or captured."""
    return f"it cannot be {'captured as a CUDA graph' if options.captures else 'compiled'}"


def log_eager(options: CompileOptions, reason: str) -> None:
    """Log on rank zero that the step runs eagerly; as a warning if it was to be compiled."""
    if get_rank() == 0:
        level = logging.INFO if options.captures else logging.WARNING
        _log.log(level, "the outer step runs eagerly: %s", reason)


def _padded_inputs(options: CompileOptions, arguments: StepArguments) -> Any:
    """Parameters, episodes and weights of a chunk, padded to `chunk_size` tasks with weight zero.

    Episodes and weights are contiguous, padded or not, since a compiled step has one layout.
    """
    weights = arguments.weights
    padding = options.chunk_size - len(weights)
    if padding:
        weights = torch.cat([weights, weights.new_zeros(padding)])
    episodes = Episode(
        *(Examples(_pad(x, padding), _pad(y, padding)) for x, y in arguments.episodes)
    )
    return [p.detach() for p in arguments.parameters.values()], episodes, weights


def _compile(options: CompileOptions, arguments: StepArguments, inputs: Any) -> _CompiledStep:
    constants = None
    try:
        constants = Constants(arguments.learner)
        step = functools.partial(_eager, arguments)
        compiled = compile_outer_step(step, inputs, options.captures)
        compiled(*inputs)
        if changed := constants.changed_names(arguments.learner):
            raise RuntimeError(f"its forward changes the learner's {', '.join(changed)}")
        _require_same_loss(step, compiled, inputs)
    except Exception as error:
        return _CompiledStep(None, f"{type(error).__name__}: {first_line(error)}", None)
    return _CompiledStep(compiled, "", constants)


def _require_same_loss(
    step: Callable[..., StepSum], compiled: Callable[..., StepSum], inputs: Any
) -> None:
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


def compile_outer_step(
    step: Callable[..., StepSum], arguments: Any, captures: bool
) -> Callable[..., StepSum]:
    """Compile or capture a step for the structure and the shapes of its arguments.

    Args:
        step: a function of parameters, episodes and weights.
        arguments: examples of parameters, episodes and weights.
        captures: see `CompileOptions`.
    """
    structure: Any = None
    dtypes: list[torch.dtype | None] = []

    def flat(*leaves: Tensor) -> list[Tensor]:
        nonlocal structure, dtypes
        step_arguments: Any = optree.tree_unflatten(inputs, leaves)
        step_sum = step(*step_arguments)
        dtypes = step_sum.dtypes
        sums: Any = (step_sum.result, step_sum.gradients)
        outputs, structure = optree.tree_flatten(sums)
        return outputs

    leaves, inputs = optree.tree_flatten(arguments)
    run = (capture if captures else _inductor_compiled)(flat, leaves)

    def compiled(*arguments: Any) -> StepSum:
        with torch.no_grad():
            tree: Any = arguments
            outputs: Any = run(*optree.tree_leaves(tree))
            if captures:  # the next replay writes into the same memory
                outputs = [output.clone() for output in outputs]
            result, gradients = cast(Any, optree.tree_unflatten(structure, outputs))
        return StepSum(result, gradients, dtypes)

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
