"""What an algorithm is: a module whose forward is what happens in one task."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metadist.algorithms.batch_norm import one_by_one, uses_batch_statistics


class TaskResult(NamedTuple):
    """What one task gives back.

    Attributes:
        loss: scalar; its derivative by the learner's parameters is the meta-gradient. Detached
            in evaluation.
        metrics: scalars to report, detached: "accuracy" (0 to 1) for classes, "mse" for real
            targets; those before any inner step as `…_before`, and with `Learner.evaluate_each_step` those
            after k of the inner steps as `…_after_k`.
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
        transductive: in evaluation, batch norm that keeps no statistics of training normalises
            all queries of a task by their common ones; if not, each query together with the
            support set alone.

    Attributes:
        evaluate_each_step: in evaluation, a learner that takes inner steps also judges the queries after
            each of them. Whoever runs the evaluation sets it; off by default, for it takes time.
        outputs_are_classes: each of the model's outputs stands for a class of the task, so that one
            that is no class in training is not trained. A subclass for which they are features
            says that it is not so.
        batches_tasks: a subclass whose `forward` can run several tasks at once says so.
    """

    evaluate_each_step = False
    outputs_are_classes = True
    batches_tasks = False

    def __init__(
        self, model: nn.Module, regression: bool = False, transductive: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self.regression = regression
        self.transductive = transductive

    @property
    def supports_batched_tasks(self) -> bool:
        """Whether `forward` also runs several tasks at once, as it is set now, with this model.

        Every tensor of the episode, of the result and of the learner's parameters then has a
        first dimension that counts tasks, and `loss` has one number a task.
        """
        can = self.batches_tasks and getattr(self.model, "supports_batched_tasks", False)
        return can and (self.training or self.transductive)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of predictions of shape (…, n, outputs), of shape (…)."""
        if self.regression:
            return (predictions - targets).square().mean((-2, -1))
        each = F.cross_entropy(predictions.flatten(0, -2), targets.flatten(), reduction="none")
        return each.view(targets.shape).mean(-1)

    def metrics(self, predictions: Tensor, targets: Tensor, suffix: str = "") -> dict[str, Tensor]:
        """Detached figures to report of predictions of shape (…, n, outputs), each of shape (…)."""
        predictions = predictions.detach()
        if self.regression:
            return {f"mse{suffix}": self.loss(predictions, targets)}
        right = predictions.argmax(-1) == targets
        return {f"accuracy{suffix}": right.to(predictions.dtype).mean(-1)}

    def predict_queries(
        self, predict: Callable[[Tensor], Tensor], episode: Any, jointly: bool = False
    ) -> Tensor:
        """The queries' predictions, shape (…, n, outputs): transductive, as training is, or not.

        Args:
            predict: the adapted model, (…, n, *input shape) -> (…, n, outputs).
            episode: the task.
            jointly: `predict` expects the support set before the queries in one batch.
        """
        support, queries = episode.support.inputs, episode.query.inputs
        if not (self.training or self.transductive) and uses_batch_statistics(self.model):
            return one_by_one(predict, support, queries)
        if not jointly:
            return predict(queries)
        axis = episode.query.targets.dim() - (2 if self.regression else 1)
        predictions = predict(torch.cat([support, queries], axis))
        return predictions.narrow(axis, support.shape[axis], queries.shape[axis])

    def protocol(self) -> dict[str, Any]:
        """What must be equal for two results to be comparable, of the algorithm's part."""
        return {}

    def method(self) -> dict[str, Any]:
        """What is told of the algorithm itself, in which results that are compared may differ."""
        return {"algorithm": type(self).__name__}

    def forward(self, episode: Any) -> TaskResult:
        """Adapt to the support set, judge on the query set.

        Args:
            episode: has `support` and `query`, each with `inputs` and `targets`.
        """
        raise NotImplementedError
