"""Sums over the ranks of one machine in shared memory.

Gloo takes 0.3 to 1.5 milliseconds for a thousand numbers of two processes, most of it to wake up
threads that wait for messages. In shared memory they take 5 to 10 microseconds.
"""

import contextlib
import ctypes
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from metadist.distributed.errors import WorkerLostError
from metadist.distributed.rendezvous import all_gather_object
from metadist.distributed.world import get_world_info, host_name, usable_cpus
from metadist.errors import UserError
from metadist.kernels import library

_PROGRESS_BYTES = 64
_SLOT_BYTES = 2**18
"""Memory of each rank for its vector; longer vectors are summed in pieces."""
_TOKEN_BYTES = 16

_FUNCTIONS = {
    torch.float32: "all_reduce_f32",
    torch.float64: "all_reduce_f64",
    torch.int64: "all_reduce_i64",
}
_DIFFERENT_VECTORS = -2
_WAIT_NANOSECONDS = 100_000_000
"""Time after which a waiting rank handles signals and checks that the rank it waits for lives."""


class _State(ctypes.Structure):
    """The state of a sum; see `Sum` in `all_reduce.cpp`."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("vector", ctypes.c_void_p),
        ("length", ctypes.c_int64),
        ("capacity", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("steps", ctypes.c_uint64),
        ("start", ctypes.c_int64),
        ("phase", ctypes.c_int64),
        ("spins", ctypes.c_int64),
    )


class SharedMemorySum:
    """Sums vectors over the ranks of one machine; see `open_shared_memory`.

    Args:
        file: the descriptor of a file that these ranks alone use. It is closed with this object.
        timeout: seconds that a sum waits for the slowest rank.

    Raises:
        OSError: there is no C++ compiler, or the file cannot be mapped.
    """

    def __init__(self, file: int, timeout: float) -> None:
        info, compiled = get_world_info(), library("all_reduce")
        if compiled is None:
            raise OSError("there is no C++ compiler")
        self._timeout = timeout
        self._functions: dict[torch.dtype, Callable[..., int]] = {}
        for dtype, name in _FUNCTIONS.items():
            function = getattr(compiled, name)
            function.restype = ctypes.c_int64
            self._functions[dtype] = function
        self._memory = mmap.mmap(file, _token_offset())
        self._pointer = ctypes.c_char.from_buffer(self._memory)
        self._state = _State(
            memory=ctypes.addressof(self._pointer),
            rank=info.rank,
            size=info.world_size,
            spins=info.world_size <= usable_cpus(),
        )
        self._file = file
        # However this process ends, the system then releases the lock. It would also do so if this
        # process closed another descriptor of the file.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, info.rank)

    def supports(self, vector: Tensor) -> bool:
        """Whether `all_reduce` can sum a vector of this type, on this device."""
        return vector.is_cpu and vector.dtype in self._functions and vector.is_contiguous()

    def all_reduce(self, vector: Tensor) -> None:
        """Sum a vector in place, in the order of the ranks. All ranks call it.

        Args:
            vector: a tensor of the same dtype and size on all ranks. A rank whose tensor is not
                supported at all does not call it.

        Raises:
            WorkerLostError: a rank has left, or did not call it within `timeout`.
            UserError: the dtypes or sizes differ, which all ranks raise; or an earlier sum of this
                rank did not finish.
        """
        state, function = self._state, self._functions[vector.dtype]
        if state.phase:
            raise UserError(
                "an earlier collective of this process group failed or was interrupted: open the "
                "process group again on all ranks."
            )
        state.vector, state.start = vector.data_ptr(), 0
        state.length, state.capacity = vector.numel(), _SLOT_BYTES // vector.element_size()
        deadline: float | None = None
        while (rank := function(ctypes.byref(state), ctypes.c_int64(_WAIT_NANOSECONDS))) >= 0:
            deadline = deadline or time.monotonic() + self._timeout
            if self._has_left(rank):
                reason = "was lost during a collective"
            elif time.monotonic() > deadline:
                reason = f"did not join a collective within {self._timeout:g} s"
            else:
                continue
            raise WorkerLostError(f"rank {rank} on {host_name()} {reason}.", rank)
        if rank == _DIFFERENT_VECTORS:
            raise UserError(
                "the ranks add up tensors of different sizes or dtypes: call all_reduce with the "
                "same structure, shapes and dtypes on every rank."
            )

    def _has_left(self, rank: int) -> bool:
        """Whether a rank has left before it took part in the current step of a sum."""
        try:
            fcntl.lockf(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        address = self._state.memory + rank * _PROGRESS_BYTES
        return ctypes.c_uint64.from_address(address).value < self._state.steps

    def close(self) -> None:
        """Leave; sums that wait for this rank fail."""
        del self._pointer
        self._memory.close()
        os.close(self._file)


def open_shared_memory(
    store: dist.Store, timeout: float, rendezvous_timeout: float
) -> SharedMemorySum | None:
    """Open the sums of all ranks. Every rank calls it.

    Args:
        store: the store that these ranks share.
        timeout: see `SharedMemorySum`.
        rendezvous_timeout: seconds to wait for all ranks to arrive.

    Returns:
        The sums; None on all ranks if a rank cannot take part, as on another machine than rank
        zero, without a C++ compiler, or on another system than Linux.
    """
    file: int | None = None
    shared: SharedMemorySum | None = None
    offer = ["", ""]
    if get_world_info().rank == 0:
        with contextlib.suppress(OSError, AttributeError):
            file, token = _create_file()
            offer = [f"/proc/{os.getpid()}/fd/{file}", token]
    path, token = all_gather_object(store, "shared_memory", offer, rendezvous_timeout)[0]
    if path:
        with contextlib.suppress(OSError):
            file = _open_file(path, token) if file is None else file
            shared = SharedMemorySum(file, timeout)
    opened = all_gather_object(store, "shared_memory_open", shared is not None, rendezvous_timeout)
    if all(opened):
        return shared
    if shared is not None:
        shared.close()
    elif file is not None:
        os.close(file)
    return None


def _token_offset() -> int:
    ranks = get_world_info().world_size
    return ranks * _PROGRESS_BYTES + (ranks + 1) * _SLOT_BYTES


def _create_file() -> tuple[int, str]:
    """A file without a name, and the token at its end. It exists as long as a process has it open.

    Raises:
        OSError: the memory does not suffice.
        AttributeError: the system is not Linux.
    """
    file, token = os.memfd_create("metadist"), secrets.token_hex(_TOKEN_BYTES)
    try:
        # Without memory for all of it, a later write would end the process.
        os.posix_fallocate(file, 0, _token_offset() + _TOKEN_BYTES)
        os.pwrite(file, bytes.fromhex(token), _token_offset())
    except OSError:
        os.close(file)
        raise
    return file, token


def _open_file(path: str, token: str) -> int:
    """Open rank zero's file by its path among the files of a process.

    Raises:
        OSError: there is no such file. In another container the path may be that of another one.
    """
    file = os.open(path, os.O_RDWR)
    try:
        if os.pread(file, _TOKEN_BYTES, _token_offset()).hex() != token:
            raise OSError(f"{path} is another file")
    except OSError:
        os.close(file)
        raise
    return file
