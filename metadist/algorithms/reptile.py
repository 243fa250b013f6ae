"""Reptile (Nichol, Achiam and Schulman 2018, arXiv 1803.02999)."""

from collections.abc import Iterator
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from metadist.algorithms.inner_loop import (
    InnerLoopLearner,
    Parameters,
    flatten_tensors,
    unflatten_tensors,
)
from metadist.algorithms.learner import TaskResult
from metadist.errors import UserError
from metadist.gradients import with_gradients
from metadist.tasks import Episode, Examples

_BETA2 = 0.999
_EPSILON = 1e-8


class Reptile(InnerLoopLearner):
    """Train on the support set of a task, then move the parameters towards the result.

    In a task (algorithms 1 and 2 of the paper), from the initial parameters φ:

        W = φ after `inner_steps` steps of an optimizer on minibatches of the support set
        gradient = φ - W

    An outer SGD step with learning rate ε is the paper's φ ← φ + ε mean(W - φ):
    `optimizer=reptile optimizer.lr=ε`, the default of `algorithm=reptile`, with ε = 1 decaying to
    0 (`scheduler=linear`) in most of its experiments. The query set is not used in training: the
    gradient of the reported loss, the query loss of W, is φ - W by construction. Training tasks
    may have more shots than test tasks (`task.train_shots`); the authors use 10 to 15.

    The inner Adam is as in the authors' code: β₁ = 0, and second moments that persist across tasks
    and into evaluation. The moments are buffers of the learner: every task of a meta-batch starts
    from them, and they are averaged over the tasks. They are moments of the gradient summed over
    the examples of a minibatch, so that a test with smaller minibatches than training takes smaller
    steps.

    Differences from the authors' code (github.com/openai/supervised-reptile):

    - The second moments there decay in series, task after task; here as if tasks were concurrent.
    - Omniglot's images there are not inverted: strokes are 0 and the background 1.
    - Batch norm there has an ε of 1e-3 instead of 1e-5.
    - The head's initial weights there are Glorot uniform; here their standard deviation is 0.01.
    - Strided convolutions there pad unevenly (TensorFlow's "SAME"); here by a pixel on both sides.
    - Rotations of a character are separate classes there and may be in the same task.

    Args:
        model: the network whose parameters are meta-learned.
        regression: regression instead of classification.
        inner_optimizer: "adam" or "sgd" (without momentum).
        inner_lr: inner learning rate.
        inner_steps: inner steps in training.
        inner_batch_size: examples per minibatch in training; None for the whole support set.
        eval_inner_steps: inner steps in evaluation; None for as many as in training.
        eval_inner_batch_size: examples per minibatch in evaluation; None for the whole support set.
        transductive: see `Learner`; the paper reports both.
    """

    batches_tasks = True
    batches_buffers = True
    needs_task_seeds = True
    published_optimizers = ("SGD",)
    training_options = ("inner_steps", "inner_batch_size")

    # Buffers, with the inner Adam only.
    exp_avg_sq: Tensor
    step: Tensor

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_optimizer: Literal["adam", "sgd"] = "adam",
        inner_lr: Annotated[float, Gt(0)] = 0.001,
        inner_steps: Annotated[int, Ge(1)] = 5,
        inner_batch_size: Annotated[int, Ge(1)] | None = 10,
        eval_inner_steps: Annotated[int, Ge(1)] | None = 50,
        eval_inner_batch_size: Annotated[int, Ge(1)] | None = None,
        transductive: bool = True,
    ) -> None:
        super().__init__(model, regression, inner_steps, eval_inner_steps, transductive)
        self.inner_optimizer = inner_optimizer
        self.inner_lr = inner_lr
        self.inner_batch_size = inner_batch_size
        self.eval_inner_batch_size = eval_inner_batch_size
        if inner_optimizer == "adam":
            second_moments = torch.zeros_like(flatten_tensors(self.initial().values()).detach())
            self.register_buffer("exp_avg_sq", second_moments)
            self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def initial(self) -> Parameters:
        """See `InnerLoopLearner`; the parameters that are trainable now.

        With Adam, those that were trainable when the learner was made, for which it has moments,
        also if they were frozen later.

        Raises:
            UserError: in training with Adam, a parameter that was frozen at first is trainable.
        """
        parameters: Parameters = dict(self.model.named_parameters())
        if self.inner_optimizer != "adam":
            return self.without_frozen(parameters)
        initial = {name: parameters.pop(name) for name in self.adapted_names}
        unfrozen = [name for name, parameter in parameters.items() if parameter.requires_grad]
        if unfrozen and self.training:
            raise UserError(
                f"{unfrozen[0]} was frozen when Reptile was made, so that its inner Adam has no "
                "moments for it: freeze it later, or choose algorithm.inner_optimizer=sgd."
            )
        return initial

    def train_task(self, episode: Episode) -> TaskResult:
        """See the class."""
        start = self.initial()
        adapted = self.adapt(start, episode.support, self.inner_steps)
        with torch.no_grad():
            # Copies, since the query set changes no buffers, such as running statistics.
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            predictions = self.predict({**adapted, **buffers}, episode.query.inputs)
            value = self.loss(predictions, episode.query.targets)
            gradients = [start[name] - adapted[name] for name in start]
        loss = with_gradients(value, list(start.values()), gradients)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets))

    @torch.no_grad()
    def trajectory(
        self, parameters: Parameters, support: Examples, steps: int, create_graph: bool = False
    ) -> Iterator[Parameters]:
        """See `InnerLoopLearner`; the steps are never differentiated."""
        task_dims = self.task_dims(support)
        vector = flatten_tensors(parameters.values(), task_dims)
        adam = self.inner_optimizer == "adam"
        if adam:
            exp_avg_sq, count = self.exp_avg_sq, int(self.step.max())  # the same in all tasks
        for batch in self.minibatches(support, steps):
            gradient = flatten_tensors(
                self.gradients(unflatten_tensors(vector, parameters), batch).values(), task_dims
            )
            if adam:
                gradient = gradient * batch.targets.shape[task_dims]  # sum over examples
                count += 1
                exp_avg_sq = _BETA2 * exp_avg_sq + (1 - _BETA2) * gradient**2
                gradient = gradient / ((exp_avg_sq / (1 - _BETA2**count)).sqrt() + _EPSILON)
            vector = vector - self.inner_lr * gradient
            yield unflatten_tensors(vector, parameters)
        if adam and self.training:
            self.exp_avg_sq.copy_(exp_avg_sq)
            self.step.fill_(count)

    def minibatches(self, support: Examples, steps: int) -> Iterator[Examples]:
        """One minibatch per step, from consecutive permutations of the support set."""
        axis = self.task_dims(support)
        examples = support.targets.shape[axis]
        size = (self.inner_batch_size if self.training else self.eval_inner_batch_size) or examples
        epochs = -(-steps * size // examples)
        device = support.inputs.device

        def permutations(generator: torch.Generator | None) -> Tensor:
            drawn = [
                torch.randperm(examples, generator=generator, device=device) for _ in range(epochs)
            ]
            return torch.cat(drawn)[: steps * size]

        if not axis:
            for batch in permutations(None).split(size):
                yield Examples(support.inputs[batch], support.targets[batch])
            return
        generator = torch.Generator(device)
        indices = torch.stack(
            [permutations(generator.manual_seed(seed)) for seed in self.task_seeds]
        )
        tasks = torch.arange(len(indices), device=device).unsqueeze(1)
        for batch in indices.split(size, 1):
            yield Examples(support.inputs[tasks, batch], support.targets[tasks, batch])
