"""Blocks of outer steps in one process: what they have in common is done once.

With a small model, the work around a compiled step takes longer than the step. The tasks of a block
are sampled at once, and the learner is checked once; then the steps follow one another.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer
from torch.optim import optimizer as optimizers

from metadist.algorithms import TaskResult
from metadist.algorithms.functional import parameters_by_name
from metadist.distributed.partitioners import DimPartitioner
from metadist.profile_ranges import profile_range
from metadist.tasks import Episode, Examples
from metadist.training.batching import input_elements, last_classes, max_chunk_size
from metadist.training.clipping import optimized_parameters
from metadist.training.compiled_steps import CompiledSteps
from metadist.training.device import resolve_device
from metadist.training.experiment import Experiment, shard_sizes, training_keys
from metadist.training.outer_step import FinishedStep, StepArguments, finish_step, outer_step
from metadist.training.strategies.local import LocalStrategy
from metadist.training.task_mapper import task_weights

_CPU = torch.device("cpu")
_MAX_STEPS = 64
_MAX_ELEMENTS = 2**16
"""Bounds of the steps of a block, and of the elements of its tasks, which then stay in the
processor's cache."""


class StepBlocks:
    """Computes the results and gradients of blocks of outer steps, with the bits of single steps.

    Args:
        experiment: an experiment that has a `block_size`.
        size: its `block_size`.
        compiles: whether to compile the steps with TorchInductor.

    Attributes:
        size: the most outer steps in a block.
        compiled: the compiled steps, each of a whole meta-batch; None if they run eagerly, as after
            an attempt to compile one that failed.
    """

    def __init__(self, experiment: Experiment, size: int, compiles: bool) -> None:
        reducer: Any = experiment.strategy.reducer
        sizes = shard_sizes(experiment)
        self._weights = task_weights([int(size) for size in sizes], reducer.weights(sizes))
        self._finish = partial(finish_step, divisor=reducer.divisor(sizes))
        self._experiment = experiment
        self.size = size
        self.compiled: CompiledSteps | None = None
        if compiles:
            self.compiled = CompiledSteps(len(self._weights), finish=self._finish)

    def __call__(self, iterations: range) -> Iterator[tuple[TaskResult, float]]:
        """Compute the meta-batches of consecutive iterations.

        The caller may change the values of the parameters after each of them.

        Args:
            iterations: the iterations.

        Yields:
            The reduced result of each meta-batch, and the norm of its gradient, which is in
            `.grad`. Nothing if the caller is to take single steps: the tasks cannot be sampled at
            once, or the optimizer lacks parameters that require grad.
        """
        experiment, mapper = self._experiment, self._experiment.train_mapper
        run: Callable[..., FinishedStep] | None = None
        for episodes in self._sample(iterations):
            if run is None:  # an eager step may change the learner
                learner, parameters = mapper.prepare(experiment.learner.train(), _CPU)
                trained = _trained_parameters(experiment)
                if not trained:
                    return
                for parameter in parameters.values():
                    parameter.grad = None  # also of those that no longer require grad
            arguments = StepArguments(
                learner, parameters, episodes, self._weights, mapper.precision
            )
            if run is None and self.compiled is not None:
                run = self.compiled.find(arguments)
                if run is None:
                    self.compiled = None
            if run is None:
                step = self._finish(outer_step(arguments), [each.dtype for each in trained])
            else:
                # In each step, since an optimizer may replace `parameter.data`.
                values = [parameter.detach() for parameter in parameters.values()]
                with profile_range("compiled_step"):
                    step = run(values, episodes, self._weights)
            for parameter, gradient in zip(trained, step.gradients, strict=True):
                parameter.grad = gradient
            yield step.result, torch.linalg.vector_norm(step.flat_gradient).item()

    def _sample(self, iterations: range) -> Iterator[Episode]:
        """The stacked tasks of each iteration; nothing if they cannot be sampled at once."""
        experiment, tasks = self._experiment, len(self._weights)
        keys = training_keys(experiment, iterations.start).repeat(len(iterations), 1)
        keys[:, 2] += torch.arange(len(iterations)).repeat_interleave(tasks)
        with profile_range("data"):
            episodes = _sample_batch(experiment, keys)
        if episodes is None or len(set(last_classes(experiment.learner, episodes))) > 1:
            return
        for part in zip(*(t.split(tasks) for each in episodes for t in each), strict=True):
            # Copies, since the rounding of products depends on the alignment of memory.
            copies = [tensor.clone(memory_format=torch.contiguous_format) for tensor in part]
            yield Episode(Examples(*copies[:2]), Examples(*copies[2:]))


def _sample_batch(experiment: Experiment, keys: Tensor) -> Episode | None:
    """The stacked tasks of keys of shape (tasks, 4); None if they cannot be sampled at once."""
    sample = getattr(experiment.train_mapper.tasks.value, "sample_batch", None)
    return None if sample is None else sample(keys, keys.device)


def _trained_parameters(experiment: Experiment) -> list[nn.Parameter]:
    """The parameters that require grad; [] if the optimizer has others or another order."""
    parameters = parameters_by_name(experiment.learner).values()
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    optimized = [p for p in optimized_parameters(experiment.optimizer) if p.requires_grad]
    return trained if [*map(id, trained)] == [*map(id, optimized)] else []


def block_size(experiment: Experiment) -> int:
    """The most outer steps in a block; 0 or 1 if the steps are taken one by one.

    Blocks need `strategy=local` with a built-in partitioner, a CPU, tasks that may be sampled in
    advance (`looks_ahead`), are batched as one chunk and are small enough for a cache, a learner
    without buffers or random numbers, an optimizer of all its parameters that require grad, and
    neither callbacks, which follow each step, nor `profile` or `send_tasks`.

    Args:
        experiment: the experiment.
    """
    config, strategy, learner = experiment.trainer_config, experiment.strategy, experiment.learner
    device = resolve_device(experiment.train_mapper.device)
    trained = _trained_parameters(experiment)
    if (
        type(strategy) is not LocalStrategy
        or type(strategy.partitioner) is not DimPartitioner
        or device.type != "cpu"
        or config.send_tasks
        or not getattr(experiment.tasks, "looks_ahead", False)
        or config.profile
        or experiment.callbacks
        or learner.needs_task_seeds
        or any(True for _ in learner.buffers())
        or not trained
        or not all(parameter.is_contiguous() for parameter in trained)
    ):
        return 0
    batch = _sample_batch(experiment, training_keys(experiment, 1))
    if batch is None:
        return 0
    tasks = config.meta_batch_size
    largest = max_chunk_size(
        learner, input_elements(batch) // tasks, device, experiment.train_mapper.chunk_size
    )
    elements = sum(tensor.numel() for examples in batch for tensor in examples)
    return min(_MAX_STEPS, _MAX_ELEMENTS // elements) if largest >= tasks else 0


def adam_step(optimizer: Optimizer) -> bool:
    """Take a step of PyTorch's fused Adam or AdamW, with the bits of `optimizer.step`.

    It leaves out checks that take longer than the computation for a small model.

    Args:
        optimizer: any optimizer.

    Returns:
        False if the optimizer is another one, has hooks, has taken no step yet or has no gradients;
        nothing is changed then.
    """
    hooks = (
        optimizer._optimizer_step_pre_hooks,  # noqa: SLF001
        optimizer._optimizer_step_post_hooks,  # noqa: SLF001
        optimizers._global_optimizer_pre_hooks,  # noqa: SLF001
        optimizers._global_optimizer_post_hooks,  # noqa: SLF001
    )
    if type(optimizer) not in (Adam, AdamW) or any(hooks):
        return False
    updates = []
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        if not parameters:
            continue
        states = [optimizer.state[parameter] for parameter in parameters]
        if not group["fused"] or group["amsgrad"] or not all(states):
            return False
        updates.append((group, parameters, states))
    if not updates:  # a scheduler warns if `step` was never called
        return False
    with torch.no_grad():
        for group, parameters, states in updates:
            steps = [state["step"] for state in states]
            for step in steps:
                step.add_(1)
            update = torch._fused_adam_  # `torch.optim.adam.adam` takes twice as long
            if group["decoupled_weight_decay"]:
                update = torch._fused_adamw_
            update(
                parameters,
                [parameter.grad for parameter in parameters],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                amsgrad=False,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=group["maximize"],
            )
    return True
