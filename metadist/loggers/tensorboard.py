"""The run as TensorBoard shows it."""

import contextlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from metadist.loggers.jsonl import json_value
from metadist.loggers.tracker import Record, Run, Tracker
from metadist.loggers.writing import writing

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class TensorBoard(Tracker):
    """Writes event files: a scalar for every figure, and the pictures at the end.

    Events reach the disk every few seconds and before each checkpoint, so a process that dies may
    lose the last of them; a run that goes on writes those again, and hides what was written
    beyond its checkpoint. `metrics.jsonl` loses none.

    Args:
        directory: where the event files go, from the run's directory.
    """

    def __init__(self, directory: str = "tensorboard") -> None:
        self._directory = directory
        self._path: Path | None = None
        self._writer: SummaryWriter | None = None
        self._iterations = 0

    def start(self, run: Run) -> None:
        """Opens an event file, and writes the headline and the configuration as texts."""
        # TensorBoard imports TensorFlow if it is there, which is talkative.
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter

        self._iterations = run.iterations
        self._path = run.directory / self._directory
        configuration = json.dumps(run.configuration, indent=2, default=str)
        with writing(self._path):
            self._writer = SummaryWriter(
                log_dir=str(self._path),
                # From 0 too: a run that died before its first checkpoint left events here.
                purge_step=run.start_iteration + run.resumed,
                flush_secs=5,
            )
            self._writer.add_text("run", run.headline, run.start_iteration)
            self._writer.add_text(
                "configuration", f"```json\n{configuration}\n```", run.start_iteration
            )

    def record(self, record: Record) -> None:
        """Adds a scalar for every figure, by its name."""
        assert self._writer is not None, "record() before start()"
        step = int(record["iteration"])
        with writing(self._path):
            for name, value in record.items():
                if name != "iteration" and not isinstance(value, (str, bool)):
                    self._writer.add_scalar(name, float(value), step)

    def flush(self) -> None:
        """Brings the events to the disk."""
        assert self._writer is not None, "flush() before start()"
        with writing(self._path):
            self._writer.flush()

    def finish(self, results: Mapping[str, object], pictures: Sequence[Path]) -> None:
        """Adds the pictures, and the results as a text."""
        assert self._writer is not None, "finish() before start()"
        from matplotlib.image import imread

        text = json.dumps(json_value(results), indent=2, default=str)
        with writing(self._path):
            self._writer.add_text("results", f"```json\n{text}\n```", self._iterations)
            for picture in pictures:
                pixels = imread(picture)[..., :3]  # without the alpha channel
                self._writer.add_image(picture.stem, pixels, self._iterations, dataformats="HWC")
            self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        writer, self._writer = self._writer, None
        if writer is not None:
            with contextlib.suppress(Exception):
                writer.close()
