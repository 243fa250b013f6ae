"""Reptile against torch's optimizers on a copy of the model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from problems import LINES, POWER, QUERY_POWER, SLOPE, Scale, gradients, images
from torch import nn

from metadist.algorithms import Reptile
from metadist.models import MLP, Conv4


def trained(
    model: nn.Module, optimizer: torch.optim.Optimizer, task, steps: int, reduction: str
) -> nn.Module:
    """Train the model on the whole support set."""
    for _ in range(steps):
        optimizer.zero_grad()
        predictions = model(task.support.inputs)
        F.cross_entropy(predictions, task.support.targets, reduction=reduction).backward()
        optimizer.step()
    return model


def test_the_query_set_does_not_change_running_statistics():
    found = []
    for scale in (1, 5):
        torch.manual_seed(0)
        task = images(ways=2)
        model = Conv4((1, 16, 16), 2, filters=16, running_statistics=True).double()
        query = task.query._replace(inputs=scale * task.query.inputs)
        Reptile(model, inner_steps=2).train()(task._replace(query=query))
        found.append(dict(model.named_buffers()))
    assert found[0] and all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.parametrize("steps", [1, 4])
def test_closed_form_gradient(steps):
    # A step of gradient descent multiplies w - s by c = 1 - 2 α m.
    weight, alpha = -1.0, 0.05
    shrink = (1 - 2 * alpha * POWER) ** steps
    model = Scale(weight)
    learner = Reptile(model, True, "sgd", alpha, steps, inner_batch_size=None).train()
    result = learner(LINES)
    result.loss.backward()
    error = weight - SLOPE
    assert result.loss.item() == pytest.approx(QUERY_POWER * (shrink * error) ** 2, rel=1e-12)
    assert model.weight.grad.item() == pytest.approx(error * (1 - shrink), rel=1e-12)


@pytest.mark.parametrize("inner_optimizer", ["sgd", "adam"])
def test_an_outer_step_interpolates_to_the_result_of_torchs_optimizer(inner_optimizer):
    torch.manual_seed(0)
    # Without batch norm, before which bias gradients are rounding errors that Adam amplifies.
    model = MLP((1, 16, 16), 3, hidden=[8], batch_norm=False).double()
    learner = Reptile(model, False, inner_optimizer, 0.01, 5, inner_batch_size=None).train()
    outer = torch.optim.SGD(learner.parameters(), lr=0.3)
    inner = None
    for seed in range(2):  # Adam's second moments persist in the second task
        task, start = images(seed=seed), copy.deepcopy(model)
        other = copy.deepcopy(model)
        if inner_optimizer == "sgd":
            optimizer = torch.optim.SGD(other.parameters(), lr=0.01)
        else:
            optimizer = torch.optim.Adam(other.parameters(), lr=0.01, betas=(0.0, 0.999))
            if inner is not None:
                optimizer.load_state_dict(inner)
        trained(other, optimizer, task, 5, "sum" if inner_optimizer == "adam" else "mean")
        inner = optimizer.state_dict()

        outer.zero_grad()
        result = learner(task)
        result.loss.backward()
        outer.step()
        query = F.cross_entropy(other(task.query.inputs), task.query.targets)
        torch.testing.assert_close(result.loss.detach(), query.detach(), rtol=1e-10, atol=0)
        for (name, moved), before, after in zip(
            model.named_parameters(), start.parameters(), other.parameters(), strict=True
        ):
            torch.testing.assert_close(
                moved, before + 0.3 * (after - before), rtol=1e-9, atol=1e-12, msg=name
            )


def test_a_test_with_fewer_examples_goes_on_with_the_moments_of_training():
    torch.manual_seed(0)
    model = MLP((1, 16, 16), 3, hidden=[8], batch_norm=False).double()
    learner = Reptile(model, False, "adam", 0.01, 5, None, 4, transductive=True).train()
    other = copy.deepcopy(model)
    optimizer = torch.optim.Adam(other.parameters(), lr=0.01, betas=(0.0, 0.999))
    trained(other, optimizer, images(3, 4, 1), 5, "sum")
    learner(images(3, 4, 1))
    fewer = images(3, 1, 2, seed=1)
    other.load_state_dict(model.state_dict())
    trained(other, optimizer, fewer, 4, "sum")
    found = learner.eval()(fewer).predictions
    torch.testing.assert_close(found, other(fewer.query.inputs).detach(), rtol=1e-9, atol=1e-12)


def test_minibatches_follow_permutations_of_the_support_set():
    torch.manual_seed(0)
    learner = Reptile(Scale(1.0), inner_optimizer="sgd", inner_steps=7, inner_batch_size=4).train()
    support = images(3, 2, 1).support  # 6 examples
    support = support._replace(targets=torch.arange(6))
    batches = [batch.targets.tolist() for batch in learner.minibatches(support, 7)]
    assert [len(batch) for batch in batches] == [4] * 7
    order = [index for batch in batches for index in batch]
    for start in range(0, 24, 6):
        assert sorted(order[start : start + 6]) == list(range(6))
    assert len({tuple(order[start : start + 6]) for start in range(0, 24, 6)}) > 1
    whole = next(learner.eval().minibatches(support, 1))
    assert sorted(whole.targets.tolist()) == list(range(6))


def test_evaluation_starts_from_the_second_moments_and_does_not_change_them():
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=4).double()
    learner, task = (
        Reptile(model, inner_lr=0.01, inner_batch_size=None, eval_inner_steps=3),
        images(),
    )
    learner.train()(task)
    saved = {name: buffer.clone() for name, buffer in learner.named_buffers()}
    assert saved["step"] == 5 and saved["exp_avg_sq"].max() > 0
    first = learner.eval()(task)
    for name, buffer in learner.named_buffers():
        assert torch.equal(buffer, saved[name])
    learner.exp_avg_sq.zero_(), learner.step.zero_()
    assert not torch.allclose(learner(task).predictions, first.predictions)
    assert all(gradient is None for gradient in gradients(model).values())
