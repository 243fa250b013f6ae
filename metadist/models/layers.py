"""Layers that also run several tasks side by side, each task with parameters of its own.

With parameters as they were made, these are PyTorch's layers. Parameters with one more dimension
in front (through `torch.func.functional_call`) belong to as many tasks, and the inputs then have
the same dimension in front. On small problems most of a task's time goes to starting operations,
not to arithmetic; side by side, the tasks share that cost. Each task's numbers are the same bits
however many run beside it.

The derivatives are written out in few passes over memory; they can be differentiated once more,
which is what MAML's second order needs, and no further.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable


class Linear(nn.Linear):
    """`torch.nn.Linear` on (n, in), or on (tasks, n, in) side by side."""

    def forward(self, inputs: Tensor) -> Tensor:
        """(…, n, in) -> (…, n, out)."""
        if self.weight.dim() == 2:
            return super().forward(inputs)
        outputs = inputs @ self.weight.transpose(1, 2)
        return outputs if self.bias is None else outputs + self.bias.unsqueeze(1)


class Conv2d(nn.Conv2d):
    """`torch.nn.Conv2d` on (n, channels, h, w), or on (tasks, n, channels, h, w) side by side.

    Side by side it is one matrix product a task, of the image's patches with the weights, and
    takes neither groups nor dilation, and zeros for padding.
    """

    def forward(self, maps: Tensor) -> Tensor:
        """(…, n, in, h, w) -> (…, n, out, h', w')."""
        if self.weight.dim() == 4:
            # Channels last: on CPUs convolutions and pooling are then faster.
            last = torch.channels_last if maps.is_cpu else torch.preserve_format
            return super().forward(maps.to(memory_format=last)).to(memory_format=last)
        tasks, n = maps.shape[:2]
        patches = _Patches.apply(
            maps.permute(0, 1, 3, 4, 2).flatten(0, 1), self.kernel_size, self.stride, self.padding
        )
        matrix = self.weight.permute(0, 1, 3, 4, 2).flatten(2).transpose(1, 2)
        rows = patches.reshape(tasks, -1, patches.shape[-1])
        outputs = (
            rows @ matrix
            if self.bias is None
            else torch.baddbmm(self.bias.unsqueeze(1), rows, matrix)
        )
        return outputs.view(tasks, n, *patches.shape[1:3], -1).permute(0, 1, 4, 2, 3)


def norm_relu(norm: nn.Module, maps: Tensor) -> Tensor:
    """ReLU behind a normalisation, in one piece where it is batch norm and side by side.

    Args:
        norm: `torch.nn.BatchNorm1d` or `BatchNorm2d` without running statistics to run side by
            side; anything that keeps the shape otherwise.
        maps: (…, n, channels, *size).
    """
    if not isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d) or norm.weight.dim() == 1:
        return F.relu(norm(maps))
    last = maps.movedim(2, -1)
    weight, bias = norm.weight.unsqueeze(1), norm.bias.unsqueeze(1)
    rows = _NormReLU.apply(last.flatten(1, -2), weight, bias, norm.eps)
    return rows.view(last.shape).movedim(-1, 2)


def max_pool(maps: Tensor) -> Tensor:
    """The maximum of each 2×2 square: (…, h, w) -> (…, h // 2, w // 2)."""
    pooled = F.max_pool2d(maps.flatten(0, -4), 2)
    return pooled.unflatten(0, maps.shape[:-3])


class _Patches(Function):
    """(n, h, w, channels) -> (n, h', w', kernel · kernel · channels): what each output sees."""

    @staticmethod
    def forward(ctx: Any, maps: Tensor, kernel: Any, stride: Any, padding: Any) -> Tensor:
        ctx.geometry = maps.shape[1:3], kernel, stride, padding
        (down, across), (rows, columns) = padding, kernel
        padded = F.pad(maps, (0, 0, across, across, down, down)).contiguous()
        n, height, width, channels = padded.shape
        a, b, c, d = padded.stride()
        return padded.as_strided(
            (
                n,
                (height - rows) // stride[0] + 1,
                (width - columns) // stride[1] + 1,
                rows,
                columns * channels,
            ),
            (a, b * stride[0], c * stride[1], b, d),
        ).flatten(3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Unpatches.apply(gradient, *ctx.geometry), None, None, None


class _Unpatches(Function):
    """The transpose of `_Patches`: adds each patch up where it came from."""

    @staticmethod
    def forward(
        ctx: Any, patches: Tensor, size: Any, kernel: Any, stride: Any, padding: Any
    ) -> Tensor:
        ctx.geometry = kernel, stride, padding
        n, height, width, _ = patches.shape
        pieces = patches.unflatten(3, (*kernel, -1))
        (down, across), (high, wide) = padding, size
        padded = patches.new_zeros(n, high + 2 * down, wide + 2 * across, pieces.shape[-1])
        for i in range(kernel[0]):
            rows = slice(i, i + stride[0] * (height - 1) + 1, stride[0])
            for j in range(kernel[1]):
                columns = slice(j, j + stride[1] * (width - 1) + 1, stride[1])
                padded[:, rows, columns] += pieces[:, :, :, i, j]
        return padded[:, down : down + high, across : across + wide].contiguous()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _Patches.apply(gradient.contiguous(), *ctx.geometry), None, None, None, None


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
