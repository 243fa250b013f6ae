"""Tasks per second of metadist and of a plain loop over the tasks on one device; see `gpu.py`."""

import argparse
import contextlib
import gc
import logging
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from benchmarks.problem import loss, network
from torch import Tensor
from torch.func import functional_call

from metadist.algorithms import MAML, Learner
from metadist.distributed.worker_local import WorkerLocal
from metadist.errors import first_line
from metadist.models import Conv4
from metadist.tasks import Episode, Examples, task_keys
from metadist.training import MetaBatch, Precision, TrainMapper, supported_precision
from metadist.training.batching import input_elements, max_chunk_size
from metadist.training.outer_step import CompileOptions

WAYS = 5
INNER_LR = 0.4
COMPILED_CHUNK = 8
"""Tasks of a compiled chunk where tasks are so large that they are not batched by default."""
DISTINCT_TASKS = 32
REPEATS = 5
CELL_SECONDS = 6.0
"""After this time a cell is not repeated any more."""
PRECISIONS: tuple[Precision, ...] = ("float32", "tf32", "bf16")


class Problem(NamedTuple):
    """5-way 1-shot tasks of random images, and conv4 for them."""

    name: str
    size: int
    filters: int
    pooling: str
    queries: int

    def learner(self, device: torch.device) -> Learner:
        """MAML with one second-order inner step, in training mode."""
        torch.manual_seed(0)
        model = Conv4((1, self.size, self.size), WAYS, self.filters, self.pooling)
        return MAML(model, inner_lr=INNER_LR).to(device).train()


PROBLEMS = (
    Problem("stride, 1 query", 28, 64, "stride", 1),
    Problem("max-pool, 15 queries", 28, 64, "max", 15),
    Problem("84x84, 32 filters, 15 queries", 84, 32, "max", 15),
)
SMALL = (Problem("max-pool, 2 queries", 16, 4, "max", 2),)


class Cell(NamedTuple):
    """One measurement: "loop", "eager" or "compiled"."""

    problem: Problem
    mode: str
    precision: Precision
    tasks: int


class RandomTasks:
    """A task distribution of random images, which are on the device already."""

    def __init__(self, problem: Problem, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def examples(each: int) -> Examples:
            count = WAYS * each
            images = torch.randn(
                (count, 1, problem.size, problem.size), generator=generator, dtype=dtype
            )
            return Examples(images.to(device), (torch.arange(count) // each).to(device))

        self.episodes = [
            Episode(examples(1), examples(problem.queries)) for _ in range(DISTINCT_TASKS)
        ]

    def sample(self, key: Tensor) -> Episode:
        """One of `DISTINCT_TASKS` tasks, by the key's index."""
        return self.episodes[int(key[3]) % DISTINCT_TASKS]


class OutOfTime(BaseException):
    """The time of the benchmark is over; no `except Exception` handles it."""


@contextlib.contextmanager
def until(deadline: float) -> Iterator[None]:
    """Raise `OutOfTime` in the block at `deadline`, of `time.perf_counter`; in the main thread."""

    def stop(*_: object) -> None:
        raise OutOfTime

    left = deadline - time.perf_counter()
    if left <= 0:
        raise OutOfTime
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, left)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def loop_step(problem: Problem, tasks: RandomTasks, count: int) -> Callable[[], None]:
    """MAML as a plain loop over the tasks, in float32."""
    device = tasks.episodes[0].query.inputs.device
    options = argparse.Namespace(
        model=problem.pooling, filters=problem.filters, size=problem.size, ways=WAYS
    )
    model = network(options).to(device)
    names = [name for name, _ in model.named_parameters()]

    def step() -> None:
        model.zero_grad()
        for index in range(count):
            support, query = tasks.episodes[index % DISTINCT_TASKS]
            initial = dict(model.named_parameters())
            value = loss(functional_call(model, initial, (support.inputs,)), support.targets)
            gradients = torch.autograd.grad(value, list(initial.values()), create_graph=True)
            adapted = {
                name: initial[name] - INNER_LR * gradient
                for name, gradient in zip(names, gradients, strict=True)
            }
            predictions = functional_call(model, adapted, (query.inputs,))
            (loss(predictions, query.targets) / count).backward()

    return step


def metadist_step(
    cell: Cell, tasks: RandomTasks, device: torch.device, smallest: int
) -> Callable[[], None]:
    """What a worker computes in a step: stack the tasks in chunks, and sum up their gradients."""
    if supported_precision(cell.precision, device) != cell.precision:
        raise ValueError(f"{device} has no {cell.precision}")
    learner, size, compiled = cell.problem.learner(device), "auto", None
    if cell.mode == "compiled":
        # One compiled form for all numbers of tasks.
        elements = input_elements(tasks.episodes[0])
        most = max_chunk_size(learner, elements, device, "auto") or COMPILED_CHUNK
        size = min(most, smallest)
        compiled = CompileOptions(cell.problem.name, size)
    mapper = TrainMapper(
        WorkerLocal("speed", tasks), str(device), size, precision=cell.precision, compiled=compiled
    )
    batch = MetaBatch(task_keys(0, "train", 1, range(cell.tasks)))
    inputs = list(learner.parameters())
    return lambda: mapper.weighted_sum([((learner, batch), {})], [1.0], inputs) and None


def measure(cell: Cell, tasks: RandomTasks, device: torch.device, smallest: int) -> dict[str, Any]:
    """Time of the first step and tasks per second of later ones, in the median, and peak memory."""
    if cell.mode == "loop":
        step = loop_step(cell.problem, tasks, cell.tasks)
    else:
        step = metadist_step(cell, tasks, device, smallest)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    with compilation_errors() as errors:
        # The first step and the second, which may still allocate, are the warm-up.
        while len(seconds) < 3 or (len(seconds) < REPEATS + 2 and sum(seconds[1:]) < CELL_SECONDS):
            started = time.perf_counter()
            step()
            synchronize(device)
            seconds.append(time.perf_counter() - started)
            if errors:
                raise RuntimeError(errors[0])
    memory: Any = f"not on {device.type}"
    if device.type == "cuda":
        memory = round(torch.cuda.max_memory_allocated(device) / 2**20)
    return {
        "tasks_per_second": cell.tasks / statistics.median(seconds[2:]),
        "first_step_seconds": seconds[0],
        "peak_mib": memory,
    }


@contextlib.contextmanager
def compilation_errors() -> Iterator[list[str]]:
    """The warnings of steps that could not be compiled and run eagerly instead."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())
    logger = logging.getLogger("metadist.training.outer_step")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)


def speed(
    problems: tuple[Problem, ...], counts: tuple[int, ...], device: torch.device, deadline: float
) -> Iterator[dict[str, Any]]:
    """All cells; those that take long to compile come last.

    Args:
        problems: the tasks.
        counts: tasks of a step.
        device: of tasks and computation.
        deadline: of `until`; cells that it does not reach are rows with that reason.

    Yields:
        Problem, mode, precision, tasks, and what `measure` returns with the ratio to the loop, or
        the reason.
    """
    cells = [Cell(p, "loop", "float32", n) for p in problems for n in counts]
    cells += [Cell(p, "eager", each, n) for p in problems for each in PRECISIONS for n in counts]
    cells += [Cell(p, "compiled", each, n) for each in PRECISIONS for p in problems for n in counts]
    loops: dict[tuple[str, int], float] = {}
    not_compiled: dict[tuple[str, Precision], str] = {}  # forms, which are tried once
    for cell in cells:
        row = {**cell._asdict(), "problem": cell.problem.name}
        form = (cell.problem.name, cell.precision)
        if cell.mode == "compiled" and form in not_compiled:
            yield row | {"reason": not_compiled[form]}
            continue
        try:
            with until(deadline):
                tasks = RandomTasks(cell.problem, device, torch.float32)
                row |= measure(cell, tasks, device, min(counts))
        except OutOfTime:
            row["reason"] = "not run: out of time"
        except torch.OutOfMemoryError:
            row["reason"] = "out of memory"
        except Exception as error:
            row["reason"] = first_line(error)[:160]
            if cell.mode == "compiled":
                not_compiled[form] = row["reason"]
        else:
            key, found = (cell.problem.name, cell.tasks), row["tasks_per_second"]
            if cell.mode == "loop":
                loops[key] = found
            if key in loops:
                row["ratio"] = found / loops[key]
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        yield row
