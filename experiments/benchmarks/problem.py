"""The problem that every baseline solves: tasks, model and measurement.

A baseline is a script with the arguments of `parse_arguments`; its rank zero prints a line of JSON.
"""

import argparse
import json
import time
from collections.abc import Callable

from torch import nn

from metadist.tasks import FewShotTasks, Glyphs

INNER_LR = 0.4
OUTER_LR = 1e-3


def parse_arguments() -> argparse.Namespace:
    """The command line of a baseline."""
    parser = argparse.ArgumentParser()
    for name, default in (("tasks", 32), ("shots", 1), ("queries", 1), ("inner-steps", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pooling", choices=("stride", "max"), default="stride")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3)
    return parser.parse_args()


def few_shot_tasks(options: argparse.Namespace) -> FewShotTasks:
    """5-way tasks of glyphs, the same as those of metadist."""
    return FewShotTasks(Glyphs(), 5, options.shots, options.queries)


def conv4(pooling: str) -> nn.Sequential:
    """Four blocks of 64 filters on 28×28 images, five classes, batch statistics."""
    layers: list[nn.Module] = []
    for channels in (1, 64, 64, 64):
        layers += [
            nn.Conv2d(channels, 64, 3, stride=2 if pooling == "stride" else 1, padding=1),
            nn.BatchNorm2d(64, track_running_stats=False),
            nn.ReLU(),
        ]
        if pooling == "max":
            layers.append(nn.MaxPool2d(2))
    layers += [nn.AdaptiveAvgPool2d(1)] if pooling == "stride" else []
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64, 5))


def measure(options: argparse.Namespace, step: Callable[[int], float]) -> str:
    """Time the steps after a warm-up.

    Args:
        options: the command line.
        step: runs outer step n, from 0, to completion and returns its loss.

    Returns:
        JSON with tasks per second and the last step's loss, which is equal for all baselines.
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
