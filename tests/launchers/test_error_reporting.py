"""The first error is reported once, by the failing rank, and all ranks exit."""

import os
import time

import pytest
from commands import run_command
from tiny import SMALL

HOST = os.uname().nodename


def outcomes(directory, *overrides: str, size: int = 2) -> list:
    return run_command(
        "maml.py", *SMALL, f"hydra.run.dir={directory}", *overrides, size=size, may_fail=True
    )


def broken(directory, strategy: str, where: str, rank: int) -> list:
    return outcomes(
        directory,
        f"strategy={strategy}",
        "algorithm._target_=broken_parts.BrokenMAML",
        f"+algorithm.where={where}",
        f"+algorithm.rank={rank}",
    )


@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
@pytest.mark.parametrize(("where", "rank"), [("start", 1), ("task", 1), ("task", 0)])
def test_an_exception_is_reported_once_with_rank_host_and_traceback(
    tmp_path, strategy, where, rank
):
    ranks = broken(tmp_path, strategy, where, rank)
    assert all(outcome.status == 1 for outcome in ranks), ranks
    printed = "".join(outcome.err for outcome in ranks)
    assert (
        printed.count("error: ") == 1 and printed.count("Traceback (most recent call last)") == 1
    ), printed
    assert f"rank {rank} on {HOST}" in printed and "LookupError: a mistake on purpose" in printed


@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_a_rank_that_exits_silently_is_named(tmp_path, strategy):
    zero, one = broken(tmp_path, strategy, "exit", 1)
    assert isinstance(one, ProcessLookupError)
    assert zero.status == 1 and zero.err.count("error: ") == 1
    assert f"rank 1 on {HOST}" in zero.err and "was lost" in zero.err


def test_a_worker_stuck_in_a_task_is_not_waited_for_after_an_error(tmp_path):
    start = time.monotonic()
    ranks = broken(tmp_path, "rpc", "'hang and fail elsewhere'", 1)
    assert time.monotonic() - start < 40  # the stuck task would take 60 s
    printed = "".join(outcome.err for outcome in ranks if hasattr(outcome, "err"))
    assert printed.count("error: ") == 1 and f"rank 0 on {HOST}" in printed


@pytest.mark.parametrize("value", ["0", "-1", "many", "true"])
def test_a_timeout_that_is_none_is_refused(tmp_path, value):
    zero, one = outcomes(tmp_path, f"timeout_seconds={value}")
    assert (zero.status, one.status) == (2, 2) and one.err == ""
    assert zero.err.startswith(
        f"error: timeout_seconds={value.title() if value == 'true' else value}"
    )
