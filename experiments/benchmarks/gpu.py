"""Correctness and speed on one GPU, within --minutes.

python experiments/benchmark.py gpu

parity            float64 loss and gradient of a meta-batch on the GPU against the CPU
tasks             tasks made from images on the GPU against those made on the CPU, bit for bit
synchronizations  how often an outer step of tasks that are on the GPU waits for it
trace             a torch.profiler trace of one step, trace.json
speed             tasks per second by precision, eager and captured as a CUDA graph, relative to a
                  hand-written loop over the tasks with PyTorch's defaults; the first step of a
                  captured cell includes the capture

Images are random. A cell that fails is a row with the reason. The exit status is 1 if a check has
failed. --device cpu --quick runs the same on a CPU with small sizes.
"""

import argparse
import contextlib
import functools
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optree
import torch
from benchmarks.gpu_speed import (
    PROBLEMS,
    SMALL,
    WAYS,
    OutOfTime,
    Problem,
    RandomTasks,
    speed,
    synchronize,
    until,
)
from benchmarks.programs import machine
from benchmarks.results import console, save, table
from torch.profiler import ProfilerActivity, profile

from metadist.algorithms import (
    ANIL,
    IMAML,
    MAML,
    Learner,
    MAMLPlusPlus,
    MetaSGD,
    Prototypical,
    Reptile,
)
from metadist.distributed.worker_local import WorkerLocal
from metadist.errors import UserError, first_line
from metadist.models import Conv4
from metadist.tasks import (
    SPLITS,
    Glyphs,
    Normalize,
    key_generator,
    stack_episodes,
    task_keys,
)
from metadist.training import MetaBatch, TrainMapper, resolve_device
from metadist.training.outer_step import StepArguments, outer_step

TOLERANCE = 1e-8
"""Tolerance of parity: difference relative to the largest element of the gradient, float64."""
ALGORITHMS: dict[str, Callable[[Conv4], Learner]] = {
    "MAML": lambda model: MAML(model, inner_steps=2),
    "FOMAML": lambda model: MAML(model, inner_steps=2, first_order=True),
    "ANIL": lambda model: ANIL(model, inner_steps=2),
    "Meta-SGD": lambda model: MetaSGD(model, inner_steps=2),
    "MAML++": lambda model: MAMLPlusPlus(model, inner_steps=2, first_order_iterations=0),
    # Whole support sets and SGD: minibatches are drawn by the device's own generator, and Adam
    # divides by gradients that are zero up to rounding.
    "Reptile": lambda model: Reptile(model, inner_optimizer="sgd", inner_batch_size=None),
    "iMAML": lambda model: IMAML(model, inner_steps=3),
    "prototypical": lambda model: Prototypical(model),
}
SYNCHRONIZATIONS = {"MAML++": 1, "prototypical": 1}
"""Values that a step reads, by algorithm: the iteration and the number of classes."""


def parity(problem: Problem, device: torch.device) -> Iterator[dict[str, Any]]:
    """Loss and gradient by algorithm, on the device and on the CPU."""
    keys, cpu = task_keys(0, "train", 1, range(8)), torch.device("cpu")
    tasks = WorkerLocal("parity", RandomTasks(problem, cpu, torch.float64))
    for name, algorithm in ALGORITHMS.items():
        row: dict[str, Any] = {"algorithm": name}
        with reported(row):
            results = []
            for target in (cpu, device):
                torch.manual_seed(0)
                model = Conv4((1, problem.size, problem.size), WAYS, 16, problem.pooling)
                learner = algorithm(model).double().to(target).train()
                trained = [p for p in learner.parameters() if p.requires_grad]
                response = TrainMapper(tasks, str(target)).weighted_sum(
                    [((learner, MetaBatch(keys)), {})], [1.0], trained
                )
                by_input = response.gradients.by_input if response.gradients else []
                gradients = [grad.flatten().cpu() for grad in by_input if grad is not None]
                results.append((response.value.loss.cpu(), torch.cat(gradients)))
            (expected_loss, expected), (loss, gradient) = results
            row["loss"] = ((loss - expected_loss) / expected_loss).abs().item()
            row["gradient"] = ((gradient - expected).abs().max() / expected.abs().max()).item()
            passed = row["loss"] <= TOLERANCE and row["gradient"] <= TOLERANCE
            row["result"] = "pass" if passed else "FAIL"
        yield row


def tasks_on_device(device: torch.device) -> Iterator[dict[str, Any]]:
    """Tasks by split, made from images on the device and on the CPU."""
    glyphs = Glyphs(normalize=Normalize([0.4], [0.3]))
    for split in SPLITS:
        row: dict[str, Any] = {"split": split}
        with reported(row):
            keys = task_keys(0, split, 1, range(32))
            episodes = glyphs.episodes(device, map(key_generator, keys), split, 5, 1, 5)
            if episodes is None:
                row["result"] = f"not on {device.type}"
            else:
                on_cpu = [glyphs.episode(key_generator(key), split, 5, 1, 5) for key in keys]
                expected = stack_episodes(on_cpu)
                pairs = zip(optree.tree_leaves(episodes), optree.tree_leaves(expected), strict=True)
                same = all(torch.equal(tensor.cpu(), cpu_tensor) for tensor, cpu_tensor in pairs)
                row["result"] = "pass" if same else "FAIL: other tasks"
        yield row


def synchronizations(problem: Problem, device: torch.device) -> Iterator[dict[str, Any]]:
    """Whether an outer step waits for the device."""
    episodes = stack_episodes(RandomTasks(problem, device, torch.float32).episodes[:8])
    weights = torch.ones(8, dtype=torch.float64, device=device)
    for name, algorithm in ALGORITHMS.items():
        row: dict[str, Any] = {"algorithm": name}
        with reported(row):
            model = Conv4((1, problem.size, problem.size), WAYS, 16, problem.pooling)
            learner = algorithm(model).to(device).train()
            learner.task_seeds = range(8)
            parameters = dict(learner.named_parameters())
            arguments = StepArguments(learner, parameters, episodes, weights)
            outer_step(arguments)  # loads libraries
            if device.type == "cuda":
                found = count_synchronizations(functools.partial(outer_step, arguments), device)
                passed = found <= SYNCHRONIZATIONS.get(name, 0)
                row |= {"number": found, "result": "pass" if passed else "FAIL"}
            else:
                row["result"] = f"not on {device.type}"
        yield row


def count_synchronizations(step: Callable[[], object], device: torch.device) -> int:
    """How often a step waits for the GPU."""
    torch.cuda.synchronize(device)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in found)


@contextlib.contextmanager
def reported(row: dict[str, Any]) -> Iterator[None]:
    """Write an error in the block to the row's result, with the line of metadist that raised it."""
    try:
        yield
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        frames = [frame for frame in frames if "metadist" in Path(frame.filename).parts]
        line = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}: " if frames else ""
        row["result"] = f"FAIL: {line}{type(error).__name__}: {first_line(error)}"[:160]


def write_trace(problem: Problem, device: torch.device, path: Path) -> Iterator[dict[str, Any]]:
    """Profile an eager outer step of 32 tasks."""
    row: dict[str, Any] = {"file": path.name}
    with reported(row):
        learner = problem.learner(device)
        episodes = stack_episodes(RandomTasks(problem, device, torch.float32).episodes)
        weights = torch.ones(len(episodes.query.inputs), dtype=torch.float64, device=device)
        parameters = dict(learner.named_parameters())
        arguments = StepArguments(learner, parameters, episodes, weights)
        outer_step(arguments)
        synchronize(device)
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as profiler:
            outer_step(arguments)
            synchronize(device)
        profiler.export_chrome_trace(str(path))
        row["result"] = "saved"
    yield row


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--device", default="cuda", help="default: cuda; cpu tries the logic")
    parser.add_argument("--minutes", type=float, default=10, help="cells beyond are not run")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))


def run(options: argparse.Namespace) -> None:
    """Run all parts, print tables, and save the results after each row.

    Raises:
        SystemExit: there is no such device, or a check has failed.
    """
    deadline = time.perf_counter() + 60 * options.minutes
    try:
        device = resolve_device(options.device)
    except UserError:
        raise SystemExit(
            f"error: --device {options.device} cannot be used here: this benchmark needs a CUDA "
            "device; --device cpu --quick tries its logic on a CPU."
        ) from None
    problems, counts = (SMALL, (2, 4)) if options.quick else (PROBLEMS, (32, 256))
    options.out.mkdir(parents=True, exist_ok=True)
    parts = {
        "parity": parity(problems[0], device),
        "tasks": tasks_on_device(device),
        "synchronizations": synchronizations(problems[0], device),
        "trace": write_trace(problems[0], device, options.out / "trace.json"),
        "speed": speed(problems, counts, device, deadline),
    }
    gpu = {"GPU": torch.cuda.get_device_name(device)} if device.type == "cuda" else {}
    about = {"machine": {**gpu, **machine()}, "device": str(device)}
    report: dict[str, list[dict[str, Any]]] = {}

    def save_report(show: bool = False) -> None:
        name = gpu.get("GPU", device)
        tables = [table_of(rows, f"{part}, {name}") for part, rows in report.items()]
        save(options.out / "gpu", {**about, **report}, tables, show)

    for part, rows in parts.items():
        report[part] = []
        for row in rows if part == "speed" else timed(rows, deadline):
            report[part].append(row)
            console.print(f"{part}: {', '.join(text(row).values())}")
            save_report()
    save_report(show=True)
    if any(row.get("result", "").startswith("FAIL") for rows in report.values() for row in rows):
        raise SystemExit(1)


def timed(rows: Iterator[dict[str, Any]], deadline: float) -> Iterator[dict[str, Any]]:
    """Yield the rows that are computed before the deadline, and one row for the others."""
    try:
        while True:
            with until(deadline):
                row = next(rows, None)
            if row is None:
                return
            yield row
    except OutOfTime:
        yield {"result": "not run: out of time"}


def text(row: dict[str, Any]) -> dict[str, str]:
    """The values of a row as text, numbers with three significant digits."""
    return {
        name: f"{value:.3g}" if isinstance(value, float) else str(value)
        for name, value in row.items()
    }


def table_of(rows: list[dict[str, Any]], title: str) -> str:
    """A table with one column for each name in any of the rows."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return table(title, names, [[row.get(name, "") for name in names] for row in map(text, rows)])
