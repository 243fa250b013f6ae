"""Batched matrix products against torch, with derivatives and for any number of tasks."""

import pytest
import torch

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
def test_values_and_derivatives_equal_bmm(single_thread, shape, transposed, native):
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
def test_a_product_is_bit_identical_for_any_number_of_tasks(
    single_thread, shape, transposed, native
):
    a, b, bias = operands(7, shape, torch.float32, transposed)
    whole = matmul(a, b, bias, native)
    for sizes in ([1] * 7, [2, 2, 3], [3, 4], [6, 1]):
        pieces = zip(a.split(sizes), b.split(sizes), bias.split(sizes), strict=True)
        assert torch.equal(torch.cat([matmul(*each, native) for each in pieces]), whole)


def test_mismatched_operands_are_refused(single_thread):
    a, b, bias = operands(3, (2, 4, 5))
    for wrong in ((a[:2], b, bias), (a, b[:, :3], bias), (a, b, bias[:, :4]), (a.float(), b, bias)):
        with pytest.raises(RuntimeError, match="cannot be multiplied"):
            matmul(*wrong)
