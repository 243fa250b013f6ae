"""Sums in shared memory against the same sums in one process, and what ends a sum."""

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from worlds import run_world

import metadist as todist
from metadist.deadlines import wait_until
from metadist.distributed import WorkerLostError, collectives
from metadist.distributed.world import host_name
from metadist.kernels import library

pytestmark = pytest.mark.skipif(
    library("all_reduce") is None, reason="sums in shared memory need a C++ compiler"
)

DTYPES = (torch.float32, torch.float64, torch.int64)
LENGTHS = (0, 1, 7, 2**15, 2**15 + 1, 2**17 + 3)


def vector_of(rank: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (1e3 * torch.randn(length, generator=generator, dtype=torch.float64)).to(dtype)


def open_group(**options) -> list[int]:
    """Open a group, and count the sums over Gloo from now on."""
    collectives.init_process_group("gloo", **options)
    all_reduce, calls = dist.all_reduce, []

    def counting(*args, **kwargs) -> None:
        calls.append(len(args))
        all_reduce(*args, **kwargs)

    dist.all_reduce = counting
    return calls


def sum_vectors(**options) -> tuple[list[torch.Tensor], int]:
    calls = open_group(**options)
    rank = todist.get_rank()
    sums = [
        collectives.all_reduce(vector_of(rank, length, dtype), check=False)
        for dtype in DTYPES
        for length in LENGTHS
    ]
    collectives.barrier()
    collectives.destroy_process_group()
    return sums, len(calls)


@pytest.mark.parametrize("size", [2, 3, pytest.param(8, marks=pytest.mark.slow)])
def test_vectors_are_added_up_in_the_order_of_the_ranks(size):
    expected = []
    for dtype in DTYPES:
        for length in LENGTHS:
            total = vector_of(0, length, dtype)
            for rank in range(1, size):
                total += vector_of(rank, length, dtype)
            expected.append(total)
    for sums, gloo_calls in run_world(sum_vectors, size):
        assert gloo_calls == 0
        assert all(map(torch.equal, sums, expected))


def sum_with_gloo_if(reason: str) -> tuple[list[torch.Tensor], int]:
    patch, module = pytest.MonkeyPatch(), "metadist.distributed.shared_memory"
    if reason == "one rank has no compiler" and todist.get_rank() == 1:
        patch.setattr(f"{module}.library", lambda name: None)
    if reason == "the path is another file's":
        patch.setattr(f"{module}.secrets.token_hex", lambda size: "00" * size)
        if todist.get_rank() == 1:
            patch.setattr(os, "pread", lambda file, size, offset: b"\1" * size)
    if reason == "the path is a pipe's" and todist.get_rank() == 0:
        read, _ = os.pipe()
        patch.setattr(f"{module}._create_file", lambda: (read, "00"))
    if reason == "there is no such file":
        patch.setattr(os, "getpid", lambda: 2**30)
    if reason == "there is not enough memory":
        patch.setattr(os, "posix_fallocate", no_memory)
    before = open_files()
    sums = sum_vectors(shared_memory=reason != "it is not wanted")
    assert len(open_files()) <= len(before) + 1  # Gloo keeps one
    assert not [name for name in open_files() if "memfd:metadist" in name]
    return sums


def open_files() -> list[str]:
    """The names of this process's open files."""
    names = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the directory's own
            names.append(str(descriptor.readlink()))
    return names


def no_memory(*arguments) -> None:
    raise OSError("no space left on device")


@pytest.mark.parametrize(
    "reason",
    [
        *("it is not wanted", "one rank has no compiler", "the path is another file's"),
        *("the path is a pipe's", "there is no such file", "there is not enough memory"),
    ],
)
def test_all_ranks_use_gloo_if(reason):
    (first, first_calls), (second, second_calls) = run_world(sum_with_gloo_if, 2, reason)
    assert first_calls == second_calls == len(DTYPES) * len(LENGTHS) + 1
    assert all(map(torch.equal, first, second))


def leave_early(how: str, found: Path) -> str:
    collectives.init_process_group("gloo", timeout=120)
    collectives.all_reduce(1.0)
    if todist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        collectives.destroy_process_group()
        return "left"
    began = time.monotonic()
    with pytest.raises(WorkerLostError) as lost:
        collectives.all_reduce(1.0)
    assert time.monotonic() - began < 60
    assert lost.value.rank == 1
    (found / str(todist.get_rank())).touch()
    assert wait_until(lambda: len([*found.iterdir()]) == 2, 60)  # both find it
    return str(lost.value)


@pytest.mark.parametrize("how", ["killed", "left"])
def test_a_rank_that_has_left_is_found(how, tmp_path):
    outcomes = run_world(leave_early, 3, how, tmp_path, may_fail=True)
    assert outcomes[0] == outcomes[2]
    assert outcomes[0] == f"rank 1 on {host_name()} was lost during a collective."


def leave_after_the_last_sum(left: Path) -> tuple[float, int]:
    """Rank one leaves after the sum, before rank zero asks for the rank that it waited for."""
    collectives.init_process_group("gloo")
    checks = []
    if todist.get_rank() == 0:
        functions = collectives._shared_memory._functions  # noqa: SLF001
        compiled = functions[torch.float64]

        def find_rank_one_behind(*args) -> int:
            while not checks and compiled(*args) >= 0:
                pass  # rank one is late
            assert wait_until(left.exists, 60)
            checks.append(1)
            return 1 if len(checks) == 1 else -1

        functions[torch.float64] = find_rank_one_behind
    total = collectives.all_reduce(float(todist.get_rank()), check=False)
    collectives.destroy_process_group()
    if todist.get_rank() == 1:
        left.touch()
    return total, len(checks)


def test_a_rank_may_leave_while_others_finish_the_last_sum(tmp_path):
    assert run_world(leave_after_the_last_sum, 2, tmp_path / "left") == [(1.0, 2), (1.0, 0)]


def come_late() -> str:
    collectives.init_process_group("gloo", timeout=5)
    collectives.all_reduce(1.0)
    if todist.get_rank() == 1:
        time.sleep(8)
        return ""
    with pytest.raises(WorkerLostError) as lost:
        collectives.all_reduce(1.0)
    refuse_another_sum()
    return str(lost.value)


def refuse_another_sum() -> None:
    with pytest.raises(todist.UserError, match="an earlier collective of this process group"):
        collectives.all_reduce(1.0)


def test_a_sum_waits_for_the_timeout_at_most():
    assert "did not join a collective within 5 s" in run_world(come_late, 2)[0]


def sum_unequal_vectors(vectors: list) -> str:
    collectives.init_process_group("gloo")
    with pytest.raises(todist.UserError) as error:
        collectives.all_reduce(vectors[todist.get_rank()], check=False)
    refuse_another_sum()
    collectives.destroy_process_group()
    collectives.init_process_group("gloo")
    assert collectives.all_reduce(1) == 2
    return str(error.value)


@pytest.mark.parametrize(
    "vectors",
    [
        [torch.zeros(5), torch.zeros(6)],
        [torch.zeros(0), torch.zeros(1)],
        [torch.zeros(2**20), torch.zeros(0)],
        [torch.zeros(2), torch.zeros(1, dtype=torch.float64)],
        [1, 1.0],
    ],
)
def test_different_vectors_are_an_error_on_all_ranks(vectors):
    for message in run_world(sum_unequal_vectors, 2, vectors):
        assert message.startswith("the ranks add up tensors of different sizes or dtypes")


class Alarm(Exception):
    """Raised by a signal."""


def interrupt_a_sum(directory: Path) -> bool:
    def handle(number, frame):
        raise Alarm

    collectives.init_process_group("gloo")
    if todist.get_rank() == 1:
        while not (directory / "interrupted").exists():
            time.sleep(0.05)
        return True
    signal.signal(signal.SIGALRM, handle)
    signal.alarm(1)
    with pytest.raises(Alarm):
        collectives.all_reduce(1.0)
    refuse_another_sum()
    (directory / "interrupted").touch()
    return True


def test_a_waiting_rank_handles_signals(tmp_path):
    assert run_world(interrupt_a_sum, 2, tmp_path) == [True, True]
