"""Tasks per second of metadist and of a plain loop over the tasks on one device; see `gpu.py`."""

import argparse
import contextlib
import gc
import itertools
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
from metadist.distributed.worker_local import WorkerLocal, delete_worker_local
from metadist.errors import first_line
from metadist.models import Conv4
from metadist.tasks import Episode, Examples, task_keys
from metadist.training import MetaBatch, Precision, TrainMapper, supported_precision
from metadist.training.batching import ChunkSize, input_elements, max_chunk_size
from metadist.training.compiled_steps import CompiledSteps
from metadist.training.gpu_memory import gpu_chunk_size

WAYS = 5
INNER_LR = 0.4
DISTINCT_TASKS = 32
REPEATS = 5
CELL_SECONDS = 6.0
"""The repetitions of a cell end after this time."""
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
    """One measurement: "loop", "eager" or "captured"."""

    problem: Problem
    mode: str
    precision: Precision
    tasks: int


class RandomTasks:
    """A task distribution of random images that are already on the device."""

    def __init__(self, problem: Problem, device: torch.device, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def examples(per_class: int) -> Examples:
            count = WAYS * per_class
            images = torch.randn(
                (count, 1, problem.size, problem.size), generator=generator, dtype=dtype
            )
            return Examples(images.to(device), (torch.arange(count) // per_class).to(device))

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
    """Raise `OutOfTime` in the block at a `time.perf_counter` deadline. Main thread only."""

    def stop(*_: object) -> None:
        raise OutOfTime

    remaining = deadline - time.perf_counter()
    if remaining <= 0:
        raise OutOfTime
    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, remaining)
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
    """MAML as a plain loop over the tasks, with PyTorch's defaults."""
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


def metadist_step(cell: Cell, tasks: RandomTasks, device: torch.device) -> Callable[[], None]:
    """A worker's computation in a step: stack the tasks in chunks, and sum up their gradients."""
    if supported_precision(cell.precision, device) != cell.precision:
        raise ValueError(f"{device} has no {cell.precision}")
    learner, steps = cell.problem.learner(device), None
    size: ChunkSize = "auto"
    if device.type == "cuda":
        size = gpu_chunk_size(learner, tasks, device, cell.precision)
    if cell.mode == "captured":
        elements = input_elements(tasks.episodes[0])
        size = min(max_chunk_size(learner, elements, device, size), cell.tasks)
        steps = CompiledSteps(size, captures=True)
    mapper = TrainMapper(
        WorkerLocal("speed", tasks),
        str(device),
        size,
        precision=cell.precision,
        compiled=None if steps is None else WorkerLocal("captured", steps),
    )
    batch = MetaBatch(task_keys(0, "train", 1, range(cell.tasks)))
    inputs = list(learner.parameters())

    def step() -> None:
        mapper.weighted_sum([((learner, batch), {})], [1.0], inputs)
        if steps is not None and steps.errors:
            raise RuntimeError(f"it cannot be captured ({steps.errors.pop()})")

    return step


def measure(cell: Cell, tasks: RandomTasks, device: torch.device) -> dict[str, Any]:
    """Measure the first step's time, the later steps' median tasks per second, and peak memory."""
    if cell.mode == "captured" and device.type != "cuda":
        raise ValueError(f"no CUDA graphs on {device.type}")
    if cell.mode == "loop":
        step = loop_step(cell.problem, tasks, cell.tasks)
    else:
        step = metadist_step(cell, tasks, device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds: list[float] = []
    # The first two steps are the warm-up: the second one may still allocate.
    while len(seconds) < 3 or (len(seconds) < REPEATS + 2 and sum(seconds[1:]) < CELL_SECONDS):
        started = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    memory: Any = f"not on {device.type}"
    if device.type == "cuda":
        memory = round(torch.cuda.max_memory_allocated(device) / 2**20)
    return {
        "tasks_per_second": cell.tasks / statistics.median(seconds[2:]),
        "first_step_seconds": seconds[0],
        "peak_mib": memory,
    }


def speed(
    problems: tuple[Problem, ...], counts: tuple[int, ...], device: torch.device, deadline: float
) -> Iterator[dict[str, Any]]:
    """Measure all cells.

    Args:
        problems: the problems.
        counts: the numbers of tasks in a step.
        device: the device of the tasks and the computation.
        deadline: the deadline, see `until`; cells after it are rows with a reason.

    Yields:
        A row per cell: problem, mode, precision, tasks, and either the result of `measure` with the
        ratio to the loop, or the reason why there is none.
    """
    cells = [Cell(problem, "loop", "float32", count) for problem in problems for count in counts]
    cells += [
        Cell(problem, mode, precision, count)
        for mode, problem, precision, count in itertools.product(
            ("eager", "captured"), problems, PRECISIONS, counts
        )
    ]
    loops: dict[tuple[str, int], float] = {}
    for cell in cells:
        row = {**cell._asdict(), "problem": cell.problem.name}
        try:
            with until(deadline):
                tasks = RandomTasks(cell.problem, device, torch.float32)
                row |= measure(cell, tasks, device)
        except OutOfTime:
            row["reason"] = "not run: out of time"
        except torch.OutOfMemoryError:
            row["reason"] = "out of memory"
        except Exception as error:
            row["reason"] = first_line(error)[:160]
        else:
            key, tasks_per_second = (cell.problem.name, cell.tasks), row["tasks_per_second"]
            if cell.mode == "loop":
                loops[key] = tasks_per_second
            if key in loops:
                row["ratio"] = tasks_per_second / loops[key]
        delete_worker_local("captured")
        if device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
        yield row
