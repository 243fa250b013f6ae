"""An algorithm: one gradient step per task, with a meta-learned learning rate."""

import torch
from torch import nn
from torch.func import functional_call

from metadist.algorithms import Learner, TaskResult
from metadist.tasks import Episode


class MyAlgorithm(Learner):
    """One step of gradient descent; the model's parameters and the rate are meta-learned.

    Args:
        model: the network.
        regression: whether the loss is the squared error instead of the cross-entropy.
        first_rate: the learning rate before training.
    """

    def __init__(self, model: nn.Module, regression: bool = False, first_rate: float = 0.4) -> None:
        super().__init__(model, regression)
        self.rate = nn.Parameter(torch.tensor(first_rate))

    def protocol(self) -> dict[str, int]:
        """Settings that must be equal for two results to be comparable, as MAML has them."""
        return {"inner_steps": 1, "eval_inner_steps": 1}

    def forward(self, episode: Episode) -> TaskResult:
        """Adapt to the support set of one task, evaluate on its query set."""
        support, query = episode.support, episode.query
        parameters = dict(self.model.named_parameters())
        with torch.enable_grad():  # evaluation adapts too
            loss = self.loss(self.model(support.inputs), support.targets)
            gradients = torch.autograd.grad(
                loss, [*parameters.values()], create_graph=self.training
            )
        adapted = {
            name: parameter - self.rate * gradient
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True)
        }
        predictions = functional_call(self.model, adapted, (query.inputs,))
        loss = self.loss(predictions, query.targets)
        return TaskResult(loss, self.metrics(predictions, query.targets), predictions)
