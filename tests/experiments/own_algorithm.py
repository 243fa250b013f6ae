"""The README's example of a user-defined algorithm: a gradient step with a meta-learned rate."""

import torch
from torch.func import functional_call

from metadist.algorithms import Learner, TaskResult


class MyAlgorithm(Learner):
    """One gradient step; the model's parameters and the rate are meta-learned."""

    def __init__(self, model, regression=False, first_rate: float = 0.1):
        super().__init__(model, regression)
        self.rate = torch.nn.Parameter(torch.tensor(first_rate))

    def forward(self, episode):
        parameters = dict(self.model.named_parameters())
        with torch.enable_grad():
            loss = self.loss(self.model(episode.support.inputs), episode.support.targets)
            grads = torch.autograd.grad(loss, [*parameters.values()], create_graph=self.training)
        adapted = {
            name: parameter - self.rate * grad
            for (name, parameter), grad in zip(parameters.items(), grads, strict=True)
        }
        predictions = functional_call(self.model, adapted, (episode.query.inputs,))
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets), predictions)
