"""The problem that every rival solves: the same tasks, the same model, measured in the same way.

A rival is a script that takes the words of `words`, and whose rank zero prints a line of JSON.
"""

import argparse
import json
import time
from collections.abc import Callable

from torch import nn

from metadist.tasks import FewShotTasks, Glyphs

INNER_LR = 0.4
OUTER_LR = 1e-3


def words() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser()
    for name, default in (("tasks", 32), ("shots", 1), ("queries", 1), ("inner-steps", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--pooling", choices=("stride", "max"), default="stride")
    parser.add_argument("--iterations", type=int, default=30)
    parser.add_argument("--warm-up", type=int, default=3)
    return parser.parse_args()


def few_shot(asked: argparse.Namespace) -> FewShotTasks:
    """The tasks that metadist draws, too: 5-way tasks of glyphs."""
    return FewShotTasks(Glyphs(), 5, asked.shots, asked.queries)


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


def measure(asked: argparse.Namespace, step: Callable[[int], float]) -> str:
    """Take the steps, behind a warm-up.

    Args:
        asked: how many.
        step: takes outer step number n, from 0, and returns once it is done: the loss there.

    Returns:
        JSON: tasks a second, and the last step's loss, by which rivals are seen to do the same.
    """
    started = loss = 0.0
    for iteration in range(asked.warm_up + asked.iterations):
        if iteration == asked.warm_up:
            started = time.perf_counter()
        loss = step(iteration)
    seconds = time.perf_counter() - started
    return json.dumps({"tasks_per_second": asked.tasks * asked.iterations / seconds, "loss": loss})
