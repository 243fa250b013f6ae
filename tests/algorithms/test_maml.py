"""MAML against closed-form gradients."""

import pytest
import torch
from problems import LINES, POWER, QUERY_POWER, SLOPE, Scale, images, line

from metadist.algorithms import MAML
from metadist.errors import UserError
from metadist.models import Conv4
from metadist.tasks import Episode


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("first_order", [False, True])
def test_closed_form_meta_gradient(steps, first_order):
    # L(w) = mean(x²) (w - s)², so a step multiplies w - s by c = 1 - 2 α mean(x²).
    alpha, weight = 0.1, -1.0
    shrink = (1 - 2 * alpha * POWER) ** steps
    after = shrink * (weight - SLOPE)
    expected = 2 * QUERY_POWER * after * (1.0 if first_order else shrink)

    model = Scale(weight)
    learner = MAML(
        model, regression=True, inner_lr=alpha, inner_steps=steps, first_order=first_order
    ).train()
    result = learner(LINES)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(QUERY_POWER * after**2, rel=1e-12)
    assert model.weight.grad.item() == pytest.approx(expected, rel=1e-12)


def test_evaluation_takes_its_own_number_of_steps():
    support, query = line(3.0, [1.0, 2.0]), line(3.0, [1.0])
    learner = MAML(Scale(-1.0), True, inner_lr=0.1, inner_steps=1, eval_inner_steps=4).eval()
    with torch.no_grad():
        result = learner(Episode(support, query))
    assert result.metrics["mse"].item() == pytest.approx((0.5**4 * -4) ** 2, rel=1e-12)
    assert result.metrics["mse_before"].item() == pytest.approx(16.0, rel=1e-12)
    assert not result.loss.requires_grad and result.predictions.shape == (1, 1)
    assert next(learner.parameters()).grad is None


def test_no_inner_steps_evaluate_the_initial_parameters():
    task = Episode(line(3.0, [1.0, 2.0]), line(3.0, [1.0]))
    metrics = MAML(Scale(-1.0), True, inner_steps=0).eval()(task).metrics
    assert metrics["mse"] == metrics["mse_before"] > 0


def test_training_does_not_change_the_parameters():
    model = Conv4((1, 16, 16), 3, filters=3).double()
    before = [parameter.clone() for parameter in model.parameters()]
    MAML(model).train()(images()).loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_pretraining_adapts_in_evaluation_only():
    support, query = line(3.0, [1.0, 2.0]), line(3.0, [1.0])
    model = Scale(-1.0)
    learner = MAML(model, True, inner_lr=0.1, inner_steps=0, eval_inner_steps=2).train()
    result = learner(Episode(support, query))
    result.loss.backward()
    assert result.loss.item() == pytest.approx(16.0) and model.weight.grad.item() == -8.0
    evaluated = learner.eval()(Episode(support, query))
    assert evaluated.metrics["mse"].item() == pytest.approx((0.5**2 * -4) ** 2, rel=1e-12)


class Forgetful(MAML):
    def step(self, parameters, gradients):
        return {"head.bias": super().step(parameters, gradients)["head.bias"]}


class WithoutReturn(MAML):
    def step(self, parameters, gradients):
        super().step(parameters, gradients)


def test_a_step_without_a_return_is_refused():
    learner = WithoutReturn(Conv4((1, 16, 16), 3, filters=4).double()).train()
    with pytest.raises(UserError, match=r"WithoutReturn\.step returned None: return all"):
        learner(images())


def test_a_step_that_leaves_parameters_out_is_refused():
    learner = Forgetful(Conv4((1, 16, 16), 3, filters=4).double()).train()
    with pytest.raises(UserError, match=r"Forgetful\.step returned other parameters"):
        learner(images())
