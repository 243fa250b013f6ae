"""ANIL against closed-form gradients."""

import pytest
import torch
from problems import (
    LINES,
    POWER,
    QUERY_POWER,
    SLOPE,
    Scale,
    TwoScales,
    images,
)
from torch import nn

from metadist.algorithms import ANIL
from metadist.errors import UserError
from metadist.models import Conv4


@pytest.mark.parametrize("first_order", [False, True])
def test_closed_form_meta_gradient(first_order):
    # L(w) = m (w a - s)², one step: w' = w - 2 α m a (w a - s).
    a, w, alpha, s, m, n = 0.7, -1.0, 0.1, SLOPE, POWER, QUERY_POWER
    after = w - 2 * alpha * m * a * (w * a - s)
    error = after * a - s
    by_head = 1.0 if first_order else 1 - 2 * alpha * m * a**2
    by_body = 0.0 if first_order else -2 * alpha * m * (2 * w * a - s)

    model = TwoScales(a, w)
    learner = ANIL(model, True, inner_lr=alpha, inner_steps=1, first_order=first_order).train()
    result = learner(LINES)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(n * error**2, rel=1e-12)
    assert model.head.weight.grad.item() == pytest.approx(2 * n * error * a * by_head, rel=1e-12)
    expected = 2 * n * error * (after + a * by_body)
    assert model.body.grad.item() == pytest.approx(expected, rel=1e-12)


def test_a_model_without_head_raises():
    with pytest.raises(UserError, match="algorithm=anil needs a model with features"):
        ANIL(Scale(1.0))


def test_features_pass_the_dropout_of_the_model():
    learner = ANIL(Conv4((1, 16, 16), 3, filters=4, dropout=0.5).double(), inner_steps=1)
    learner.model.dropout.p = 1.0  # then the head gets zeros
    features = learner.train().features(images().query.inputs)
    assert not features.any()
    assert learner.eval().features(images().query.inputs).any()


class WithItsOwnDropout(nn.Module):
    """A model whose `features` have their dropout already, under the name of metadist's."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = 0.5
        self.head = nn.Linear(1, 2)

    def features(self, inputs: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(inputs.flatten(1), self.dropout, self.training)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.features(inputs))


def test_features_are_those_of_the_model():
    learner, inputs = ANIL(WithItsOwnDropout()).train(), torch.ones(100, 1)
    torch.manual_seed(0)
    expected = learner.model.features(inputs)
    torch.manual_seed(0)
    assert torch.equal(learner.features(inputs), expected) and expected.max() == 2
