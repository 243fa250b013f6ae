"""Batched matrix products against torch, with derivatives and for any number of tasks."""

import pytest
import torch
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from metadist.kernels import pytorch_operations
from metadist.kernels.matmul import matmul

SHAPES = [(5, 1, 40), (10, 40, 1), (7, 300, 5), (6, 17, 70), (1, 64, 64), (40, 90, 33)]


def operands(tasks: int, shape: tuple[int, int, int], dtype=torch.float64, transposed=()):
    rows, depth, width = shape
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(tasks, rows, depth, dtype=dtype, generator=generator)
    b = torch.randn(tasks, depth, width, dtype=dtype, generator=generator)
    bias = torch.randn(tasks, width, dtype=dtype, generator=generator)
    if "a" in transposed:
        a = a.mT.contiguous().mT
    if "b" in transposed:
        b = b.mT.contiguous().mT
    return a, b, bias


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("transposed", ["", "a", "b", "ab"])
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_derivatives_equal_bmm(shape, transposed, native):
    a, b, bias = (each.requires_grad_() for each in operands(3, shape, transposed=transposed))

    def derivatives(product):
        first = torch.autograd.grad(
            (product(a, b, bias) ** 3).sum(), (a, b, bias), create_graph=True
        )
        second = torch.autograd.grad(sum((each**2).sum() for each in first), (a, b, bias))
        return product(a, b, bias), *first, *second

    results = derivatives(lambda a, b, bias: matmul(a, b, bias, native))
    expected = derivatives(lambda a, b, bias: a @ b + bias.unsqueeze(1))
    for each, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(each, wanted, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(matmul(a, b, None, native), a @ b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("transposed", ["", "a", "b"])
@pytest.mark.parametrize("shape", [*SHAPES, (245, 576, 64), (5, 64, 5)])
def test_a_product_is_bit_identical_for_any_number_of_tasks(shape, transposed, native):
    a, b, bias = operands(7, shape, torch.float32, transposed)
    whole = matmul(a, b, bias, native)
    for sizes in ([1] * 7, [2, 2, 3], [3, 4], [6, 1]):
        pieces = zip(a.split(sizes), b.split(sizes), bias.split(sizes), strict=True)
        assert torch.equal(torch.cat([matmul(*each, native) for each in pieces]), whole)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_without_a_dimension_of_tasks_has_the_bits_of_a_batch(shape):
    a, b, bias = operands(3, shape, torch.float32)
    assert torch.equal(matmul(a[1], b[1]), matmul(a, b)[1])
    assert torch.equal(matmul(a[1], b[1], bias[1]), matmul(a, b, bias)[1])


def with_gaps(matrices):
    """The same matrices, stored as before but with unused memory between the tasks."""
    if not matrices.is_contiguous():
        return with_gaps(matrices.mT).mT
    return torch.stack([matrices, matrices], 1)[:, 0]


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("transposed", ["a", "b", "ab"])
@pytest.mark.parametrize("shape", [*SHAPES, (245, 576, 64), (5, 64, 5)])
def test_gaps_between_tasks_do_not_change_a_bit(shape, transposed, native):
    *dense, bias = operands(3, shape, torch.float32, transposed)

    def derivatives(tasks, *matrices):
        tensors = [each[tasks].detach().requires_grad_() for each in (*matrices, bias)]
        product = matmul(*tensors, native)
        first = torch.autograd.grad((product**3).sum(), tensors, create_graph=True)
        second = torch.autograd.grad(sum((each**2).sum() for each in first), tensors)
        return product, *first, *second

    whole = derivatives(slice(3), *dense)
    gaps = derivatives(slice(3), *map(with_gaps, dense))
    one = derivatives(slice(1), *map(with_gaps, dense))
    for expected, found, alone in zip(whole, gaps, one, strict=True):
        assert torch.equal(found, expected)
        assert torch.equal(alone, expected[:1])


@pytest.mark.parametrize("native", [True, False])
def test_second_derivatives_of_slices(native):
    a, b, _ = (each.requires_grad_() for each in operands(3, (6, 8, 10)))

    def derivatives(product):
        loss = (product(a[:, ::2, ::2], b[:, ::2, ::2]) ** 3).sum()
        first = torch.autograd.grad(loss, (a, b), create_graph=True)
        return torch.autograd.grad(sum((each**2).sum() for each in first), (a, b))

    found = derivatives(lambda a, b: matmul(a, b, native=native))
    torch.testing.assert_close(found, derivatives(torch.matmul), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("native", [True, False])
def test_no_tasks(native):
    assert matmul(torch.zeros(0, 3, 4), torch.zeros(0, 4, 5), native=native).shape == (0, 3, 5)


def test_torch_func_transforms():
    a, b, bias = operands(3, (5, 4, 6))

    def loss(product, a, b, bias):
        return (product(a, b, bias) ** 3).sum()

    def derivatives(product):
        each_task = vmap(grad(lambda *task: loss(product, *(each[None] for each in task))))
        return each_task(a, b, bias), grad(lambda a: loss(product, a, b, bias))(a)

    expected = derivatives(lambda a, b, bias: a @ b + bias.unsqueeze(1))
    torch.testing.assert_close(derivatives(matmul), expected, rtol=1e-10, atol=1e-10)


def test_traced_products_are_of_contiguous_derivatives():
    inputs, weight, bias = operands(3, (5, 4, 6), transposed="b")

    def derivatives(inputs, weight, bias):
        leaves = [each.requires_grad_() for each in (inputs, weight, bias)]
        product = matmul(leaves[0], leaves[1].mT, leaves[2])
        first = torch.autograd.grad((product**3).sum(), leaves, create_graph=True)
        second = torch.autograd.grad(sum((each**2).sum() for each in first), leaves)
        return [product, *first, *second]

    arguments = inputs, weight.mT.contiguous(), bias
    with pytorch_operations():
        graph = make_fx(derivatives, tracing_mode="fake")(*arguments)
    operations = {str(node.target) for node in graph.graph.nodes if node.op == "call_function"}
    assert "aten.bmm.default" in operations
    assert not operations & {"aten.mm.default", "aten.baddbmm.default"}
    results = graph(*arguments)
    torch.testing.assert_close(results, derivatives(*arguments), rtol=1e-10, atol=1e-10)
    # A transposed derivative is slow to add to the weights.
    assert all(derivative.is_contiguous() for derivative in (results[2], results[5]))


def test_autocast_chooses_the_type():
    a, b, bias = operands(3, (5, 4, 6), torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for found in (matmul(a.bfloat16(), b, bias), matmul(a, b, bias), matmul(a, b)):
            assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), a @ b, rtol=0.05, atol=0.05)


def test_mismatched_operands_are_refused():
    a, b, bias = operands(3, (2, 4, 5))
    mismatched = [
        *((a[:2], b, bias), (a, b[:, :3], bias), (a, b, bias[:, :4])),
        *((a.float(), b, bias), (a, b, bias.float())),
        *((a, b.to("meta"), bias), (a, b, bias.to("meta"))),
        *((a[:, 0], b, bias), (a, b[:, 0], bias), (a[0, 0], b[0, 0])),
    ]
    for wrong in mismatched:
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            matmul(*wrong)
