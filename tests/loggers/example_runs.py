"""A short run that a logger is given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from metadist.loggers import Logger, Run
from metadist.plots import plot_learning_curves


def example_run(
    directory: Path,
    start_iteration: int = 0,
    configuration: dict[str, Any] | None = None,
    iterations: int = 6,
) -> Run:
    title = "MAML on glyphs"
    return Run(directory, "maml", configuration or {}, iterations, start_iteration, title)


def log_run(
    logger: Logger,
    directory: Path,
    start: int,
    stop: int,
    configuration: dict[str, Any] | None = None,
    finish: bool = False,
    results: Mapping[str, Any] | None = None,
) -> None:
    """Logs the iterations after `start` up to `stop`, then one validation."""
    logger.start(example_run(directory, start, configuration))
    for iteration in range(start + 1, stop + 1):
        loss = 10.0 * start + iteration
        logger.log_metrics({"iteration": iteration, "train_loss": loss, "s": "x"})
    logger.log_metrics({"iteration": stop, "validation_accuracy": 0.5})
    if finish:
        metrics = [{"iteration": 1, "train_loss": 1.0}]
        plot = plot_learning_curves(metrics, directory / "learning_curves.png", "title")
        logger.finish({"test_accuracy": 0.75, "iterations": 6, **(results or {})}, [plot])
    logger.close()
    logger.close()
