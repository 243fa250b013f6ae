"""The run's record of itself: `metrics.jsonl`, a JSON object a line."""

import contextlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path

from metadist.errors import UserError
from metadist.loggers.tracker import Record, Run, Tracker
from metadist.loggers.writing import replace_file, writing

METRICS_FILE = "metrics.jsonl"

_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonLines(Tracker):
    """Writes every record to `metrics.jsonl` in the run's directory, at full precision.

    A line is handed to the system before `record` returns, so a process that dies loses none.
    Figures that JSON cannot hold are written as the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"`, which `float()` understands; `read_metrics` turns them back.

    A resumed run first drops what lies beyond its checkpoint, for it records those iterations
    again, and a last line that a crash cut short. A new run in a directory that was used before
    moves the old file aside, to `metrics.jsonl.1`, `.2` and so on.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._file: io.FileIO | None = None

    def start(self, run: Run) -> None:
        """Opens the file, after mending or moving one that is there."""
        self._path = path = run.directory / METRICS_FILE
        with writing(path):
            if path.exists():
                if run.resumed:
                    _drop_after(path, run.start_iteration)
                else:
                    _set_aside(path)
            # Unbuffered: nothing waits in this process, and closing has nothing left to fail on.
            self._file = io.FileIO(path, "a")

    def record(self, record: Record) -> None:
        """Writes one line."""
        assert self._file is not None, "record() before start()"
        line = memoryview(json.dumps(json_value(record), allow_nan=False).encode() + b"\n")
        with writing(self._path):
            while line:
                line = line[self._file.write(line) :]

    def flush(self) -> None:
        """Brings the lines to the disk, so that a power cut takes none either."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def read_metrics(path: Path) -> list[dict]:
    """The records of a `metrics.jsonl`, oldest first.

    A last line that a crash cut short is left out. The strings that stand for figures which are
    not finite become floats again.

    Raises:
        UserError: if the file cannot be read, or a line before the last is no record.
    """
    try:
        return [
            {
                name: _NOT_FINITE.get(value, value) if isinstance(value, str) else value
                for name, value in record.items()
            }
            for _, record in _lines(path)
        ]
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror or error}): expected a run's {METRICS_FILE}"
        ) from error


def json_value(value: object) -> object:
    """What JSON holds in the place of a value, containers gone through.

    Args:
        value: figures, texts, None, mappings and sequences of them; scalars of numpy or torch
            become plain, and floats that are not finite `"NaN"`, `"Infinity"` or `"-Infinity"`,
            which `float()` understands.
    """
    if isinstance(value, Mapping):
        return {name: json_value(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_value(inner) for inner in value]
    if hasattr(value, "item"):  # a scalar of numpy or torch
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _lines(path: Path) -> Iterator[tuple[bytes, dict]]:
    """Each whole line with its record."""
    lines = path.read_bytes().split(b"\n")
    if not lines[-1]:  # what follows the last newline
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict):
            yield line, record
        elif number < len(lines):
            raise UserError(
                f"line {number} of {path} is no JSON object, so the run's record cannot be read: "
                "mend the line or move the file away"
            )


def _drop_after(path: Path, iteration: int) -> None:
    kept = [line for line, record in _lines(path) if record.get("iteration", 0) <= iteration]
    content = b"".join(line + b"\n" for line in kept)
    if content != path.read_bytes():
        replace_file(path, content)


def _set_aside(path: Path) -> None:
    free = next(
        aside
        for number in count(1)
        if not (aside := path.with_name(f"{path.name}.{number}")).exists()
    )
    path.rename(free)
