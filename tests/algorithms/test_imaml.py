"""Implicit MAML against closed-form gradients and a dense linear solver."""

import copy

import pytest
import torch
import torch.nn.functional as F
from problems import LINES, POWER, QUERY_POWER, SLOPE, Scale, images
from torch import nn
from torch.func import functional_call

from metadist.algorithms import IMAML
from metadist.algorithms.imaml import conjugate_gradient


def test_closed_form_gradient():
    # The inner minimum of m (φ - s)² + λ/2 (φ - w)² is (2 m s + λ w) / (2 m + λ).
    weight, lam = -1.0, 2.0
    minimum = (2 * POWER * SLOPE + lam * weight) / (2 * POWER + lam)
    outer = 2 * QUERY_POWER * (minimum - SLOPE)
    model = Scale(weight)
    learner = IMAML(model, True, inner_lr=0.1, inner_steps=200, proximal_weight=lam).train()
    result = learner(LINES)
    result.loss.backward()
    expected = outer * lam / (2 * POWER + lam)  # dφ/dw, as (1 + H/λ)⁻¹ with H = 2 m
    assert result.loss.item() == pytest.approx(QUERY_POWER * (minimum - SLOPE) ** 2, rel=1e-12)
    assert model.weight.grad.item() == pytest.approx(expected, rel=1e-12)
    assert learner.eval()(LINES).loss.item() == pytest.approx(result.loss.item(), rel=1e-12)


@pytest.mark.parametrize("damping", [0.0, 0.5])
def test_gradient_of_a_network_against_a_dense_solver(damping):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(256, 2), nn.Tanh(), nn.Linear(2, 3)).double()
    with torch.no_grad():
        model[1].weight[:, 6:] = 0  # their inputs are zero below, so their gradients are zero
    task = images()
    for part in task:
        part.inputs.flatten(1)[:, 6:] = 0
    alpha, lam, steps = 0.1, 3.0, 4
    names = [name for name, _ in model.named_parameters()]

    # Reference inner steps: torch's SGD on the regularized loss.
    other = copy.deepcopy(model)
    optimizer = torch.optim.SGD(other.parameters(), lr=alpha)
    for _ in range(steps):
        optimizer.zero_grad()
        pairs = zip(other.parameters(), model.parameters(), strict=True)
        proximity = sum((a - b.detach()).square().sum() for a, b in pairs)
        loss = F.cross_entropy(other(task.support.inputs), task.support.targets)
        (loss + lam / 2 * proximity).backward()
        optimizer.step()

    end = torch.nn.utils.parameters_to_vector(other.parameters()).detach()
    sizes = [parameter.numel() for parameter in model.parameters()]

    def loss_of(vector: torch.Tensor, part) -> torch.Tensor:
        pieces = zip(names, vector.split(sizes), model.parameters(), strict=True)
        parameters = {name: piece.view_as(like) for name, piece, like in pieces}
        return F.cross_entropy(functional_call(other, parameters, (part.inputs,)), part.targets)

    hessian = torch.autograd.functional.hessian(lambda v: loss_of(v, task.support), end)
    start = end.clone().requires_grad_()
    (outer,) = torch.autograd.grad(loss_of(start, task.query), start)
    system = (1 + damping) * torch.eye(len(end), dtype=end.dtype) + hessian / lam
    assert torch.linalg.eigvalsh(system).min() > 0
    expected = torch.linalg.solve(system, outer)

    learner = IMAML(
        model, False, alpha, steps, proximal_weight=lam, cg_steps=60, cg_damping=damping
    ).train()
    result = learner(task)
    result.loss.backward()
    found = torch.nn.utils.parameters_to_vector([p.grad for p in model.parameters()])
    torch.testing.assert_close(result.loss.detach(), loss_of(end, task.query), rtol=1e-12, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-10)


def test_conjugate_gradient_converges_in_one_step_per_distinct_eigenvalue():
    torch.manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(12, 12, dtype=torch.float64))
    values = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64).repeat(4)
    matrix, right = basis @ torch.diag(values) @ basis.T, torch.randn(12, dtype=torch.float64)
    exact = torch.linalg.solve(matrix, right)
    torch.testing.assert_close(conjugate_gradient(lambda v: matrix @ v, right, 3), exact)
    short = conjugate_gradient(lambda v: matrix @ v, right, 1)
    assert 0.01 < (short - exact).norm() / exact.norm() < 1


def test_conjugate_gradient_stops_at_negative_curvature():
    right = torch.tensor([1.0, 0.0], dtype=torch.float64)
    assert torch.equal(conjugate_gradient(lambda v: -v, right, 5), right)


def test_conjugate_gradient_of_a_system_that_is_not_finite_is_nan():
    right = torch.ones(2, 3, dtype=torch.float64)
    scale = torch.tensor([[2.0], [torch.nan]], dtype=torch.float64)
    good, bad = conjugate_gradient(lambda v: scale * v, right, 5)
    assert torch.equal(good, right[0] / 2) and bad.isnan().all()


def test_conjugate_gradient_solves_each_system_of_a_batch_as_if_alone():
    # They converge in one and in three steps; the last one ends in its second, which finds negative
    # curvature.
    values = torch.tensor([[1, 1, 1], [1, 2, 5], [3, 1, -1]], dtype=torch.float64)
    right = torch.tensor([[1, 2, 3], [4, -5, 6], [1, 2, 1]], dtype=torch.float64)
    solved = conjugate_gradient(lambda v: values * v, right, 10)
    alone = [
        conjugate_gradient(lambda v, diagonal=diagonal: diagonal * v, b, 10)
        for diagonal, b in zip(values, right, strict=True)
    ]
    torch.testing.assert_close(solved, torch.stack(alone))
    torch.testing.assert_close(solved[:2], right[:2] / values[:2])


def test_the_proximal_term_in_a_last_step_as_in_the_authors_code():
    # A step on m (w - s)² multiplies w - s by 1 - 2 α m.
    weight, lam, alpha, steps, damping, offset = -1.0, 2.0, 0.1, 3, 1.0, 10.0
    descended = SLOPE + (1 - 2 * alpha * POWER) ** steps * (weight - SLOPE)
    end = descended - alpha * lam * (descended - weight)
    model = Scale(weight)
    learner = IMAML(
        model,
        True,
        inner_lr=alpha,
        inner_steps=steps,
        proximal_weight=lam,
        cg_damping=damping,
        proximal_step="last",
        cg_proximal_offset=offset,
    ).train()
    result = learner(LINES)
    result.loss.backward()
    expected = 2 * QUERY_POWER * (end - SLOPE) / (1 + damping + 2 * POWER / (lam + offset))
    assert result.loss.item() == pytest.approx(QUERY_POWER * (end - SLOPE) ** 2, rel=1e-12)
    assert model.weight.grad.item() == pytest.approx(expected, rel=1e-12)
    # The test has no proximal term.
    evaluated = learner.eval()(LINES).loss.item()
    assert evaluated == pytest.approx(QUERY_POWER * (descended - SLOPE) ** 2, rel=1e-12)
