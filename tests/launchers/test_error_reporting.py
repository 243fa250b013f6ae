"""The first error is reported once, by the failing rank, and all ranks exit."""

import contextlib
import errno
import io
import logging
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import CommandResult, command, run_command, specification
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError
from tiny import SMALL
from worlds import run_world

from metadist.config.resolvers import register_resolver
from metadist.distributed import WorkerLostError
from metadist.errors import UserError
from metadist.launchers import error_reporting
from metadist.launchers.error_reporting import (
    RemoteRankFailed,
    WorkerGroupFailed,
    error_summary,
    exit_process,
    report_error_and_continue,
)
from metadist.launchers.job import report_errors

HOST = os.uname().nodename


def outcomes(directory, *overrides: str, size: int = 2) -> list:
    file = specification(directory, *SMALL, *overrides)
    return run_command("worker", file, size=size, may_fail=True)


def broken(directory, strategy: str, where: str, rank: int, *overrides: str) -> list:
    return outcomes(
        directory,
        f"strategy={strategy}",
        "~algorithm",
        "+algorithm._target_=broken_parts.BrokenMAML",
        f"+algorithm.where={where}",
        f"+algorithm.rank={rank}",
        *overrides,
    )


@pytest.mark.parametrize(
    ("strategy", "where", "rank"),
    [
        ("rpc", "start", 1),
        ("rpc", "task", 1),
        ("allreduce", "task", 0),
        *[
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("rpc", "task", 0), ("allreduce", "start", 1), ("allreduce", "task", 1))
        ],
    ],
)
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


@pytest.mark.parametrize("strategy", ["rpc", pytest.param("allreduce", marks=pytest.mark.slow)])
def test_a_rank_that_exits_silently_is_named(tmp_path, strategy):
    zero, one = broken(tmp_path, strategy, "exit", 1)
    assert isinstance(one, ProcessLookupError)
    assert zero.status == 1 and zero.err.count("error: ") == 1
    assert f"rank 1 on {HOST}" in zero.err and "was lost" in zero.err


@pytest.mark.parametrize(
    ("strategy", "rank"),
    [
        ("rpc", 1),
        pytest.param("allreduce", 0, marks=pytest.mark.slow),
        pytest.param("rpc", 0, marks=pytest.mark.slow),
        pytest.param("allreduce", 1, marks=pytest.mark.slow),
    ],
)
def test_sys_exit_in_a_task_is_an_error(tmp_path, strategy, rank):
    ranks = broken(tmp_path, strategy, "sys.exit", rank)
    assert all(outcome.status == 1 for outcome in ranks), ranks
    printed = "".join(outcome.err for outcome in ranks)
    assert printed.count("error: ") == 1 and "in forward" in printed, printed
    assert f"rank {rank} on {HOST}" in printed
    assert ("SystemExit: 0" if strategy == "rpc" else "sys.exit(0) was called") in printed


@pytest.mark.parametrize(
    ("strategy", "slow"),
    [
        ("rpc", "strategy._target_=broken_parts.SlowToCloseRpc"),
        pytest.param(
            "allreduce",
            "strategy._target_=broken_parts.SlowToCloseAllReduce",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "allreduce",
            "+logger.slow._target_=broken_parts.SlowToCloseLogger",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_error_is_reported_although_closing_takes_long(tmp_path, strategy, slow):
    start = time.monotonic()
    ranks = broken(tmp_path, strategy, "task", 0, slow)
    assert time.monotonic() - start < 40  # closing takes 60 s
    assert ranks[0].status == 1, ranks
    printed = "".join(outcome.err for outcome in ranks if hasattr(outcome, "err"))
    assert printed.count("error: ") == 1 and "LookupError: a mistake on purpose" in printed, printed


def test_a_programming_error_in_a_collective_is_not_a_lost_worker(tmp_path):
    target = "strategy._target_=broken_parts.GroupForGpus"
    ranks = outcomes(tmp_path, "strategy=allreduce", target)
    assert all(outcome.status == 1 for outcome in ranks), ranks
    printed = "".join(outcome.err for outcome in ranks)
    assert printed.count("error: ") == 1 and "lost" not in printed, printed
    assert printed.count("RuntimeError: No backend type associated with device type cpu") == 1


def start_late(seconds: float, file: str) -> CommandResult:
    if os.environ["RANK"] == "1":
        time.sleep(seconds)
    return command("worker", (file,))


def test_ranks_may_start_further_apart_than_the_timeout_of_lost_ranks(tmp_path):
    options = (*SMALL, "strategy=allreduce", "trainer.iterations=1", "timeout_seconds=4")
    ranks = run_world(start_late, 2, 6.0, specification(tmp_path, *options))
    assert [rank.status for rank in ranks] == [0, 0], ranks


def without_rank_one(overrides: tuple[str, ...]) -> CommandResult | None:
    return None if os.environ["RANK"] == "1" else command("maml.py", overrides)


def test_a_rank_that_is_missing_at_the_rendezvous_is_named_in_time(tmp_path):
    options = ("rendezvous_timeout_seconds=2", f"hydra.run.dir={tmp_path}", *SMALL)
    zero, _ = run_world(without_rank_one, 2, options)
    assert zero.status == 1 and zero.err.count("error: ") == 1
    assert "ranks [1] (world size 2) did not arrive within 2 s" in zero.err


def with_directory_on_rank_zero(directory: str) -> CommandResult:
    given = (f"hydra.run.dir={directory}",) if os.environ["RANK"] == "0" else ()
    return command("maml.py", (*SMALL, *given))


def test_a_directory_that_one_command_does_not_give_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "run"
    zero, one = run_world(with_directory_on_rank_zero, 2, str(run), timeout=60.0)
    assert (zero.status, one.status) == (2, 2), (zero, one)
    refused = r"error: hydra\.run\.dir is 2\S* on rank 1 and run on rank 0: start all nodes .*\n"
    assert re.fullmatch(refused, zero.err)
    assert one.err == "" and not run.exists()


def abort_with_a_full_pipe() -> int:
    """The exit status of a process whose standard error is a pipe that nobody reads."""
    _reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    child = os.fork()
    if child == 0:
        os.dup2(writer, 2)
        error_reporting.END_SECONDS = 1.0
        error_reporting.abort_process("rank 1 was lost")
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_process_ends_although_nobody_reads_its_error():
    assert run_world(abort_with_a_full_pipe, 1, timeout=60) == [1]


def test_a_worker_stuck_in_a_task_is_not_waited_for_after_an_error(tmp_path):
    ranks = broken(tmp_path, "rpc", "'hang and fail elsewhere'", 1)
    assert not any(isinstance(outcome, TimeoutError) for outcome in ranks)
    printed = "".join(outcome.err for outcome in ranks if hasattr(outcome, "err"))
    assert printed.count("error: ") == 1 and f"rank 0 on {HOST}" in printed


@pytest.mark.parametrize(
    "value", ["0", "many", *(pytest.param(each, marks=pytest.mark.slow) for each in ("-1", "true"))]
)
def test_a_timeout_that_is_none_is_refused(tmp_path, value):
    zero, one = outcomes(tmp_path, f"timeout_seconds={value}")
    assert (zero.status, one.status) == (2, 2) and one.err == ""
    assert zero.err.startswith(
        f"error: timeout_seconds={value.title() if value == 'true' else value}"
    )


@pytest.mark.parametrize(
    ("error", "in_job", "text", "status"),
    [
        (WorkerGroupFailed(7), False, "its processes ended with status 7", 7),
        (RemoteRankFailed("rank 1 failed"), True, "rank 1 failed", 1),
        (UserError("too many ways"), True, "too many ways", 2),
        (OSError(28, "No space left", "/a"), False, "No space left (/a): choose another dire", 2),
        (OSError(28, "No space left", "/a"), True, "OSError: [Errno 28] No space left: '/a'", 1),
        (WorkerLostError("rank 1 was lost"), False, "WorkerLostError: rank 1 was lost", 1),
        (ValueError("on\n  purpose" + 999 * "!"), True, "ValueError: on purpose!!!", 1),
    ],
)
def test_an_error_in_one_line_and_its_exit_status(error, in_job, text, status):
    message, found = error_summary(error, in_job)
    assert found == status and message.startswith(text)
    assert "\n" not in message and len(message) <= 500


def raised_outside_of_a_job(make: Callable[[], Exception]) -> tuple[int, str]:
    """The exit status and standard error of a process in which an error is raised."""
    with contextlib.redirect_stderr(io.StringIO()) as printed, report_errors() as status:
        raise make()
    return status.value, printed.getvalue()


def user_error() -> Exception:
    return UserError("too many ways")


def of_a_resolver() -> Exception:
    def lose() -> None:
        raise WorkerLostError("rank zero did not answer")

    register_resolver("lose", lose, replace=True)
    with pytest.raises(InterpolationResolutionError) as raised:
        OmegaConf.select(OmegaConf.create({"run": {"dir": "outputs/${lose:}"}}), "run.dir")
    return raised.value


@pytest.mark.parametrize("tracebacks", ["0", "1"])
def test_a_user_error_has_a_traceback_only_if_asked_for(tracebacks):
    environment = {"HYDRA_FULL_ERROR": tracebacks}
    found = run_world(raised_outside_of_a_job, 1, user_error, environment=environment)
    ((status, printed),) = found
    assert status == 2 and printed.endswith("error: too many ways\n")
    assert ("Traceback (most recent call last)" in printed) == (tracebacks == "1")


def test_a_lost_worker_is_reported_as_such_when_a_resolver_found_it():
    message = f"error: rank 0 on {HOST}: rank zero did not answer\n"
    assert run_world(raised_outside_of_a_job, 1, of_a_resolver) == [(1, message)]


def handlers_after_an_error() -> list:
    with contextlib.redirect_stderr(io.StringIO()), report_errors() as status:
        raise UserError("too many ways")
    with pytest.raises(SystemExit):
        exit_process(status.value, is_program=False)
    return [str(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM)]


def test_a_program_that_goes_on_after_an_error_can_be_interrupted():
    expected = [str(signal.default_int_handler), str(signal.SIG_DFL)]
    assert run_world(handlers_after_an_error, 1) == [expected]


def interrupted(number: int) -> tuple[int, str, bool]:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with report_errors():
        pass
    restored = (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before
    with contextlib.redirect_stderr(io.StringIO()) as printed, report_errors() as status:
        os.kill(os.getpid(), number)
        time.sleep(30)
    return status.value, printed.getvalue(), restored


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_outside_of_training_is_one_sentence(number):
    ((status, printed, restored),) = run_world(interrupted, 1, number)
    assert status == 128 + number and restored
    assert printed == "stopped outside of training: nothing new to save\n"


def interrupted_in_a_resolver(number: int) -> tuple[int, str]:
    """OmegaConf converts what a resolver raises, as Hydra does while it composes."""
    register_resolver("stop", lambda: os.kill(os.getpid(), number))
    with contextlib.redirect_stderr(io.StringIO()) as printed, report_errors() as status:
        print(OmegaConf.create({"seed": "${stop:}"}).seed)
    return status.value, printed.getvalue()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_a_value_is_resolved_is_no_error_of_the_value(number):
    ((status, printed),) = run_world(interrupted_in_a_resolver, 1, number)
    assert status == 128 + number
    assert printed == "stopped outside of training: nothing new to save\n"


def two_errors_of_a_sweep() -> tuple[str, bool]:
    """What is printed of two failed jobs, and whether signals are handled as before."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with contextlib.redirect_stderr(io.StringIO()) as printed:
        for number in range(2):
            error = UserError(f"error {number}")
            report_error_and_continue(error, False, f"job {number} failed; going on", "")
    return printed.getvalue(), signal.getsignal(signal.SIGTERM) is signal.default_int_handler


def test_after_an_error_of_a_sweep_signals_are_handled_as_before():
    ((printed, restored),) = run_world(two_errors_of_a_sweep, 1)
    assert restored and printed.splitlines() == [
        "error: error 0",
        "job 0 failed; going on",
        "error: error 1",
        "job 1 failed; going on",
    ]


def test_a_program_that_goes_on_after_an_error_is_not_ended():
    threads = threading.enumerate()
    with pytest.raises(SystemExit) as caught:
        exit_process(2, is_program=False)
    assert caught.value.code == 2
    assert threading.enumerate() == threads  # no timer
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def with_variables(variables: dict[str, str], arguments: tuple[str, ...]) -> CommandResult:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    os.environ.update(variables)
    return command("maml.py", arguments)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0"}, "error: RANK and WORLD_SIZE must both be set to integers"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "error: RANK=2 of WORLD_SIZE=2 "),
    ],
)
def test_wrong_variables_of_torchrun_are_one_sentence(tmp_path, variables, expected):
    directory = tmp_path / "run"
    arguments = (*SMALL, f"hydra.run.dir={directory}")
    (found,) = run_world(with_variables, 1, variables, arguments)
    assert found.status == 2 and found.err.startswith(expected), found
    assert found.err.count("\n") == 1 and not directory.exists()


def logs() -> bool:
    logging.getLogger().setLevel(logging.INFO)
    with report_errors():
        return logging.getLogger("metadist").isEnabledFor(logging.INFO)


def test_rank_zero_alone_logs():
    assert run_world(logs, 2) == [True, False]


def test_a_file_for_torchrun_that_cannot_be_written_is_deleted(tmp_path, monkeypatch):
    file = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(file))

    def write_half(path: Path, text: str, **_: object) -> None:
        path.write_bytes(text.encode()[:7])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", write_half)
    error_reporting.print_error("error: on purpose")
    assert not file.exists()
