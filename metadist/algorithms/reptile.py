"""Reptile: move towards what training on a task leads to (Nichol et al. 2018, arXiv 1803.02999)."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from metadist.algorithms.inner_loop import InnerLoopLearner, Parameters, flat, unflat, with_gradient
from metadist.algorithms.learner import TaskResult

_DECAY = 0.999
_EPSILON = 1e-8


class Reptile(InnerLoopLearner):
    """Train on a task's support set in the ordinary way, then go some of the way there.

    In a task (algorithms 1 and 2 of the paper), from the initial parameters φ:

        W = φ after `inner_steps` steps of an optimizer on minibatches of the support set
        gradient = φ - W

    so an outer step of gradient descent with rate ε is the paper's φ ← φ + ε mean(W - φ):
    `optimizer=sgd optimizer.momentum=0 optimizer.lr=ε`, with ε = 1 in most of its experiments and
    decaying to 0. Any other optimizer may take the gradient, as the paper notes. The query set
    has no part in it: the loss that is reported, the query loss of W, has φ - W as its derivative
    by construction. Tasks of training may have more examples than those of the test
    (`task.train_shots`); the authors take 10 to 15 a class.

    The inner Adam is the authors': without a mean of the gradients (β₁ = 0), and with a mean of
    their squares that goes on from task to task. Here it is part of the learner's buffers: every
    task of a meta-batch starts from it, and the mean over the tasks is kept.

    Args:
        model: the network whose parameters are meta-learned.
        regression: targets are real numbers rather than classes.
        inner_optimizer: "adam" or "sgd", the latter without momentum.
        inner_lr: its step size.
        inner_steps: its steps in training.
        inner_batch: examples in a minibatch in training; None for the whole support set.
        eval_inner_steps: steps in evaluation. Default: as many as in training.
        eval_inner_batch: examples in a minibatch in evaluation; None for the whole support set.
        transductive: see `Learner`; the paper reports both.
    """

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_optimizer: Literal["adam", "sgd"] = "adam",
        inner_lr: Annotated[float, Gt(0)] = 0.001,
        inner_steps: Annotated[int, Ge(1)] = 5,
        inner_batch: Annotated[int, Ge(1)] | None = 10,
        eval_inner_steps: Annotated[int, Ge(1)] | None = 50,
        eval_inner_batch: Annotated[int, Ge(1)] | None = None,
        transductive: bool = True,
    ) -> None:
        super().__init__(model, regression, inner_steps, eval_inner_steps, transductive)
        self.inner_optimizer = inner_optimizer
        self.inner_lr = inner_lr
        self.inner_batch = inner_batch
        self.eval_inner_batch = eval_inner_batch
        if inner_optimizer == "adam":
            squares = torch.zeros_like(flat(model.parameters()).detach())
            self.register_buffer("squares", squares)
            self.register_buffer("squares_of", torch.zeros((), dtype=torch.int64))

    def train_task(self, episode: Any) -> TaskResult:
        """See the class."""
        start = self.initial()
        adapted = self.adapt(start, episode.support, self.inner_steps)
        with torch.no_grad():
            predictions = self.predict(adapted, episode.query.inputs)
            value = self.loss(predictions, episode.query.targets)
            gradient = {name: start[name] - adapted[name] for name in start}
        loss = with_gradient(value, start, gradient)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets))

    @torch.no_grad()
    def trajectory(
        self, parameters: Parameters, support: Any, steps: int, create_graph: bool = False
    ) -> Iterator[Parameters]:
        """See `InnerLoopLearner`; nothing is ever differentiated through these steps."""
        vector = flat(parameters.values())
        squares, count = self._memory()
        for batch in self._minibatches(support, steps):
            gradient = flat(self.gradients(unflat(vector, parameters), batch).values())
            if squares is not None:
                count += 1
                squares = _DECAY * squares + (1 - _DECAY) * gradient**2
                gradient = gradient / ((squares / (1 - _DECAY**count)).sqrt() + _EPSILON)
            vector = vector - self.inner_lr * gradient
            yield unflat(vector, parameters)
        if squares is not None and self.training:
            self.squares.copy_(squares)
            self.squares_of.fill_(count)

    def _memory(self) -> tuple[Tensor | None, int]:
        """Adam's mean of squares, none for gradient descent, and of how many steps it is."""
        if self.inner_optimizer == "sgd":
            return None, 0
        return self.squares, int(self.squares_of)

    def _minibatches(self, support: Any, steps: int) -> Iterator[Any]:
        """Minibatches of the shuffled support set, of one order after the other."""
        examples = len(support.targets)
        size = (self.inner_batch if self.training else self.eval_inner_batch) or examples
        orders = -(-steps * size // examples)
        device = support.inputs.device
        places = torch.cat([torch.randperm(examples, device=device) for _ in range(orders)])
        for chosen in places[: steps * size].split(size):
            yield type(support)(support.inputs[chosen], support.targets[chosen])

    def method(self) -> dict[str, Any]:
        """The inner optimizer with its rate and minibatches."""
        return {
            "algorithm": "Reptile",
            "inner_optimizer": self.inner_optimizer,
            "inner_lr": self.inner_lr,
            "inner_batch": self.inner_batch,
            "eval_inner_batch": self.eval_inner_batch,
        }
