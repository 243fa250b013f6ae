"""The README's example of an algorithm of one's own: a gradient step of learned length."""

import torch
from torch.func import functional_call

from metadist.algorithms import Learner, TaskResult


class MyAlgorithm(Learner):
    """What happens in one task. Its parameters, model and rate, are what is meta-learned."""

    def __init__(self, model, regression=False, first_rate: float = 0.1):
        super().__init__(model, regression)
        self.rate = torch.nn.Parameter(torch.tensor(first_rate))

    def forward(self, episode):
        parameters = dict(self.model.named_parameters())
        with torch.enable_grad():
            loss = self.loss(self.model(episode.support.inputs), episode.support.targets)
            slopes = torch.autograd.grad(loss, [*parameters.values()], create_graph=self.training)
        adapted = {
            name: parameter - self.rate * slope
            for (name, parameter), slope in zip(parameters.items(), slopes, strict=True)
        }
        predictions = functional_call(self.model, adapted, (episode.query.inputs,))
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets), predictions)
