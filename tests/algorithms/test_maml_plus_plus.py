"""MAML++ against closed-form gradients and a reference implementation with plain norms."""

import pytest
import torch
import torch.nn.functional as F
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
from torch import nn
from torch.func import functional_call

from metadist.algorithms import MAMLPlusPlus
from metadist.errors import UserError
from metadist.models import Conv4


class SharedScale(nn.Module):
    """Two batch norms with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
        self.second.weight = self.first.weight
        self.head = nn.Linear(3, 2)

    def forward(self, inputs):
        return self.head(self.second(self.first(inputs.flatten(1)[:, :3]).relu()))


def test_a_weight_that_batch_norms_share_stays_shared():
    learner = MAMLPlusPlus(SharedScale().double(), inner_steps=2).train()
    model = learner.model
    assert model.second.weight is model.first.weight and model.first.weight.shape == (2, 3)
    learner(images(ways=2)).loss.backward()
    found = gradients(learner)
    assert found["model.first.weight"].norm() > 0 and "model.second.weight" not in found


def test_a_model_with_trainable_norms_alone_is_refused():
    model = SharedScale()
    model.head.requires_grad_(False)
    with pytest.raises(UserError, match=r"all trainable parameters but those of batch norms, and"):
        MAMLPlusPlus(model)


RATES = [0.02, 0.05, 0.1]


@pytest.mark.parametrize("iteration", [0, 4, 10, 11])
def test_closed_form_loss_and_gradient(iteration):
    # After step i, w - s is multiplied by c_0 … c_i with c_i = 1 - 2 α_i m.
    error, m = -1.0 - SLOPE, POWER
    early = max(0.0, (1 - iteration / 10) / 3)
    weights = [early, early, 1 - 2 * early]
    second_order = iteration >= 11
    c = [1 - 2 * rate * m for rate in RATES]
    errors = [error * c[0], error * c[0] * c[1], error * c[0] * c[1] * c[2]]
    outer = [2 * QUERY_POWER * v * e for v, e in zip(weights, errors, strict=True)]
    if second_order:
        by_weight = [e / error for e in errors]
        by_rate = [
            [-2 * m * e / c[j] if j <= i else 0 for j in range(3)] for i, e in enumerate(errors)
        ]
    else:
        by_weight = [1.0, 1.0, 1.0]
        before = [error, errors[0], errors[1]]
        by_rate = [[-2 * m * before[j] if j <= i else 0 for j in range(3)] for i in range(3)]

    model = Scale(-1.0)
    learner = MAMLPlusPlus(
        model, True, inner_steps=3, multi_step_iterations=10, first_order_iterations=11
    ).train()
    learner.rates.data[0] = torch.tensor(RATES, dtype=torch.float64)
    learner.iteration.fill_(iteration)
    result = learner(LINES)
    result.loss.backward()
    loss = sum(QUERY_POWER * v * e**2 for v, e in zip(weights, errors, strict=True))
    expected = sum(o * d for o, d in zip(outer, by_weight, strict=True))
    rates = [sum(o * row[j] for o, row in zip(outer, by_rate, strict=True)) for j in range(3)]
    assert result.loss.item() == pytest.approx(loss, rel=1e-12)
    assert result.metrics["mse"].item() == pytest.approx(QUERY_POWER * errors[2] ** 2, rel=1e-12)
    assert model.weight.grad.item() == pytest.approx(expected, rel=1e-12)
    assert learner.rates.grad[0].tolist() == pytest.approx(rates, rel=1e-12)
    assert learner.iteration == iteration + 1


def test_loss_weights_sum_to_one_and_end_at_the_last_step():
    learner = MAMLPlusPlus(Scale(1.0), inner_steps=4, multi_step_iterations=100)
    for iteration in (0, 1, 50, 99, 100, 10**9):
        weights = learner.loss_weights(iteration)
        assert sum(weights) == pytest.approx(1, rel=1e-12) and weights[-1] == max(weights)
    assert learner.loss_weights(0) == [0.25] * 4
    assert learner.loss_weights(100) == [0, 0, 0, 1]
    single = MAMLPlusPlus(Scale(1.0), inner_steps=2, multi_step_iterations=0)
    assert single.loss_weights(0) == [0, 1]


@pytest.mark.parametrize("running", [False, True])
def test_each_step_has_its_own_norms(running):
    torch.manual_seed(0)
    plain = Conv4((1, 16, 16), 3, filters=3, running_statistics=running).double().train()
    state = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    model = Conv4((1, 16, 16), 3, filters=3, running_statistics=running).double()
    model.load_state_dict(state)
    steps, task = 2, images()
    learner = MAMLPlusPlus(
        model, inner_steps=steps, multi_step_iterations=4, first_order_iterations=0
    ).train()
    learner.iteration.fill_(1)
    learner.rates.data.uniform_(0.05, 0.5)
    for norm in model.norms:
        norm.weight.data.uniform_(0.5, 1.5), norm.bias.data.uniform_(-0.5, 0.5)

    # Reference: one plain network whose norm weights and statistics are replaced in each step.
    def of_step(step: int) -> dict[str, torch.Tensor]:
        return {
            f"norms.{index}.{name}": each[step]
            for index, norm in enumerate(model.norms)
            for name, each in norm.named_parameters()
        }

    statistics = [
        {n: b.clone() for n, b in plain.named_buffers() if n.startswith("norms")}
        for _ in range(steps)
    ]
    adapted = {n: p for n, p in model.named_parameters() if not n.startswith("norms")}
    own, expected = dict(adapted), 0.0
    for step, weight in enumerate([0.375, 0.625]):
        tensors = of_step(step) | statistics[step]
        logits = functional_call(plain, own | tensors, (task.support.inputs,))
        loss = F.cross_entropy(logits, task.support.targets)
        found = torch.autograd.grad(loss, list(own.values()), create_graph=True)
        pairs = zip(own.items(), learner.rates[:, step], found, strict=True)
        own = {name: each - rate * grad for (name, each), rate, grad in pairs}
        logits = functional_call(plain, own | tensors, (task.query.inputs,))
        expected = expected + weight * F.cross_entropy(logits, task.query.targets)
    expected.backward()
    reference = {name: each.clone() for name, each in gradients(learner).items()}

    learner.zero_grad()
    result = learner(task)
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=0)
    assert_equal_gradients(gradients(learner), reference)
    for step in range(steps if running else 0):
        for index, norm in enumerate(model.norms):
            for name, buffer in norm.named_buffers():
                torch.testing.assert_close(buffer[step], statistics[step][f"norms.{index}.{name}"])


def test_evaluation_beyond_the_trained_steps_repeats_the_last_rates_and_norms():
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=3).double()
    learner, task = MAMLPlusPlus(model, inner_steps=2, eval_inner_steps=4), images()
    learner.rates.data.uniform_(0.05, 0.5)
    for norm in model.norms:
        norm.weight.data.uniform_(0.5, 1.5)
    longer = MAMLPlusPlus(
        Conv4((1, 16, 16), 3, filters=3).double(), inner_steps=4, eval_inner_steps=4
    )
    state = learner.state_dict()
    for name in longer.state_dict():
        if name.startswith("model.norms"):
            state[name] = state[name][[0, 1, 1, 1]]
    state["rates"] = learner.rates[:, [0, 1, 1, 1]].detach()
    longer.load_state_dict(state)
    found, expected = learner.eval()(task), longer.eval()(task)
    assert torch.equal(found.predictions, expected.predictions)
    assert found.metrics == expected.metrics
    assert learner.iteration == 0


def test_the_metrics_before_adaptation_do_not_depend_on_earlier_tasks():
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=3).double()
    learner, task = MAMLPlusPlus(model, regression=False, inner_steps=3).eval(), images(queries=40)
    for norm in model.norms:
        norm.weight.data.uniform_(-2.0, 2.0)  # of each step, other ones
    first, second = learner(task).metrics, learner(task).metrics
    assert first == second and 0 < first["accuracy_before"] < 1
