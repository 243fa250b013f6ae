"""The precision in which tasks are computed: float32, TensorFloat-32 or bfloat16.

Parameters, gradients, the optimizer and the sums over tasks keep their types in any precision.
"""

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, Literal

import optree
import torch
from torch import Tensor

from metadist.distributed import get_rank
from metadist.errors import UserError

_log = logging.getLogger(__name__)

Precision = Literal["float32", "tf32", "bf16"]
"""See `TrainerConfig.precision`."""

_AMPERE = 8
"""Compute capability of NVIDIA's first GPUs with TensorFloat-32 and bfloat16."""


def supported_precision(precision: Precision, device: torch.device) -> Precision:
    """The precision in which a device computes tasks. Every rank calls it.

    Args:
        precision: the configured precision.
        device: the device on which tasks are computed.

    Returns:
        The configured precision, or "float32" for "tf32" on a device without TensorFloat-32, with a
        warning on rank zero.

    Raises:
        UserError: bf16 on a CUDA device that has no bfloat16.
    """
    cuda, amd = device.type == "cuda", torch.version.hip is not None
    ampere = cuda and not amd and torch.cuda.get_device_capability(device)[0] >= _AMPERE
    if precision == "bf16" and cuda and not (ampere or amd):
        raise UserError(
            f"trainer.precision=bf16 needs a GPU with bfloat16 (compute capability {_AMPERE}.0 or "
            f"higher), which {torch.cuda.get_device_name(device)} lacks: take "
            "trainer.precision=float32 or device=cpu."
        )
    if precision == "tf32" and not ampere:
        if get_rank() == 0:
            _log.warning("trainer.precision=tf32: %s has no TensorFloat-32, using float32", device)
        return "float32"
    return precision


def set_tensor_float32(precision: Precision, device: torch.device) -> None:
    """Let CUDA multiply matrices and convolve in TensorFloat-32, or in float32.

    By default, PyTorch multiplies matrices in float32 and convolves in TensorFloat-32.

    Args:
        precision: the precision of the tasks' computation: TensorFloat-32 with "tf32", float32 with
            "float32"; with "bf16", nothing changes.
        device: the device of the computation; nothing changes unless it is a CUDA device.
    """
    if precision != "bf16" and device.type == "cuda":
        torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
        torch.backends.cudnn.allow_tf32 = precision == "tf32"


@contextlib.contextmanager
def tensor_float32(precision: Precision, device: torch.device) -> Iterator[None]:
    """Context of `set_tensor_float32`, which restores the settings after it."""
    if precision == "bf16" or device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    with contextlib.ExitStack() as restored:
        try:
            matmul = torch.get_float32_matmul_precision()
            restored.callback(torch.set_float32_matmul_precision, matmul)
            restored.callback(setattr, cudnn, "allow_tf32", cudnn.allow_tf32)
            set_tensor_float32(precision, device)
        except RuntimeError:  # set by `fp32_precision`
            for operations in (torch.backends.cuda.matmul, cudnn.conv):
                before = operations.fp32_precision
                restored.callback(setattr, operations, "fp32_precision", before)
                operations.fp32_precision = "tf32" if precision == "tf32" else "ieee"
        yield


def autocast(
    precision: Precision, device: torch.device
) -> contextlib.AbstractContextManager[torch.autocast | None]:
    """Context of `torch.autocast` to bfloat16 with "bf16"; else nothing changes.

    Args:
        precision: the precision of the tasks' computation.
        device: the device of the computation.
    """
    if precision != "bf16":
        return contextlib.nullcontext()
    # The cache would return weights that were cast under no_grad where a gradient is needed.
    return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)


def to_float32(result: Any) -> Any:
    """Convert the bfloat16 tensors of a result to float32."""

    def converted(leaf: Tensor) -> Tensor:
        return leaf.float() if leaf.dtype is torch.bfloat16 else leaf

    return optree.tree_map(converted, result)
