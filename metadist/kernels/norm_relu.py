"""Batch norm and ReLU in PyTorch, batched over tasks, with explicit derivatives."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from metadist.kernels.transforms import differentiable_gradients, is_transformed


def norm_relu_rows(
    inputs: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Batch norm and ReLU in PyTorch, batched over tasks, with explicit derivatives.

    Args:
        inputs: the inputs, of shape (tasks, rows, channels); statistics are over the rows.
        weight: the norm's weights, of shape (tasks, 1, channels).
        bias: the norm's biases, of shape (tasks, 1, channels).
        eps: the norm's eps.

    Returns:
        The outputs, of shape (tasks, rows, channels), and the mean and the unbiased variance of
        the inputs, of shape (tasks, 1, channels), without gradients.
    """
    return _NormReLU.apply(inputs, weight, bias, eps)


def statistics(rows: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The mean and 1 / deviation over dimension 1, in operations of any derivative.

    Args:
        rows: the values, of shape (tasks, rows, channels).
        eps: what is added to the variance.
    """
    mean, variance = _moments(rows)
    return mean, (variance + eps).rsqrt()


def _moments(rows: Tensor) -> tuple[Tensor, Tensor]:
    mean = rows.mean(1, keepdim=True)
    return mean, (rows - mean).square_().mean(1, keepdim=True)


class _NormReLU(Function):
    """relu(γ h + β), h = (y - mean) / deviation, over dimension 1 of y (tasks, rows, features).

    Each derivative below is a linear combination of the tensors with one coefficient per feature,
    in one or two passes over memory. <·> is the mean over rows, z the gradient with respect to
    γ h + β.
    """

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean, variance = _moments(y)
        rows = y.shape[1]
        inverse = (variance + eps).rsqrt()
        scale = weight * inverse
        out = torch.addcmul(bias - mean * scale, y, scale).relu_()
        ctx.eps = eps
        ctx.save_for_backward(y, weight, mean, inverse, out)
        unbiased = variance * (rows / (rows - 1))
        ctx.mark_non_differentiable(mean, unbiased)
        ctx.set_materialize_grads(False)
        return out, mean, unbiased

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:  # as from a function whose backward returns None
            return (None,) * 4
        y, weight, mean, inverse, out = ctx.saved_tensors
        z = torch.ops.aten.threshold_backward(grad_output, out.detach(), 0)
        if is_transformed(grad_output):  # no Function may be called there
            return *_gradients(z, y, weight, *statistics(y, ctx.eps))[:3], None
        return *_NormReLUBackward.apply(z, y, weight, mean, inverse, ctx.eps), None


def _gradients(
    z: Tensor, y: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """With s = γ / deviation: dy = s (z - <z> - h <zh>), dγ = Σ zh, dβ = Σ z, <z> and <zh>."""
    mean_z = z.mean(1, keepdim=True)
    mean_zh = ((y - mean) * z).mean(1, keepdim=True) * inverse
    scale = weight * inverse
    by_y = -scale * mean_zh * inverse
    dy = torch.addcmul(-scale * mean_z - by_y * mean, z, scale).addcmul_(y, by_y)
    return dy, mean_zh * y.shape[1], mean_z * y.shape[1], mean_z, mean_zh


class _NormReLUBackward(Function):
    @staticmethod
    def forward(
        ctx: Any, z: Tensor, y: Tensor, weight: Tensor, mean: Tensor, inverse: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        dy, d_weight, d_bias, mean_z, mean_zh = _gradients(z, y, weight, mean, inverse)
        ctx.eps = eps
        ctx.save_for_backward(z, y, weight, mean, inverse, mean_z, mean_zh)
        return dy, d_weight, d_bias

    @staticmethod
    def backward(ctx: Any, g: Tensor, g_weight: Tensor, g_bias: Tensor) -> tuple[Any, ...]:
        z, y, weight, mean, inverse, mean_z, mean_zh = ctx.saved_tensors
        if torch.is_grad_enabled() or is_transformed(g):

            def first(z: Tensor, y: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
                return _gradients(z, y, weight, *statistics(y, ctx.eps))[:3]

            grads = differentiable_gradients(first, (z, y, weight), (g, g_weight, g_bias))
            return *grads, None, None, None
        rows = y.shape[1]
        scale = weight * inverse
        mean_g = g.mean(1, keepdim=True)
        mean_gh = (y - mean).mul_(g).mean(1, keepdim=True) * inverse
        mean_gz = (g * z).mean(1, keepdim=True)
        # By z: s (g - <g> - h <gh>) + g_weight h + g_bias.
        by_h = g_weight - scale * mean_gh
        by_y = by_h * inverse
        dz = torch.addcmul(g_bias - scale * mean_g - by_y * mean, g, scale).addcmul_(y, by_y)
        # Through s = γ / deviation.
        through = rows * (mean_gz - mean_g * mean_z - mean_gh * mean_zh)
        # By h: q = by_h z - s <zh> g. By y: through h, and through the deviation.
        mean_q = by_h * mean_z - scale * mean_zh * mean_g
        mean_qh = by_h * mean_zh - scale * mean_zh * mean_gh
        by_y = -inverse * (inverse * mean_qh + weight * through * inverse.square() / rows)
        dy = torch.addcmul(-inverse * mean_q - by_y * mean, g, -inverse * scale * mean_zh)
        dy = dy.addcmul_(z, inverse * by_h).addcmul_(y, by_y)
        return dz, dy, inverse * through, None, None, None
