"""MAML++ (Antoniou, Edwards and Storkey 2019, arXiv 1810.09502)."""

from collections.abc import Iterator
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import nn

from metadist.algorithms.inner_loop import InnerLoopLearner, Parameters
from metadist.algorithms.learner import TaskResult
from metadist.models.per_step_norm import give_norms_steps


class MAMLPlusPlus(InnerLoopLearner):
    """MAML with the remedies of "How to train your MAML", section 4.

    In a task, with K = `inner_steps` and θ_0 = θ, for i = 0 … K - 1:

        θ_{i+1} = θ_i - α_i ∘ ∇ L(support; θ_i, norms_i)
        loss = Σ_i v_i L(query; θ_{i+1}, norms_i)

    - Per-layer per-step rates: α_i has a rate for each of the model's tensors. Rates are
      learned, and so may become negative.
    - Per-step batch norm: norms_i are batch-norm layers of step i alone, with weights of their
      own, which no inner step adapts, and statistics of their own, where the model keeps any
      (`model.running_statistics=true`); otherwise, as in the authors' code, they normalise by
      the batch at hand.
    - Multi-step loss: the v_i are 1/K in the first iteration; all but the last fall in a
      straight line, for the last one's benefit, to 0 at `multi_step_iterations`.
    - Derivative-order annealing: first order for the first `first_order_iterations`.
    - Cosine annealing of the outer rate is the outer optimizer's business: `scheduler=cosine`.

    Evaluation steps beyond K use the last step's rates and norms.

    The learner counts the iterations in a buffer, as batch norm counts its batches: a task adds
    one, and the mean over a meta-batch is one. Like every buffer the count reaches all workers
    with the learner and is saved in checkpoints, so schedules go on exactly where they stopped.

    Args:
        model: the network whose parameters are meta-learned. Its batch norms are replaced.
        regression: targets are real numbers rather than classes.
        inner_lr: what every rate is at the start.
        inner_steps: K.
        eval_inner_steps: inner steps in evaluation. Default: as many as in training.
        multi_step_iterations: when only the last step's loss is left; 0 for never another.
        first_order_iterations: how long inner gradients are treated as constants.
        transductive: see `Learner`.
    """

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_lr: Annotated[float, Gt(0)] = 0.1,
        inner_steps: Annotated[int, Ge(1)] = 5,
        eval_inner_steps: Annotated[int, Ge(1)] | None = None,
        multi_step_iterations: Annotated[int, Ge(0)] = 5000,
        first_order_iterations: Annotated[int, Ge(0)] = 25000,
        transductive: bool = True,
    ) -> None:
        super().__init__(model, regression, inner_steps, eval_inner_steps, transductive)
        self.inner_lr = inner_lr
        self.multi_step_iterations = multi_step_iterations
        self.first_order_iterations = first_order_iterations
        self._norms = give_norms_steps(model, inner_steps)
        self._adapted = [
            name
            for name, _ in model.named_parameters()
            if not name.startswith(tuple(f"{norm}." for norm in self._norms))
        ]
        like = next(model.parameters())
        self.rates = nn.Parameter(like.new_full((len(self._adapted), inner_steps), inner_lr))
        self.register_buffer("iteration", torch.zeros((), dtype=torch.int64))

    def initial(self) -> Parameters:
        """The parameters that inner steps adapt, with the norms set to the first step."""
        self._use_norms_of(0)
        parameters = dict(self.model.named_parameters())
        return {name: parameters[name] for name in self._adapted}

    def train_task(self, episode: Any) -> TaskResult:
        """See the class."""
        iteration = int(self.iteration)
        second_order = iteration >= self.first_order_iterations
        parameters = self.initial()
        losses = []
        for step, weight in enumerate(self.loss_weights(iteration)):
            parameters = self._step(parameters, episode.support, step, second_order)
            if weight:
                predictions = self.predict(parameters, episode.query.inputs)
                losses.append(weight * self.loss(predictions, episode.query.targets))
        self.iteration += 1
        metrics = self.metrics(predictions, episode.query.targets)
        return TaskResult(torch.stack(losses).sum(), metrics)

    def loss_weights(self, iteration: int) -> list[float]:
        """v_0 … v_{K-1} in an iteration, counted from 0; they add up to 1."""
        steps, annealed = self.inner_steps, 1.0
        if iteration < self.multi_step_iterations:
            annealed = iteration / self.multi_step_iterations
        early = (1 - annealed) / steps
        return [early] * (steps - 1) + [1 - early * (steps - 1)]

    def trajectory(
        self, parameters: Parameters, support: Any, steps: int, create_graph: bool = False
    ) -> Iterator[Parameters]:
        """See `InnerLoopLearner`; the norms of the step just taken are in use."""
        for step in range(steps):
            parameters = self._step(parameters, support, step, create_graph)
            yield parameters

    def _step(
        self, parameters: Parameters, support: Any, step: int, create_graph: bool
    ) -> Parameters:
        self._use_norms_of(step)
        gradients = self.gradients(parameters, support, create_graph)
        rates = self.rates[:, min(step, self.inner_steps - 1)]
        return {
            name: parameter - rate * gradients[name]
            for (name, parameter), rate in zip(parameters.items(), rates, strict=True)
        }

    def _use_norms_of(self, step: int) -> None:
        for name in self._norms:
            self.model.get_submodule(name).step = step

    def method(self) -> dict[str, Any]:
        """Rates at the start, and the schedules."""
        return {
            "algorithm": "MAML++",
            "inner_lr": f"learned for each layer and step, {self.inner_lr} at the start",
            "multi_step_iterations": self.multi_step_iterations,
            "first_order_iterations": self.first_order_iterations,
        }
