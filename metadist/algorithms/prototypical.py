"""Prototypical networks (Snell, Swersky and Zemel 2017, arXiv 1703.05175)."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from metadist.algorithms.embedding import require_embedding
from metadist.algorithms.learner import Learner, TaskResult
from metadist.errors import UserError


class Prototypical(Learner):
    """Learn features in which a class is the neighbourhood of its mean.

    In a task (equations 1 and 2 and algorithm 1 of the paper), with f the model's features:

        c_k = mean of f(x) over the support examples of class k, its prototype
        p(y = k | x) = softmax over k of -|f(x) - c_k|²
        loss = -log p(y | x), in the mean over the query set

    Nothing is adapted, so tasks of training may have more ways than those of the test
    (`task.train_ways`); the paper takes 60 for Omniglot. As in the authors' code, support and
    query set pass the network in one batch. The authors' batch norm keeps running statistics for
    the evaluation: `model.running_statistics=true`.

    Args:
        model: has `features(inputs)`. Its last layer is not used and stays as it is.
        regression: not for this algorithm.
        transductive: see `Learner`.

    Raises:
        UserError: a regression problem, or a model without features.
    """

    outputs_are_classes = False
    batches_tasks = True

    def __init__(
        self, model: nn.Module, regression: bool = False, transductive: bool = True
    ) -> None:
        super().__init__(model, regression, transductive)
        if regression:
            raise UserError("algorithm=prototypical classifies: choose a dataset with classes.")
        require_embedding(model, "prototypical")
        model.head.requires_grad_(False)

    def forward(self, episode: Any) -> TaskResult:
        """Judge `episode.query` by the prototypes of `episode.support`."""
        labels = F.one_hot(episode.support.targets)  # (…, n, ways)
        targets = episode.query.targets

        def predict(inputs: Tensor) -> Tensor:
            return self._logits(self.model.features(inputs), labels)

        predictions = self.predict_queries(predict, episode, jointly=True)
        loss = self.loss(predictions, targets)
        shown = None if self.training else predictions
        return TaskResult(loss, self.metrics(predictions, targets), shown)

    @staticmethod
    def _logits(features: Tensor, labels: Tensor) -> Tensor:
        """Negative squared distances to the prototypes of the first examples, those with labels."""
        shares = labels.to(features) / labels.sum(-2, keepdim=True)
        prototypes = shares.mT @ features[..., : labels.shape[-2], :]  # (…, ways, features)
        return -(features.unsqueeze(-2) - prototypes.unsqueeze(-3)).square().sum(-1)

    def protocol(self) -> dict[str, Any]:
        """No inner steps."""
        return {"inner_steps": 0, "eval_inner_steps": 0}

    def method(self) -> dict[str, Any]:
        """Its name."""
        return {"algorithm": "prototypical networks"}
