"""The device on which a process computes tasks."""

import functools

import torch

from metadist.distributed import get_local_rank
from metadist.errors import UserError, first_line


def resolve_device(device: str) -> torch.device:
    """The device of this process for a configured name.

    If a node has more ranks than GPUs, several ranks share a GPU.

    Args:
        device: "auto" for the GPU of the local rank if there is one, else the CPU; "cuda" for
            the GPU of the local rank; or a name that torch accepts.

    Raises:
        UserError: this process has no such device.
    """
    if device == "auto" and not torch.cuda.is_available():
        return torch.device("cpu")
    if device in ("auto", "cuda") and torch.cuda.is_available():
        return torch.device("cuda", get_local_rank() % torch.cuda.device_count())
    return _existing_device(device)


@functools.cache
def _existing_device(device: str) -> torch.device:
    try:
        chosen = torch.device(device)
        torch.zeros(1, device=chosen).item()  # on "meta" there are no values
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).partition(". ")[0]  # what torch adds is long
        if reason.startswith("Expected one of"):
            reason = "it is not a device"
        raise UserError(
            f"device={device} cannot be used here ({reason}): choose cpu, cuda, cuda:N or auto."
        ) from None
    return chosen
