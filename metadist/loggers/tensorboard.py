"""The TensorBoard logger."""

import contextlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from metadist.files import wrap_write_errors
from metadist.loggers.formatting import is_validation
from metadist.loggers.jsonl import json_value
from metadist.loggers.logger import (
    Logger,
    Metrics,
    Run,
    flatten_values,
    grouped_name,
    grouped_test_metrics,
    panel_name,
)

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


_INNER_STEPS = "inner_steps"
_POINTS = 5000  # the minimum number of points of a training metric in long runs


class TensorBoardLogger(Logger):
    """Writes TensorBoard event files.

    They have a scalar for every metric; at every validation a histogram of the metric over the
    tasks and an image of some tasks; and at the end the test metrics and plots.

    Tags are grouped: `train/loss`, `validation/accuracy`, `validation/tasks`, `test/accuracy`. The
    configuration is in the hyperparameters of TensorBoard's HPARAMS tab. The step of
    `test/accuracy_by_steps` is the number of inner steps; it is in TensorBoard's run `inner_steps`,
    a subdirectory, which has the last test alone.

    Long runs write the training metrics of only 5,000 to 10,000 iterations, because an event takes
    as long as an outer step of a small model; `metrics.jsonl` has all iterations.

    Events are flushed every few seconds and before each checkpoint, so the last ones may be lost
    if the process dies. A resumed run purges the events after its checkpoint and writes them
    again.

    Args:
        directory: the directory of the event files, relative to the run directory.
    """

    def __init__(self, directory: str = "tensorboard") -> None:
        self._directory = directory
        self._path = Path(directory)
        self._writer: SummaryWriter | None = None
        self._every = 1

    def start(self, run: Run) -> None:
        """Opens an event file, and writes the title and the configuration as text."""
        # TensorBoard imports TensorFlow if it is installed, which logs to stderr.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

        self._path = run.directory / self._directory
        self._every = max(1, run.iterations // _POINTS)
        configuration = json.dumps(run.configuration, indent=2, default=str)
        with wrap_write_errors(self._path):
            # TensorFlow, if it is installed, would raise errors of its own.
            self._path.mkdir(parents=True, exist_ok=True)
            self._writer = SummaryWriter(
                log_dir=str(self._path),
                # Purge from step 0 too: a run that died before its first checkpoint may have left
                # events.
                purge_step=run.start_iteration + 1 if run.resumed else 0,
                flush_secs=5,
            )
            self._writer.add_text("run", run.title, run.start_iteration)
            self._writer.add_text(
                "configuration", f"```json\n{configuration}\n```", run.start_iteration
            )
            for summary in _hyperparameters(run.configuration):
                cast(Any, self._writer).file_writer.add_summary(summary)  # typed as None

    def log_metrics(self, metrics: Metrics) -> None:
        """Adds a scalar for every metric; only for some iterations if there are many."""
        assert self._writer is not None, "log_metrics() before start()"
        step = int(metrics["iteration"])
        if step % self._every and not is_validation(metrics):
            return
        with wrap_write_errors(self._path):
            for name, value in metrics.items():
                if name != "iteration" and not isinstance(value, (str, bool)):
                    self._writer.add_scalar(grouped_name(name), float(value), step)

    shows_panels = True

    def log_panels(
        self, iteration: int, values: Mapping[str, Sequence[float]], images: Sequence[Path]
    ) -> None:
        """Adds a histogram for each metric, and the images."""
        assert self._writer is not None, "log_panels() before start()"
        with wrap_write_errors(self._path):
            for name, task_values in values.items():
                finite = np.asarray(task_values, dtype=np.float64)
                finite = finite[np.abs(finite) < _HISTOGRAM_LIMIT]
                if len(finite):
                    tag = f"{grouped_name(name)}_of_tasks"
                    self._writer.add_histogram(tag, finite, iteration)
            self._add_images(images, iteration)

    def flush(self) -> None:
        """Flushes the events to disk."""
        assert self._writer is not None, "flush() before start()"
        with wrap_write_errors(self._path):
            self._writer.flush()

    def finish(self, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
        """Adds the test metrics, the plots as images, and the results as text."""
        assert self._writer is not None, "finish() before start()"
        text = json.dumps(json_value(results), indent=2, default=str)
        iterations = int(results["iterations"])
        with wrap_write_errors(self._path):
            self._writer.add_text("results", f"```json\n{text}\n```", iterations)
            for name, value in grouped_test_metrics(results).items():
                self._writer.add_scalar(name, value, iterations)
            self._add_images(plots, iterations)
            self._writer.flush()
            if by_steps := _metrics_by_steps(results):
                self._add_inner_steps(by_steps)

    def _add_inner_steps(self, by_steps: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Replaces the metrics by inner steps, which an earlier test may have written."""
        from torch.utils.tensorboard import SummaryWriter

        with SummaryWriter(log_dir=str(self._path / _INNER_STEPS), purge_step=0) as writer:
            for name, points in by_steps.items():
                for steps, value in points:
                    writer.add_scalar(name, value, steps)

    def _add_images(self, paths: Sequence[Path], iteration: int) -> None:
        from matplotlib.image import imread

        assert self._writer is not None
        for path in paths:
            pixels = imread(path)[..., :3]  # without the alpha channel
            self._writer.add_image(panel_name(path), pixels, iteration, dataformats="HWC")

    def close(self) -> None:
        """Closes the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()


_HISTOGRAM_LIMIT = 1e19
"""The bins of TensorBoard's histograms end near 1e20."""

_HPARAM_METRICS = ("validation/accuracy", "validation/mse", "test/accuracy", "test/mse")


def _hyperparameters(configuration: Mapping[str, Any]) -> tuple[Any, ...]:
    """HPARAMS summaries of a configuration, by dotted key."""
    from torch.utils.tensorboard.summary import hparams

    flat = {
        key: value if isinstance(value, bool | int | float | str) else str(value)
        for key, value in flatten_values(configuration).items()
        if value is not None
    }
    return hparams(flat, dict.fromkeys(_HPARAM_METRICS, 0.0))


def _metrics_by_steps(results: Mapping[str, Any]) -> dict[str, list[tuple[int, float]]]:
    """Test metrics after each number of inner steps, such as `test/accuracy_by_steps`."""
    return {
        grouped_name(name): [(int(row["steps"]), float(row["mean"])) for row in rows]
        for name, rows in results.items()
        if name.startswith("test_") and name.endswith("_by_steps")
    }
