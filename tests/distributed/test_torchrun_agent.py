"""Exit status and message of a failed torchrun."""

import os

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from worlds import run_world

from metadist.distributed.torchrun_agent import main, status_of, unreported_kill


def failed(*codes: int) -> ChildFailedError:
    """Workers that ended one after the other, rank 1 first."""
    failures = {
        (index + 1) % len(codes): ProcessFailure(0, 1, code, "no file")
        for index, code in enumerate(codes)
    }
    return ChildFailedError("script", failures)


@pytest.mark.parametrize(
    ("codes", "status", "message"),
    [
        ((-9, 143), 1, "rank 1 was killed by SIGKILL"),  # the agent stopped the other one
        ((-9, -15), 1, "rank 1 was killed by SIGKILL"),
        ((-6,), 1, "rank 0 was killed by SIGABRT"),
        ((-9, 1), 1, ""),  # who found it lost has said so
        ((143, 143), 143, ""),
        ((130, 130), 130, ""),
        ((1, 143), 1, ""),
        ((1, 2), 2, ""),
        ((2, 1), 2, ""),
        ((2, 143), 2, ""),
        ((7,), 1, ""),
    ],
)
def test_the_first_to_end_says_what_it_was(codes, status, message):
    assert (status_of(failed(*codes)), unreported_kill(failed(*codes))) == (status, message)


SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as a worker does that has not begun
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(60)
"""


def run_agent(script: str, errors: str) -> int:
    """Run the agent in this process, with an open pipe as standard input; its exit status."""
    os.dup2(os.pipe()[0], 0)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT), 2)
    return main(["--standalone", "--nproc-per-node=2", script])


def test_a_worker_killed_before_training_is_named_and_is_no_stop(tmp_path):
    script, errors = tmp_path / "script.py", tmp_path / "errors"
    script.write_text(SCRIPT)
    assert run_world(run_agent, 1, str(script), str(errors)) == [1]
    assert errors.read_text() == "error: rank 1 was killed by SIGKILL\n"
