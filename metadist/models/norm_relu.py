"""What follows a layer: normalisation, ReLU and pooling, as fast as the machine can.

Where the derivatives are written out, in few passes over memory, they can be differentiated once
more, which is what MAML's second order needs, and no further.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from metadist.models.norm_relu_pool import can_fuse, fused


def norm_relu(norm: nn.Module, maps: Tensor, pool: bool = False, native: bool = True) -> Tensor:
    """ReLU behind a normalisation; then, with `pool`, the maximum of each 2×2 square.

    Args:
        norm: `torch.nn.BatchNorm1d` or `BatchNorm2d` without running statistics to run side by
            side; anything that keeps the shape otherwise.
        maps: (…, n, channels, *size).
        pool: whether to halve height and width, rounded down.
        native: whether to use `fused` where it can be.
    """
    if native and can_fuse(norm, maps) and not (pool and min(maps.shape[-2:]) < 2):
        return fused(norm, maps, pool)
    if (
        not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
        or norm.weight is None
        or norm.weight.dim() == 1
    ):
        out = F.relu(norm(maps))
    else:
        last = maps.movedim(2, -1)
        if last[0, ..., 0].numel() == 1:
            raise ValueError(f"batch norm needs more than one value per channel, got {maps.shape}")
        weight, bias = norm.weight.unsqueeze(1), norm.bias.unsqueeze(1)
        rows = _NormReLU.apply(last.flatten(1, -2), weight, bias, norm.eps)
        out = rows.view(last.shape).movedim(-1, 2)
    return _max_pool(out) if pool else out


def _max_pool(maps: Tensor) -> Tensor:
    """(…, h, w) -> (…, h // 2, w // 2)."""
    pooled = F.max_pool2d(maps.flatten(0, -4), 2)
    return pooled.unflatten(0, maps.shape[:-3])


class _NormReLU(Function):
    """relu(γ h + β), h = (y - mean) / deviation, over dimension 1 of y: (tasks, rows, features).

    Every derivative below is a combination of the tensors with a coefficient a feature, so that
    each is a pass or two over memory. <·> is the mean over rows, z the gradient behind the ReLU.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        mean = y.mean(1, keepdim=True)
        deviation = torch.linalg.vector_norm(y - mean, dim=1, keepdim=True)
        inverse = (deviation.square() / y.shape[1] + eps).rsqrt()
        scale = weight * inverse
        out = torch.addcmul(bias - mean * scale, y, scale).relu_()
        ctx.save_for_backward(y, weight, mean, inverse, out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, mean, inverse, out = ctx.saved_tensors
        return *_NormReLUBackward.apply(gradient, y, weight, mean, inverse, out.detach()), None


class _NormReLUBackward(Function):
    """dy = s (z - <z> - h <zh>) with s = γ / deviation; dγ = Σ zh; dβ = Σ z."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        y: Tensor,
        weight: Tensor,
        mean: Tensor,
        inverse: Tensor,
        out: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = torch.ops.aten.threshold_backward(gradient, out, 0)
        mean_z = z.mean(1, keepdim=True)
        mean_zh = ((z * y).mean(1, keepdim=True) - mean * mean_z) * inverse
        scale = weight * inverse
        by_y = -scale * mean_zh * inverse
        dy = torch.addcmul(-scale * mean_z - by_y * mean, z, scale).addcmul_(y, by_y)
        ctx.save_for_backward(z, y, weight, mean, inverse, out, mean_z, mean_zh)
        return dy, mean_zh * y.shape[1], mean_z * y.shape[1]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, g_weight: Tensor, g_bias: Tensor) -> tuple[Any, ...]:
        z, y, weight, mean, inverse, out, mean_z, mean_zh = ctx.saved_tensors
        rows = y.shape[1]
        scale = weight * inverse
        mean_g = g.mean(1, keepdim=True)
        mean_gh = ((g * y).mean(1, keepdim=True) - mean * mean_g) * inverse
        mean_gz = (g * z).mean(1, keepdim=True)
        # By z: s (g - <g> - h <gh>) + g_weight h + g_bias, where the ReLU lets it through.
        by_h = g_weight - scale * mean_gh
        by_y = by_h * inverse
        dz = torch.addcmul(g_bias - scale * mean_g - by_y * mean, g, scale).addcmul_(y, by_y)
        dz = torch.ops.aten.threshold_backward(dz, out, 0)
        # Through s = γ / deviation.
        through = rows * (mean_gz - mean_g * mean_z - mean_gh * mean_zh)
        # By h it is q = by_h z - s <zh> g; y then gets q normalised, and its share of deviation.
        mean_q = by_h * mean_z - scale * mean_zh * mean_g
        mean_qh = by_h * mean_zh - scale * mean_zh * mean_gh
        by_y = -inverse * (inverse * mean_qh + weight * through * inverse.square() / rows)
        dy = torch.addcmul(-inverse * mean_q - by_y * mean, g, -inverse * scale * mean_zh)
        dy = dy.addcmul_(z, inverse * by_h).addcmul_(y, by_y)
        return dz, dy, inverse * through, None, None, None
