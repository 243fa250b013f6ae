"""Model-agnostic meta-learning (Finn, Abbeel and Levine 2017, arXiv 1703.03400)."""

from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.func import functional_call

from metadist.algorithms.learner import Learner, TaskResult


class MAML(Learner):
    """Learn initial parameters from which a few gradient steps solve a new task.

    In a task, from the initial parameters θ (algorithm 1 and equation 1 of the paper):

        φ ← φ - α ∇φ L(support; φ), starting at φ = θ, `inner_steps` times
        loss = L(query; φ)

    The meta-gradient ∇θ loss goes through the steps (second order), or treats each ∇φ as a
    constant (`first_order`).

    Args:
        model: the network whose parameters are meta-learned.
        regression: targets are real numbers rather than classes.
        inner_lr: α, the size of an inner step.
        inner_steps: inner steps in training. With 0 one network learns all tasks, and only
            evaluation adapts it: the paper's pretrained baseline.
        eval_inner_steps: inner steps in evaluation. Default: as many as in training.
        first_order: drop the second derivatives.
        transductive: see `Learner`.
    """

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_lr: Annotated[float, Gt(0)] = 0.4,
        inner_steps: Annotated[int, Ge(0)] = 1,
        eval_inner_steps: Annotated[int, Ge(1)] | None = None,
        first_order: bool = False,
        transductive: bool = True,
    ) -> None:
        super().__init__(model, regression, transductive)
        self.inner_lr = inner_lr
        self.inner_steps = inner_steps
        self.eval_inner_steps = inner_steps if eval_inner_steps is None else eval_inner_steps
        self.first_order = first_order

    @property
    def side_by_side(self) -> bool:
        """Yes, if the model can."""
        return getattr(self.model, "side_by_side", False) and (self.training or self.transductive)

    def forward(self, episode: Any) -> TaskResult:
        """Adapt on `episode.support`, judge on `episode.query`."""
        return self._train(episode) if self.training else self._evaluate(episode)

    def _train(self, episode: Any) -> TaskResult:
        parameters = dict(self.model.named_parameters())
        for _ in range(self.inner_steps):
            parameters = self._inner_step(parameters, episode.support, not self.first_order)
        predictions = functional_call(self.model, parameters, (episode.query.inputs,))
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets))

    def _evaluate(self, episode: Any) -> TaskResult:
        parameters = {
            name: parameter.detach().requires_grad_()
            for name, parameter in self.model.named_parameters()
        }
        metrics = self._judge(parameters, episode, "_before")[1]
        for step in range(1, self.eval_inner_steps + 1):
            stepped = self._inner_step(parameters, episode.support, False)
            parameters = {name: p.detach().requires_grad_() for name, p in stepped.items()}
            if self.each_step:
                metrics |= self._judge(parameters, episode, f"_after_{step}")[1]
        predictions, after = self._judge(parameters, episode)
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, after | metrics, predictions)

    def _inner_step(
        self, parameters: dict[str, Tensor], support: Any, create_graph: bool
    ) -> dict[str, Tensor]:
        with torch.enable_grad():
            predictions = functional_call(self.model, parameters, (support.inputs,))
            loss = self.loss(predictions, support.targets)
            # Side by side, a task's loss depends on its own parameters alone.
            steps = torch.autograd.grad(
                loss.sum(), list(parameters.values()), create_graph=create_graph
            )
        return {
            name: parameter - self.inner_lr * step
            for (name, parameter), step in zip(parameters.items(), steps, strict=True)
        }

    @torch.no_grad()
    def _judge(
        self, parameters: dict[str, Tensor], episode: Any, suffix: str = ""
    ) -> tuple[Tensor, dict[str, Tensor]]:
        predictions = self.predict_queries(
            lambda inputs: functional_call(self.model, parameters, (inputs,)), episode
        )
        return predictions, self.metrics(predictions, episode.query.targets, suffix)

    def protocol(self) -> dict[str, Any]:
        """Inner rate and steps, in training and in evaluation, and the order."""
        name = "FOMAML" if self.first_order else "MAML"
        return {
            "algorithm": name if self.inner_steps else "pretrained on all tasks",
            "inner_lr": self.inner_lr,
            "inner_steps": self.inner_steps,
            "eval_inner_steps": self.eval_inner_steps,
        }
