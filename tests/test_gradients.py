"""Values with known gradients, against the derivatives of the same function."""

import pytest
import torch

from metadist.gradients import with_gradients


@pytest.fixture
def inputs():
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in ((3, 2), (3, 4))
    ]


def test_a_scalar_is_differentiable_like_its_function(inputs):
    def function(a, b):
        return a.sin().sum() * b.square().mean()

    value = function(*inputs)
    known = with_gradients(value, inputs, torch.autograd.grad(value, inputs))
    assert known.item() == value.item()
    expected = torch.autograd.grad((function(*inputs) * 3).exp(), inputs)
    torch.testing.assert_close(torch.autograd.grad((known * 3).exp(), inputs), expected)


def test_the_values_of_several_tasks(inputs):
    def function(a, b):
        return a.sin().sum(1) * b.square().sum(1)

    values = function(*inputs)
    known = with_gradients(values, inputs, torch.autograd.grad(values.sum(), inputs))
    weights = torch.tensor([1.0, -2.0, 0.5])
    expected = torch.autograd.grad(function(*inputs) @ weights.double(), inputs)
    torch.testing.assert_close(torch.autograd.grad(known @ weights.double(), inputs), expected)


def test_a_scalar_input():
    number = torch.tensor(3.0, requires_grad=True)
    known = with_gradients(torch.tensor(2.5), [number], [torch.tensor(0.5)])
    assert torch.autograd.grad(known * 4, number)[0].item() == 2.0


def test_inputs_without_a_gradient_and_infinite_ones(inputs):
    gradient = torch.full((3, 2), torch.inf, dtype=torch.float64)
    known = with_gradients(torch.tensor(2.5), inputs, [gradient, None])
    assert known.item() == 2.5, "an infinite gradient does not make the value NaN"
    first, second = torch.autograd.grad(known, inputs, allow_unused=True)
    assert torch.equal(first, gradient) and second is None


def test_a_second_backward_pass_needs_the_graph_retained(inputs):
    known = with_gradients(torch.tensor(2.5), inputs, [torch.ones_like(each) for each in inputs])
    known.backward(retain_graph=True)
    known.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        known.backward()
    assert all(each.grad.eq(2).all() for each in inputs)


def test_second_derivatives_are_refused(inputs):
    known = with_gradients(torch.tensor(2.5), inputs, [torch.ones_like(each) for each in inputs])
    for value in (known, known.square()):
        first = torch.autograd.grad(value, inputs, create_graph=True)
        with pytest.raises(RuntimeError, match="computed elsewhere"):
            first[0].sum().backward()
        with pytest.raises(RuntimeError, match="computed elsewhere"):
            (value + first[1].square().sum()).backward()
