"""`trainer.profile=true`: torch.profiler over a few outer steps, on every rank.

A rank writes a Chrome trace and the table of the ranges that metadist names
(`metadist::forward`, …) into `profile/` of the run's directory.
"""

import threading
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from metadist.distributed import get_rank
from metadist.errors import UserError

WAIT, WARMUP, ACTIVE = 2, 1, 3
"""Outer steps that are skipped, run without being counted, and recorded."""

PROFILE_DIRECTORY = "profile"
PREFIX = "metadist::"

_worker: profile | None = None
_worker_lock = threading.Lock()


def start_profiler(directory: Path) -> profile:
    """A started profiler of this process. Its `step()` follows each outer step.

    After `WAIT + WARMUP + ACTIVE` steps it writes `rankN.trace.json.gz` and `rankN.txt`.

    Args:
        directory: where to write.
    """

    def write(finished: profile) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"rank{get_rank()}"
            finished.export_chrome_trace(f"{path}.trace.json.gz")
            path.with_suffix(".txt").write_text(profile_table(finished) + "\n", encoding="utf-8")
        except OSError as error:
            raise UserError(
                f"{directory} could not be written ({error.strerror}): free some space, or set "
                "trainer.profile=false."
            ) from None

    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
    profiler = profile(
        activities=kinds,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        on_trace_ready=write,
        # RPC requests run on other threads than the training loop.
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    profiler.start()
    return profiler


def profile_worker_step(directory: str) -> None:
    """Count a request of training as a step, on a worker that runs no training loop."""
    global _worker
    if get_rank() == 0:
        return
    with _worker_lock:
        if _worker is None:
            _worker = start_profiler(Path(directory))
        else:
            _worker.step()


def profile_table(finished: profile) -> str:
    """Milliseconds a step of each named range, longest first.

    Ranges contain each other: `metadist::train_step` is the whole step.
    """
    ranges = [event for event in finished.key_averages() if event.key.startswith(PREFIX)]
    rows = [(event.key.removeprefix(PREFIX), event.cpu_time_total / 1000 / ACTIVE) for event in ranges]
    rows.sort(key=lambda row: -row[1])
    lines = [f"{'range':<16}{'ms a step':>12}", *(f"{n:<16}{ms:>12.2f}" for n, ms in rows)]
    return "\n".join([f"rank {get_rank()}, mean of {ACTIVE} steps", *lines])
