"""What an algorithm is: a module whose forward is what happens in one task."""

from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn


class TaskResult(NamedTuple):
    """What one task gives back.

    Attributes:
        loss: scalar; its derivative by the learner's parameters is the meta-gradient. Detached
            in evaluation.
        metrics: scalars to report, detached: "accuracy" (0 to 1) for classes, "mse" for real
            targets, and those after a different number of steps under names of their own.
        predictions: in evaluation, the logits or values for each query, shape (n, outputs).
        buffers: how much the learner's buffers (running statistics) changed, by name. The one
            who runs tasks fills it in; learners leave it empty.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    predictions: Tensor | None = None
    buffers: dict[str, Tensor] = {}  # noqa: RUF012


class Learner(nn.Module):
    """Base of the algorithms. The parameters of a learner are what is meta-learned.

    A subclass writes `forward(episode) -> TaskResult`. It knows of no rank and of no other task;
    whatever the strategy, the meta-gradient is the mean over tasks of the derivative of `loss`.
    In evaluation mode (`learner.eval()`) nothing is differentiated afterwards.

    Args:
        model: the network, built for this problem.
        regression: targets are real numbers (squared error) rather than classes
            (cross-entropy).
    """

    def __init__(self, model: nn.Module, regression: bool = False) -> None:
        super().__init__()
        self.model = model
        self.regression = regression

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of predictions of shape (n, outputs)."""
        if self.regression:
            return F.mse_loss(predictions, targets)
        return F.cross_entropy(predictions, targets)

    def metrics(self, predictions: Tensor, targets: Tensor, suffix: str = "") -> dict[str, Tensor]:
        """Detached figures to report of predictions of shape (n, outputs)."""
        predictions = predictions.detach()
        if self.regression:
            return {f"mse{suffix}": F.mse_loss(predictions, targets)}
        right = predictions.argmax(1) == targets
        return {f"accuracy{suffix}": right.to(predictions.dtype).mean()}

    def protocol(self) -> dict[str, Any]:
        """What must be equal for two results to be comparable, of the algorithm's part."""
        return {}

    def forward(self, episode: Any) -> TaskResult:
        """Adapt to the support set, judge on the query set.

        Args:
            episode: has `support` and `query`, each with `inputs` and `targets`.
        """
        raise NotImplementedError
