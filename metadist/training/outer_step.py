"""One outer step: the gradient of a meta-batch, and what is made of it."""

import math
import random
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from metadist.algorithms import TaskResult
from metadist.distributed.phases import phase
from metadist.distributed.reducers import LinearReducer
from metadist.tasks import stack_episodes, task_keys
from metadist.training.experiment import Experiment
from metadist.training.mappers import MetaBatch


class Outcome(NamedTuple):
    """What a meta-batch came to, its gradient lying in the parameters' `.grad`.

    Attributes:
        result: the reduced result, detached.
        loss: the reduced loss.
        gradient_norm: the Euclidean norm of the whole gradient, as it came.
    """

    result: TaskResult
    loss: float
    gradient_norm: float

    @property
    def finite(self) -> bool:
        """Whether neither loss nor gradient holds a NaN or an infinity."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def meta_batch(experiment: Experiment, keys: Tensor) -> MetaBatch:
    """What travels for some keys, of shape (tasks, 4): the keys, or the tasks themselves."""
    if not experiment.trainer.send_tasks:
        return MetaBatch(keys)
    return MetaBatch(keys, stack_episodes([experiment.tasks.draw(key) for key in keys]))


def training_keys(experiment: Experiment, iteration: int) -> Tensor:
    """The keys of an iteration's meta-batch, shape (meta_batch_size, 4)."""
    tasks = range(experiment.trainer.meta_batch_size)
    return task_keys(experiment.seed, "train", iteration, tasks)


def differentiate(experiment: Experiment, iteration: int) -> Outcome:
    """Loss and gradient of an iteration's meta-batch; parameters and buffers stay as they are.

    Called by the ranks that run the loop, all of which get the same.
    """
    x = experiment
    with phase("data"):
        batch = meta_batch(x, training_keys(x, iteration))
    result = x.strategy.backward(x.train_mapper, x.learner, batch)
    with phase("outer step"):
        return Outcome(result, result.loss.item(), gradient_norm(x.learner))


def advance(experiment: Experiment, iteration: int, outcome: Outcome, skip: bool = False) -> None:
    """Take the step: clip, optimizer, running statistics, learning rate.

    With `skip`, only the learning rate's schedule goes on. The process's own random generators
    are set from seed and iteration first, so what an optimizer draws from them does not depend
    on what was drawn before.
    """
    x = experiment
    if skip:
        x.optimizer.zero_grad(set_to_none=True)  # a step without gradients changes nothing
    else:
        _clip(x)
        for name, buffer in x.learner.named_buffers():
            change = outcome.result.buffers[name] / total_weight(x)
            # The mean of equal whole numbers may lie a hair beside them.
            buffer += (change if buffer.is_floating_point() else change.round()).to(buffer)
    _seed_generators(x.seed, iteration)
    x.optimizer.step()
    x.scheduler.step()


def total_weight(experiment: Experiment) -> float:
    """What the weights of a meta-batch's tasks add up to: 1 for a mean.

    Only the loss may be a sum; what is reported, and running statistics, are means.
    """
    reducer = experiment.strategy.reducer
    if not isinstance(reducer, LinearReducer):
        return 1.0
    ones = [1.0] * experiment.trainer.meta_batch_size
    return sum(reducer.weights(ones)) / (reducer.divisor(ones) or 1.0)


def gradient_norm(module: nn.Module) -> float:
    """The Euclidean norm of all gradients together; infinite or NaN only if an element is."""
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    norms = [torch.linalg.vector_norm(g, dtype=torch.float64) for g in gradients]
    if not norms:
        return 0.0
    return torch.linalg.vector_norm(torch.stack(norms)).item()


def _clip(experiment: Experiment) -> None:
    trainer, parameters = experiment.trainer, list(experiment.learner.parameters())
    if trainer.clip_value is not None:
        torch.nn.utils.clip_grad_value_(parameters, trainer.clip_value)
    if trainer.clip_norm is not None:
        norm = torch.tensor(gradient_norm(experiment.learner), dtype=torch.float64)
        torch.nn.utils.clip_grads_with_norm_(parameters, trainer.clip_norm, norm)


def _seed_generators(seed: int, iteration: int) -> None:
    number = hash((seed, iteration))
    random.seed(number)
    np.random.seed(number % 2**32)
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.manual_seed(number)
