"""Meta-SGD against closed-form gradients and MAML."""

import pytest
import torch
from problems import (
    LINES,
    POWER,
    QUERY_POWER,
    SLOPE,
    Scale,
    assert_equal_gradients,
    gradients,
    images,
)

from metadist.algorithms import MAML, MetaSGD
from metadist.errors import UserError
from metadist.models import Conv4


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("first_order", [False, True])
def test_closed_form_meta_gradient(steps, first_order):
    # A step multiplies w - s by c = 1 - 2 α m; in first order each step has the derivatives
    # 1 by w and -2 m (w - s) by α, the latter with the w of that step.
    weight, alpha = -1.0, 0.1
    c, error = 1 - 2 * alpha * POWER, -1.0 - SLOPE
    after = c**steps * error
    by_weight = 1.0 if first_order else c**steps
    if first_order:
        by_rate = sum(-2 * POWER * c**step * error for step in range(steps))
    else:
        by_rate = -2 * POWER * steps * c ** (steps - 1) * error

    model = Scale(weight)
    learner = MetaSGD(
        model, True, inner_lr=alpha, inner_steps=steps, first_order=first_order
    ).train()
    result = learner(LINES)
    result.loss.backward()
    outer = 2 * QUERY_POWER * after
    assert result.loss.item() == pytest.approx(QUERY_POWER * after**2, rel=1e-12)
    assert model.weight.grad.item() == pytest.approx(outer * by_weight, rel=1e-12)
    assert learner.rates[0].grad.item() == pytest.approx(outer * by_rate, rel=1e-12)


def test_equal_rates_are_maml_and_rates_are_elementwise():
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=3).double()
    learner, task = MetaSGD(model, inner_lr=0.3, inner_steps=2).train(), images()
    MAML(model, inner_lr=0.3, inner_steps=2).train()(task).loss.backward()
    reference = {name: each.clone() for name, each in gradients(model).items()}
    model.zero_grad()
    learner(task).loss.backward()
    assert_equal_gradients(gradients(model), reference)

    for rate in learner.rates:
        rate.data.uniform_(-0.1, 0.5)
    adapted = learner.adapt(learner.initial(), task.support, 1)
    inner = learner.gradients(learner.initial(), task.support)
    for (name, start), rate in zip(model.named_parameters(), learner.rates, strict=True):
        torch.testing.assert_close(adapted[name], start - rate * inner[name])


def test_rates_are_drawn_from_an_interval():
    torch.manual_seed(0)
    learner = MetaSGD(Conv4((1, 16, 16), 3, filters=8), inner_lr=0.005, inner_lr_max=0.1)
    rates = torch.cat([rate.detach().flatten() for rate in learner.rates])
    assert rates.min() >= 0.005 and rates.max() <= 0.1
    assert rates.mean().item() == pytest.approx(0.0525, abs=0.002)
    assert rates.std().item() == pytest.approx(0.095 / 12**0.5, abs=0.002)
    with pytest.raises(UserError, match=r"inner_lr_max=0\.1 is below algorithm\.inner_lr=0\.5"):
        MetaSGD(Conv4((1, 16, 16), 3), inner_lr=0.5, inner_lr_max=0.1)
