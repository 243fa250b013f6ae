"""Convolution of images, batch norm, ReLU and 2×2 max-pooling as one operation in C++.

The feature maps of a network's first block are large and cheap to compute: for many images,
recomputing them in the backward pass takes less time than storing them. Intermediate values between
the images and the pooled feature maps stay in the processor's cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from metadist.kernels.convolution import (
    SAME,
    Geometry,
    can_convolve,
    conv_shape,
    convolve,
    has_few_channels,
    weight_in_memory,
)
from metadist.kernels.loader import backend, call
from metadist.kernels.norm_relu_pool import norm_relu_pool
from metadist.kernels.transforms import differentiable_gradients, has_tangent

_SOURCE = "fused_block"
MIN_BYTES = 2**23
"""The smallest size of a task's feature maps after the convolution; smaller ones fit the cache."""


def can_fuse_block(
    images: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gamma: Tensor | None,
    beta: Tensor | None,
    geometry: Geometry,
) -> bool:
    """Whether `fused_block` supports tensors, batched over tasks or unbatched, and is faster.

    Args:
        images: the images, of shape (…, n, channels, height, width).
        weight: the convolution's weights, of shape (…, out, channels, kernel height, kernel width).
        bias: the convolution's biases, of shape (…, out), or None, which is not supported.
        gamma: the norm's weights, of shape (…, out), or None, which is not supported.
        beta: the norm's biases, of shape (…, out), or None, which is not supported.
        geometry: the geometry of the convolution.
    """
    *_, height, width = images.shape
    outputs = images.shape[-4:-3].numel() * height * width * weight.shape[-4]
    return (
        outputs * images.element_size() >= MIN_BYTES
        and min(height, width) > 1
        and geometry == SAME
        and bias is not None
        and gamma is not None
        and beta is not None
        and bias.shape == gamma.shape == beta.shape
        and has_few_channels(images, weight)
        and can_convolve(images, weight, bias, geometry)
        and backend(images, gamma, beta) == "cpp"
    )


def fused_block(
    images: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor, *, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Convolution, batch norm, ReLU and 2×2 max-pooling, batched over tasks; see `can_fuse_block`.

    It is twice differentiable with respect to the parameters. The double backward pass uses the
    separate operations.

    Args:
        images: the images, of shape (tasks, n, channels, height, width).
        weight: the convolution's weights, of shape (tasks, out, channels, 3, 3).
        bias: the convolution's biases, of shape (tasks, out).
        gamma: the norm's weights, of shape (tasks, out).
        beta: the norm's biases, of shape (tasks, out).
        eps: the norm's eps.

    Returns:
        The pooled feature maps, of shape (tasks, n, out, height // 2, width // 2), and the mean and
        the unbiased variance of the convolution's outputs, of shape (tasks, out), without
        gradients.
    """
    channels_last = images.permute(0, 1, 3, 4, 2).contiguous()
    vectors = (vector.contiguous() for vector in (bias, gamma, beta))
    out, mean, variance = _FusedBlock.apply(channels_last, weight_in_memory(weight), *vectors, eps)
    return out.permute(0, 1, 4, 2, 3), mean, variance


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
    ) -> tuple[Tensor, Tensor, Tensor]:
        tasks, n, height, width, _ = images.shape
        out = images.new_empty(tasks, n, height // 2, width // 2, weight.shape[-1])
        mean, inverse, variance = (torch.empty_like(gamma) for _ in range(3))
        inputs = (images, weight, bias, gamma, beta)
        shape = conv_shape(images, weight.shape[-1], SAME)
        call(_SOURCE, "forward", images.dtype, shape, *inputs, eps, out, mean, inverse, variance)
        ctx.eps = eps
        ctx.save_for_backward(*inputs, mean, inverse)
        ctx.mark_non_differentiable(mean, variance)
        ctx.set_materialize_grads(False)
        return out, mean, variance

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:  # as from a function whose backward returns None
            return (None,) * 6
        *inputs, mean, inverse = ctx.saved_tensors
        if torch.is_grad_enabled() or has_tangent(grad_output):  # as with create_graph=True

            def separate(
                images: Tensor, weight: Tensor, bias: Tensor, gamma: Tensor, beta: Tensor
            ) -> tuple[Tensor, ...]:
                features = convolve(images, weight.permute(0, 4, 3, 1, 2), bias)
                return norm_relu_pool(features, gamma, beta, ctx.eps, 2)[:1]

            return *differentiable_gradients(separate, inputs, [grad_output]), None
        images, weight, bias, gamma, _ = inputs
        outputs = [torch.empty_like(parameter) for parameter in (weight, bias, gamma, gamma)]
        shape = conv_shape(images, weight.shape[-1], SAME)
        arguments = (grad_output.contiguous(), *inputs, mean, inverse, *outputs)
        call(_SOURCE, "backward", images.dtype, shape, *arguments)
        grad_weight, grad_bias, mean_z, mean_zh = outputs
        rows = images.shape[1:-1].numel()
        return None, grad_weight, grad_bias, mean_zh * rows, mean_z * rows, None
