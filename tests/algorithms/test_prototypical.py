"""Prototypical networks against equations 1 and 2, computed per class."""

import math

import pytest
import torch
from problems import Scale, assert_equal_gradients, gradients, images

from metadist.algorithms import Prototypical
from metadist.errors import UserError
from metadist.models import MLP, Conv4
from metadist.tasks import Episode, Examples


def points(values: list[float], labels: list[int]) -> Examples:
    return Examples(torch.tensor(values, dtype=torch.float64).unsqueeze(1), torch.tensor(labels))


def test_closed_form_distances():
    # Without hidden layers the features are the inputs: prototypes 1 (of 0 and 2) and 4.
    learner = Prototypical(MLP((1,), 2, hidden=[]).double()).eval()
    task = Episode(points([0.0, 4.0, 2.0, 4.0], [0, 1, 0, 1]), points([2.0, 3.0], [0, 0]))
    result = learner(task)
    expected = torch.tensor([[-1.0, -4.0], [-4.0, -1.0]], dtype=torch.float64)
    torch.testing.assert_close(result.predictions, expected)
    losses = [math.log(1 + math.exp(-3)), math.log(1 + math.exp(3))]
    assert result.loss.item() == pytest.approx(sum(losses) / 2, rel=1e-12)
    assert result.metrics["accuracy"] == 0.5


@pytest.mark.parametrize("pooling", ["stride", "max"])
def test_loss_and_gradient_against_a_reference(pooling):
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 5, filters=4, pooling=pooling).double()
    task = images(ways=3, shots=2, queries=2)
    features = model.features(torch.cat([task.support.inputs, task.query.inputs]))
    support, query = features[:6], features[6:]
    prototypes = [support[task.support.targets == k].mean(0) for k in range(3)]
    losses = []
    for feature, label in zip(query, task.query.targets, strict=True):
        closeness = [-((feature - prototype) ** 2).sum() for prototype in prototypes]
        losses.append(-(closeness[label] - torch.logsumexp(torch.stack(closeness), 0)))
    expected = torch.stack(losses).mean()
    expected.backward()
    reference = {n: g.clone() for n, g in gradients(model).items() if not n.startswith("head")}

    model.zero_grad()
    learner = Prototypical(model).train()
    result = learner(task)
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=0)
    found = {n: g for n, g in gradients(model).items() if not n.startswith("head")}
    assert_equal_gradients(found, reference)
    assert model.head.weight.grad is None and not model.head.weight.requires_grad


def test_distances_of_bfloat16_features_are_those_of_float32():
    torch.manual_seed(0)
    parts = [Examples(torch.randn(6, 64).bfloat16(), torch.arange(6) % 3) for _ in range(2)]
    learner = Prototypical(MLP((64,), 3, hidden=[])).eval()  # the features are the inputs
    with torch.autocast("cpu", torch.bfloat16):
        found = learner(Episode(*parts)).predictions
    parts = [part._replace(inputs=part.inputs.float()) for part in parts]
    assert torch.equal(found, learner(Episode(*parts)).predictions)


def test_unsupported_problems_and_models_raise():
    with pytest.raises(UserError, match="choose a dataset with classes"):
        Prototypical(MLP((1,), 1), regression=True)
    with pytest.raises(UserError, match="needs a model with features"):
        Prototypical(Scale(1.0))
