"""`trainer.profile=true`: torch.profiler over a few outer steps, on every rank.

A rank writes a Chrome trace and the table of the ranges that metadist names
(`metadist::forward`, …) into `profile/` of the run's directory.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile, schedule

from metadist.distributed import get_rank
from metadist.files import wrap_write_errors
from metadist.profile_ranges import PREFIX

WAIT, WARMUP, ACTIVE = 2, 1, 3
"""Outer steps that are skipped, run without being counted, and recorded."""

PROFILED_STEPS = WAIT + WARMUP + ACTIVE
"""Number of outer steps that a profile takes."""

_worker: profile | None = None
_worker_lock = threading.Lock()


def start_profiler() -> profile:
    """Start a profiler of this process. Its `step()` must be called after each outer step."""
    kinds = [ProfilerActivity.CPU]
    kinds += [ProfilerActivity.CUDA] if torch.cuda.is_initialized() else []
    profiler = profile(
        activities=kinds,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        # RPC requests run on other threads than the training loop.
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )
    profiler.start()
    return profiler


def write_profile(profiler: profile, directory: Path) -> str:
    """Stop a profiler, write `rankN.trace.json.gz` and `rankN.txt`, and return the table.

    If training ended before the profile was complete, nothing is written, and the returned text
    says so.

    Raises:
        UserError: the files cannot be written.
    """
    profiler.stop()
    if profiler.step_num < PROFILED_STEPS:
        return (
            f"rank {get_rank()}: no profile, because training ended after {profiler.step_num} steps"
        )
    table = profile_table(profiler)
    with wrap_write_errors(directory, "set trainer.profile=false"):
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"rank{get_rank()}"
        profiler.export_chrome_trace(f"{path}.trace.json.gz")
        path.with_suffix(".txt").write_text(table + "\n", encoding="utf-8")
    return table


def prepare_profiler() -> None:
    """Initialize torch's profiler in the main thread, as it requires. Every rank calls it."""
    global _worker
    _worker = None
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU]):
        pass


@contextlib.contextmanager
def profiled_request(enabled: bool) -> Iterator[None]:
    """Count a training request as a step of the profile, on a worker without a training loop."""
    global _worker
    if not enabled or get_rank() == 0:
        yield
        return
    with _worker_lock:
        if _worker is None:
            _worker = start_profiler()
    yield
    with _worker_lock:
        _worker.step()


def write_worker_profile(directory: Path) -> None:
    """Write the profile of a worker without a training loop, if it recorded one."""
    global _worker
    if _worker is not None:
        write_profile(_worker, directory)
        _worker = None


def profile_table(finished: profile) -> str:
    """A table of the milliseconds per step of each named range, longest first.

    Ranges are nested: `metadist::train_step` is the whole step.
    """
    ranges = [event for event in finished.key_averages() if event.key.startswith(PREFIX)]
    rows = [
        (event.key.removeprefix(PREFIX), event.cpu_time_total / 1000 / ACTIVE) for event in ranges
    ]
    rows.sort(key=lambda row: -row[1])
    lines = [f"{'range':<16}{'ms a step':>12}", *(f"{n:<16}{ms:>12.2f}" for n, ms in rows)]
    return "\n".join([f"rank {get_rank()}, mean of {ACTIVE} steps", *lines])
