"""Prototypical networks (Snell, Swersky and Zemel 2017, arXiv 1703.05175)."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metadist.algorithms.learner import Learner, TaskResult, require_features, tied_parameters
from metadist.errors import UserError
from metadist.tasks import Episode


class Prototypical(Learner):
    """Classify by the distance of features to the mean features of the classes.

    In a task (equations 1 and 2 and algorithm 1 of the paper), with f the model's features:

        c_k = mean of f(x) over the support examples of class k, its prototype
        p(y = k | x) = softmax over k of -|f(x) - c_k|²
        loss = mean over the query set of -log p(y | x)

    Training tasks may have more ways than test tasks (`task.train_ways`); the paper uses 60 for
    Omniglot. As in the authors' code, support and query set are one batch of the network. The
    authors evaluate with running statistics: `model.running_statistics=true`.

    Differences from the authors' code (github.com/jakesnell/prototypical-networks):

    - The published networks were trained again on the classes of training and validation together,
      for 20,000 episodes more than the best validation had needed.
    - Rotations of a character are separate classes there and may be in the same task: 1.3 such
      pairs in a training task of 60 ways. Here a task's classes come from different characters.
    - Initial weights there are PyTorch 0.4's: U(±1/√fan_in), and U(0, 1) for the scales of batch
      norm. Here they are Xavier uniform, and the scales are 1.

    Args:
        model: a network with `features(inputs)` and a linear `head`, which is not used.
        regression: must be False.
        transductive: see `Learner`.

    Raises:
        UserError: a regression problem, or a model without features and head.
    """

    outputs_are_classes = False
    batches_tasks = True
    model: Any  # with `features` and `head`, see `require_features`

    def __init__(
        self, model: nn.Module, regression: bool = False, transductive: bool = True
    ) -> None:
        super().__init__(model, regression, transductive)
        if regression:
            raise UserError("algorithm=prototypical classifies: choose a dataset with classes.")
        require_features(model, "prototypical")
        tied = {id(parameter) for parameter in tied_parameters(model, self.model.head)}
        for parameter in self.model.head.parameters():
            if id(parameter) not in tied:  # the features use tied parameters
                parameter.requires_grad_(False)

    def forward(self, episode: Episode) -> TaskResult:
        """Classify `episode.query` by the prototypes of `episode.support`."""
        labels = F.one_hot(episode.support.targets)  # (…, n, ways)
        targets = episode.query.targets

        def predict(inputs: Tensor) -> Tensor:
            return self._logits(self.model.features(inputs), labels)

        predictions = self.predict_queries(predict, episode, jointly=True)
        loss = self.loss(predictions, targets)
        metrics = self.metrics(predictions, targets)
        return TaskResult(loss, metrics, None if self.training else predictions)

    @staticmethod
    def _logits(features: Tensor, labels: Tensor) -> Tensor:
        """Negative squared distances to the prototypes; `features` start with the support set."""
        # Differences of bfloat16 numbers are inexact.
        features = features.to(torch.promote_types(features.dtype, torch.float32))
        weights = labels.to(features) / labels.sum(-2, keepdim=True)
        with torch.autocast(features.device.type, enabled=False):
            prototypes = weights.mT @ features[..., : labels.shape[-2], :]  # (…, ways, features)
        return -(features.unsqueeze(-2) - prototypes.unsqueeze(-3)).square().sum(-1)

    def protocol(self) -> dict[str, Any]:
        """No inner steps."""
        return {"inner_steps": 0, "eval_inner_steps": 0}

    @property
    def algorithm_name(self) -> str:
        """See `Learner`."""
        return "prototypical networks"
