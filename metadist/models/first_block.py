"""A block of the network on images: convolution, batch norm, ReLU and 2×2 max-pooling as one.

The maps of a first block are large, and computing them takes few products: on many images it costs
less to compute them anew than to bring them from memory. Here nothing between the images and the
pooled maps leaves the processor's cache, forward and backward, in C++ that `native` compiles. Where
the derivative is to be differentiated again it is taken step by step.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from metadist.kernels import call, can_call
from metadist.models.convolution import MapsShape, can_convolve, convolve, has_few_channels
from metadist.models.norm_relu_pool import fused_rows, takes_norm

_SOURCE = "first_block"
_BYTES = 2**23  # of a task's maps behind the convolution: less than these the cache holds


def can_join(convolution: nn.Conv2d, norm: nn.Module, images: Tensor) -> bool:
    """Whether `joined` does what convolution, norm, ReLU and pooling would do, and pays."""
    alone = convolution.weight.dim() == 4
    each = images if alone else images[0]
    made = each[:, 0].numel() * convolution.out_channels * each.element_size()
    return (
        made >= _BYTES
        and min(images.shape[-2:]) > 1
        and takes_norm(norm, images)
        and convolution.bias is not None
        and convolution.out_channels == norm.num_features
        and (norm.weight.dim() == 1 if alone else len(norm.weight) == len(images))
        and has_few_channels(convolution, images)
        and can_convolve(convolution, images)
        and can_call(_SOURCE, images)
    )


def joined(convolution: nn.Conv2d, norm: nn.Module, images: Tensor) -> Tensor:
    """The two, a ReLU and the maximum of each 2×2 square.

    Args:
        convolution: as `can_join` wants it; its parameters, and the norm's, may have tasks in
            front.
        norm: batch norm by the batch's statistics.
        images: (…, n, channels, height, width), with tasks in front if the parameters have them.

    Returns:
        (…, n, out, height // 2, width // 2). It can be differentiated twice by the parameters.
    """
    alone = convolution.weight.dim() == 4
    parts = (images, convolution.weight, convolution.bias, norm.weight, norm.bias)
    together, *parameters = (part.unsqueeze(0) if alone else part for part in parts)
    last = together.permute(0, 1, 3, 4, 2).contiguous()
    out = _Joined.apply(last, *(each.contiguous() for each in parameters), norm.eps)
    out = out.permute(0, 1, 4, 2, 3)
    return out.squeeze(0) if alone else out


class _Joined(Function):
    """(tasks, n, h, w, in) -> (tasks, n, h // 2, w // 2, out)."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor,
        bias: Tensor,
        scale: Tensor,
        shift: Tensor,
        eps: float,
    ) -> Tensor:
        tasks, n, height, width, _ = images.shape
        out = images.new_empty(tasks, n, height // 2, width // 2, weight.shape[1])
        mean, inverse = torch.empty_like(scale), torch.empty_like(scale)
        inputs = (images, weight, bias, scale, shift)
        shape = MapsShape(*images.shape, weight.shape[1])
        call(_SOURCE, "forward", images.dtype, shape, *inputs, eps, out, mean, inverse)
        ctx.eps = eps
        ctx.save_for_backward(*inputs, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, mean, inverse = ctx.saved_tensors
        images, weight, bias, scale, shift = inputs
        if torch.is_grad_enabled():  # to be differentiated again
            maps = convolve(images, weight, bias)
            out = fused_rows(maps, scale, shift, ctx.eps, 2)
            asked = [part for part in inputs if part.requires_grad]
            found = iter(torch.autograd.grad(out, asked, gradient, create_graph=True))
            return *(next(found) if part.requires_grad else None for part in inputs), None
        made = [torch.empty_like(each) for each in (weight, bias, scale, scale)]
        shape = MapsShape(*images.shape, weight.shape[1])
        arguments = (gradient.contiguous(), *inputs, mean, inverse, *made)
        call(_SOURCE, "backward", images.dtype, shape, *arguments)
        by_weight, by_bias, mean_z, mean_zh = made
        rows = images[0, ..., 0].numel()
        return None, by_weight, by_bias, mean_zh * rows, mean_z * rows, None
