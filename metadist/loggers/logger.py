"""The interface of a logger, and a collection of loggers."""

import contextlib
import difflib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from metadist.errors import UserError
from metadist.files import read_regular

Metrics = Mapping[str, Any]
"""The metrics of a training iteration or a validation by name, always with `iteration`."""


@dataclass(frozen=True)
class Run:
    """The description of a run that a logger receives when the run starts.

    Attributes:
        directory: the run directory, which exists.
        name: the short name of the experiment, such as `maml`.
        configuration: the resolved configuration in plain containers.
        iterations: the total number of training iterations.
        start_iteration: the number of finished iterations that the run resumes from; 0 for a new
            run. The first metrics have `iteration` `start_iteration + 1`.
        title: a title in one line, such as `MAML on glyphs, 5-way 1-shot, rpc on 2 workers`.
        contents: descriptions of the files and directories that the run directory may have.
        split_descriptions: descriptions of what "validation" and "test" measure, if they measure
            different things.
    """

    directory: Path
    name: str
    configuration: dict[str, Any]
    iterations: int
    start_iteration: int
    title: str
    contents: Mapping[str, str] = field(default_factory=dict)
    split_descriptions: Mapping[str, str] = field(default_factory=dict)

    @property
    def resumed(self) -> bool:
        """Whether the run resumes from a checkpoint."""
        return self.start_iteration > 0


class Logger:
    """Interface of a logger. Every method does nothing; a subclass overrides what it needs.

    `start` is called first, then `log_metrics`, `log_message` and `flush` any number of times,
    then `finish` if the run succeeded, and `close` in every case. Only rank zero calls them.

    Raises:
        TypeError: a subclass defines a public method with almost the name of one of these.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        methods = [name for name in vars(Logger) if name[0] != "_"]
        for name, member in vars(cls).items():
            if name.startswith("_") or not callable(member):
                continue
            matches = difflib.get_close_matches(name, methods, n=1, cutoff=0.9)
            if matches and matches != [name]:
                raise TypeError(
                    f"{cls.__qualname__}.{name} is no method of Logger "
                    f"(did you mean {matches[0]}?)."
                )

    def start(self, run: Run) -> None:
        """Opens the output.

        Args:
            run: the run that starts or resumes.

        Raises:
            UserError: the output cannot be written, or a service cannot be reached.
        """

    def log_metrics(self, metrics: Metrics) -> None:
        """Logs the metrics of one training iteration or one validation.

        Args:
            metrics: numbers by name, with the number of finished iterations as `iteration`. Names
                of training metrics start with `train_`, names of validation metrics with
                `validation_`.

        Raises:
            UserError: the output cannot be written.
        """

    @property
    def shows_panels(self) -> bool:
        """Whether `log_panels` does anything. If not, its arguments are not computed."""
        return False

    def log_panels(
        self, iteration: int, values: Mapping[str, Sequence[float]], images: Sequence[Path]
    ) -> None:
        """Logs distributions and images of a validation.

        Args:
            iteration: the number of finished iterations.
            values: the metric of each validation task, by the name of the mean in `log_metrics`.
            images: PNG files in the run directory, which later validations overwrite.

        Raises:
            UserError: the output cannot be written.
        """

    def log_message(self, text: str) -> bool:
        """Shows a warning to the user.

        Args:
            text: the warning, in one line.

        Returns:
            Whether the warning was shown.
        """
        return False

    def flush(self) -> None:
        """Writes all metrics so far to disk. Called before a checkpoint is written.

        Raises:
            UserError: the output cannot be written.
        """

    def finish(self, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
        """Logs the results of a run that succeeded.

        Args:
            results: the content of `results.json`.
            plots: PNG files in the run directory.

        Raises:
            UserError: the output cannot be written.
        """

    def close(self) -> None:
        """Closes the output. Never raises; may be called more than once.

        After an error it is called in another thread, with a timeout of a few seconds.
        """


def saved_run_id(run: Run, file: str, digits: int) -> str:
    """The id under which a service has the run that is resumed; "" without one.

    Args:
        run: the run.
        file: the name of the file with the id, in the run's directory.
        digits: the number of hexadecimal digits of an id.

    Raises:
        OSError: the file cannot be read, or is a pipe.
    """
    if not run.resumed or not (path := run.directory / file).exists():
        return ""
    text = read_regular(path, "replace").strip()
    return text if re.fullmatch(f"[0-9a-f]{{{digits}}}", text) else ""


def flatten_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of nested mappings by dotted key. Lists are not flattened."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{name}": item for name, item in flatten_values(value).items()}
        else:
            flat[str(key)] = value
    return flat


def grouped_name(name: str) -> str:
    """The name of a metric in services that group by prefix.

    `train_loss` is `train/loss`, `validation_accuracy` is `validation/accuracy`, `test_loss` is
    `test/loss`. All other metrics are measured in training: `gradient_norm` is
    `train/gradient_norm`.
    """
    split, _, metric = name.partition("_")
    return f"{split}/{metric}" if split in ("train", "validation", "test") else f"train/{name}"


def panel_name(path: Path) -> str:
    """The name of an image in services that group by prefix.

    `validation_tasks.png` is `validation/tasks`, `learning_curves.png` is `learning_curves`.
    """
    split, _, panel = path.stem.partition("_")
    return f"{split}/{panel}" if split in ("validation", "test") and panel else path.stem


def grouped_test_metrics(results: Mapping[str, Any]) -> dict[str, float]:
    """The test metrics among the results of a run, by `grouped_name`."""
    values = {name: value for name, value in results.items() if name.startswith("test_")}
    if "ci95" in results:
        values["test_ci95"] = results["ci95"]
    return {grouped_name(name): value for name, value in values.items() if isinstance(value, float)}


class LoggerCollection(Logger):
    """Several loggers that are called in order.

    Before `start` and after `close` only messages are passed on, so that the methods of a trainer
    can also be called without a run.
    """

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)
        self._started: tuple[Logger, ...] = ()

    def start(self, run: Run) -> None:
        """Starts each logger. If one raises, `close` still closes all of them."""
        self._started = self._loggers
        for logger in self._loggers:
            logger.start(run)

    def log_metrics(self, metrics: Metrics) -> None:
        """Passes the metrics to each logger.

        Raises:
            UserError: the metrics have no `iteration`, or one is an array or a list.
        """
        if "iteration" not in metrics:
            raise UserError(
                f"the metrics ({', '.join(metrics)}) have no iteration: log_metrics takes a dict "
                'with "iteration", such as {"iteration": trainer.state.iteration, "train_x": 1.0}.'
            )
        for name, value in metrics.items():
            shape = getattr(value, "shape", ())
            if isinstance(value, list | tuple | Mapping) or math.prod(shape) != 1:
                found = f"an array of shape {tuple(shape)}" if shape else type(value).__name__
                raise UserError(
                    f"the metric {name} is no number ({found}): log_metrics takes numbers, such as "
                    "value.mean().item(), under a name for each."
                )
        for logger in self._started:
            logger.log_metrics(metrics)

    @property
    def shows_panels(self) -> bool:
        """Whether any logger shows panels."""
        return any(logger.shows_panels for logger in self._started)

    def log_panels(
        self, iteration: int, values: Mapping[str, Sequence[float]], images: Sequence[Path]
    ) -> None:
        """Passes the panels to each logger."""
        for logger in self._started:
            logger.log_panels(iteration, values, images)

    def log_message(self, text: str) -> bool:
        """Passes the message to each logger. Returns whether any of them showed it."""
        # A list, because a generator would stop at the first logger that shows the message.
        shown = [logger.log_message(text) for logger in self._loggers]
        return any(shown)

    def flush(self) -> None:
        """Flushes each logger."""
        for logger in self._started:
            logger.flush()

    def finish(self, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
        """Passes the results to each logger."""
        for logger in self._started:
            logger.finish(results, plots)

    def close(self) -> None:
        """Closes each logger, even if another one raises."""
        self._started = ()
        for logger in self._loggers:
            with contextlib.suppress(Exception):
                logger.close()
