"""The problem that every baseline solves: tasks, model and measurement.

A baseline is a script with the arguments of `parse_arguments`; its rank zero prints a line of JSON.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from metadist.tasks import FewShotTasks, Glyphs, Sinusoid

OUTER_LR = 1e-3


def parse_arguments() -> argparse.Namespace:
    """The command line of a baseline."""
    parser = argparse.ArgumentParser()
    for name, default in (("tasks", 32), ("shots", 1), ("queries", 1), ("inner-steps", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", choices=("stride", "max", "mlp"), default="stride")
    for name, default in (("ways", 5), ("size", 28), ("filters", 64)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--steps-per-call", type=int, default=1, help="read by jax_maml.py")
    parser.add_argument("--warm-up", type=int, default=3)
    return parser.parse_args()


def few_shot_tasks(options: argparse.Namespace) -> FewShotTasks:
    """Tasks of glyphs, or of sine waves for an MLP: the same tasks as in metadist."""
    if options.model == "mlp":
        return FewShotTasks(Sinusoid(), 1, options.shots, options.queries)
    return FewShotTasks(Glyphs(size=options.size), options.ways, options.shots, options.queries)


def inner_lr(options: argparse.Namespace) -> float:
    """The inner learning rate."""
    return 0.01 if options.model == "mlp" else 0.4


def loss(predictions: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy for classes, squared error for numbers."""
    if targets.is_floating_point():
        return F.mse_loss(predictions, targets)
    return F.cross_entropy(predictions, targets)


def network(options: argparse.Namespace) -> nn.Sequential:
    """Four convolutional blocks with batch statistics, or an MLP of 40 and 40 units."""
    if options.model == "mlp":
        return nn.Sequential(
            nn.Linear(1, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 1)
        )
    stride, filters, layers = options.model == "stride", options.filters, []
    for channels in (1, filters, filters, filters):
        layers += [
            nn.Conv2d(channels, filters, 3, stride=2 if stride else 1, padding=1),
            nn.BatchNorm2d(filters, track_running_stats=False),
            nn.ReLU(),
            *([] if stride else [nn.MaxPool2d(2)]),
        ]
    pixels = 1 if stride else (options.size // 16) ** 2
    layers += [nn.AdaptiveAvgPool2d(1)] if stride else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(filters * pixels, options.ways))


def measure(options: argparse.Namespace, step: Callable[[int], float]) -> str:
    """Time the steps after a warm-up.

    Args:
        options: the options of the command line.
        step: a function that runs outer step n, counted from 0, to completion and returns its loss.

    Returns:
        JSON with tasks per second and the last step's loss, equal for all PyTorch baselines.
    """
    started = loss = 0.0
    for iteration in range(options.warm_up + options.iterations):
        if iteration == options.warm_up:
            started = time.perf_counter()
        loss = step(iteration)
    seconds = time.perf_counter() - started
    return json.dumps(
        {"tasks_per_second": options.tasks * options.iterations / seconds, "loss": loss}
    )
