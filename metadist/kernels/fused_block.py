"""Convolution of images, batch norm, ReLU and 2×2 max-pooling as one operation in C++.

The feature maps of a network's first block are large and cheap to compute: for many images,
recomputing them in the backward pass takes less time than storing them. Intermediate values between
the images and the pooled feature maps stay in the processor's cache.
"""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function

from metadist.kernels.batch_norm import (
    BatchNorm,
    has_hooks,
    tracks_statistics,
    update_running_statistics,
)
from metadist.kernels.convolution import (
    SAME,
    can_convolve,
    conv_shape,
    convolve,
    geometry_of,
    has_few_channels,
    weight_in_memory,
)
from metadist.kernels.loader import call, can_call
from metadist.kernels.norm_relu_pool import can_fuse_norm, norm_relu_pool_channels_last
from metadist.kernels.transforms import differentiable_gradients

_SOURCE = "fused_block"
MIN_BYTES = 2**23
"""The smallest size of a task's feature maps after the convolution; smaller ones fit the cache."""


def can_fuse_block(convolution: nn.Conv2d, norm: BatchNorm, images: Tensor) -> bool:
    """Whether `fused_block` supports the layers and the images, and is faster.

    Args:
        convolution: the convolution layer; its parameters may be batched over tasks.
        norm: the batch norm layer; its parameters are batched if the convolution's are.
        images: the images, of shape (…, n, channels, height, width).
    """
    unbatched = convolution.weight.dim() == 4
    task = images if unbatched else images[0]
    size = task[:, 0].numel() * convolution.out_channels * task.element_size()
    return (
        size >= MIN_BYTES
        and min(images.shape[-2:]) > 1
        and can_fuse_norm(norm, images)
        and not has_hooks(convolution)
        and convolution.bias is not None
        and convolution.out_channels == norm.num_features
        and (norm.weight.dim() == 1 if unbatched else len(norm.weight) == len(images))
        and geometry_of(convolution) == SAME
        and has_few_channels(convolution, images)
        and can_convolve(convolution, images)
        and can_call(_SOURCE, images)
    )


def fused_block(convolution: nn.Conv2d, norm: BatchNorm, images: Tensor) -> Tensor:
    """Convolution, batch norm, ReLU and 2×2 max-pooling; see `can_fuse_block`.

    It is twice differentiable with respect to the parameters. The double backward pass uses the
    separate operations.

    Args:
        convolution: the convolution layer; its parameters may be batched over tasks.
        norm: the batch norm layer; its parameters are batched if the convolution's are.
        images: the images, of shape (n, channels, height, width), or batched
            (tasks, n, channels, height, width).

    Returns:
        The pooled feature maps, of shape (…, n, out, height // 2, width // 2).
    """
    unbatched = convolution.weight.dim() == 4
    bias = cast(Tensor, convolution.bias)  # not None: see `can_fuse_block`
    tensors = (images, convolution.weight, bias, norm.weight, norm.bias)
    batched, weight, *vectors = (t.unsqueeze(0) if unbatched else t for t in tensors)
    channels_last = batched.permute(0, 1, 3, 4, 2).contiguous()
    parameters = [weight_in_memory(weight), *(vector.contiguous() for vector in vectors)]
    out = _FusedBlock.apply(channels_last, *parameters, float(norm.eps), norm)
    out = out.permute(0, 1, 4, 2, 3)
    return out.squeeze(0) if unbatched else out


class _FusedBlock(Function):
    """(tasks, n, h, w, in) -> (tasks, n, h // 2, w // 2, out).

    Weights have the layout of `weight_in_memory`.
    """

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor,
        bias: Tensor,
        gamma: Tensor,
        beta: Tensor,
        eps: float,
        norm: BatchNorm,
    ) -> Tensor:
        tasks, n, height, width, _ = images.shape
        out = images.new_empty(tasks, n, height // 2, width // 2, weight.shape[-1])
        mean, inverse = torch.empty_like(gamma), torch.empty_like(gamma)
        inputs = (images, weight, bias, gamma, beta)
        shape = conv_shape(images, weight.shape[-1], SAME)
        variance = torch.empty_like(gamma) if tracks_statistics(norm) else None
        call(_SOURCE, "forward", images.dtype, shape, *inputs, eps, out, mean, inverse, variance)
        if variance is not None:
            update_running_statistics(norm, mean, variance)
        ctx.eps = eps
        ctx.save_for_backward(*inputs, mean, inverse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        *inputs, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True

            def separate(
                images: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor
            ) -> tuple[Tensor]:
                features = convolve(images, weight.permute(0, 4, 3, 1, 2), bias)
                return (norm_relu_pool_channels_last(features, gamma, beta, ctx.eps, 2),)

            return *differentiable_gradients(separate, inputs, [grad_output]), None, None
        images, weight, bias, gamma, _ = inputs
        outputs = [torch.empty_like(parameter) for parameter in (weight, bias, gamma, gamma)]
        shape = conv_shape(images, weight.shape[-1], SAME)
        arguments = (grad_output.contiguous(), *inputs, mean, inverse, *outputs)
        call(_SOURCE, "backward", images.dtype, shape, *arguments)
        grad_weight, grad_bias, mean_z, mean_zh = outputs
        rows = images[0, ..., 0].numel()
        return None, grad_weight, grad_bias, mean_zh * rows, mean_z * rows, None, None
