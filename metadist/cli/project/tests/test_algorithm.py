"""The algorithm: its adaptation, and its gradient."""

import torch
from my_project.algorithm import MyAlgorithm
from torch import nn

from metadist.tasks import Episode, Examples


def episode() -> Episode:
    generator = torch.Generator().manual_seed(0)
    inputs, targets = torch.randn(6, 3, generator=generator), torch.tensor([0, 1] * 3)
    return Episode(Examples(inputs, targets), Examples(inputs + 0.1, targets))


def test_a_rate_of_zero_does_not_adapt():
    model, task = nn.Linear(3, 2), episode()
    result = MyAlgorithm(model, first_rate=0.0).eval()(task)
    torch.testing.assert_close(result.predictions, model(task.query.inputs))


def test_adaptation_lowers_the_loss():
    model, task = nn.Linear(3, 2), episode()
    before, after = (MyAlgorithm(model, first_rate=rate)(task).loss for rate in (0.0, 0.5))
    assert after < before


def test_model_and_rate_get_a_gradient():
    learner = MyAlgorithm(nn.Linear(3, 2))
    learner(episode()).loss.backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in learner.parameters())
