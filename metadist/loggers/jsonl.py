"""`metrics.jsonl`: the metrics of a run, one JSON object per line."""

import contextlib
import io
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from metadist.errors import UserError
from metadist.files import atomic_write, open_regular, rename_to_next_number, wrap_write_errors
from metadist.loggers.logger import Logger, Metrics, Run

METRICS_FILE = "metrics.jsonl"

_encode = json.JSONEncoder(allow_nan=False).encode

_MAX_INTEGER = 10**300
_MEASURED = re.compile(
    r"(train|validation)_(loss|accuracy|mse)|validation_ci95|gradient_norm|learning_rate"
    r"|(tasks|samples)_per_second"
)
"""Names of the values that metadist writes and reports plot."""

_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlLogger(Logger):
    """Writes metrics to `metrics.jsonl` in the run directory, at full precision.

    A line is passed to the operating system before `log_metrics` returns, so no line is lost if
    the process dies. Non-finite numbers are written as the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"`, which `float()` accepts; `read_metrics` converts them back.

    A resumed run first removes the lines after its checkpoint, because it runs those iterations
    again, and a truncated last line. A new run in a directory with an earlier `metrics.jsonl`
    renames that file to `metrics.jsonl.1`, `.2` and so on.
    """

    def __init__(self) -> None:
        self._path = Path(METRICS_FILE)
        self._file: io.FileIO | None = None

    def start(self, run: Run) -> None:
        """Opens the file, after truncating or renaming an existing one."""
        self._path = path = run.directory / METRICS_FILE
        with wrap_write_errors(path):
            if path.exists():
                if run.resumed:
                    _truncate_after(path, run.start_iteration)
                else:
                    rename_to_next_number(path)
            # Unbuffered: every line is written at once, and close() cannot fail.
            self._file = io.FileIO(path, "a")

    def log_metrics(self, metrics: Metrics) -> None:
        """Writes one line."""
        assert self._file is not None, "log_metrics() before start()"
        try:
            text = _encode(metrics)
        except (TypeError, ValueError):  # values of NumPy or PyTorch, or non-finite values
            text = _encode(json_value(metrics))
        line = memoryview(text.encode() + b"\n")
        with wrap_write_errors(self._path):
            while line:
                line = line[self._file.write(line) :]

    def flush(self) -> None:
        """Syncs the file to disk, so that no line is lost in a power failure.

        Raises:
            UserError: the file cannot be written, or was moved or deleted.
        """
        assert self._file is not None, "flush() before start()"
        with wrap_write_errors(self._path):
            os.fsync(self._file.fileno())
        if not self._path.exists():
            raise UserError(
                f"{self._path} was moved or deleted during the run: move its directory back, "
                "resume with resume=auto, and leave the directory alone until the run ends."
            )

    def close(self) -> None:
        """Closes the file."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Read a `metrics.jsonl`, oldest line first.

    A truncated last line is left out. Strings for non-finite numbers become floats.

    Raises:
        UserError: the file cannot be read, or a line before the last is not a JSON object.
    """
    try:
        return [
            {
                name: _NON_FINITE.get(value, value) if isinstance(value, str) else value
                for name, value in metrics.items()
            }
            for _, metrics in _lines(path)
        ]
    except OSError as error:
        raise UserError(
            f"cannot read {path} ({error.strerror or error}): expected the {METRICS_FILE} of a run."
        ) from error


def json_value(value: object) -> object:
    """Convert a value to one that JSON can represent.

    Args:
        value: numbers, strings, None, and mappings and sequences of them. Scalars and arrays of
            NumPy and PyTorch become Python numbers and lists. Non-finite floats become `"NaN"`,
            `"Infinity"` or `"-Infinity"`, which `float()` accepts. Other objects become their
            `str`.
    """
    if isinstance(value, Mapping):
        return {str(name): json_value(item) for name, item in value.items()}
    if hasattr(value, "tolist"):  # a value of NumPy or PyTorch
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [json_value(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value if isinstance(value, bool | int | float | str | None) else str(value)


def _lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield each complete line, raw and decoded."""
    with open_regular(path) as file:
        lines = file.read().split(b"\n")
    if not lines[-1]:  # the text after the last newline
        lines.pop()
    for number, line in enumerate(lines, start=1):
        try:
            metrics = json.loads(line)
        except (ValueError, RecursionError):
            metrics = None
        if isinstance(metrics, dict) and _are_metrics(metrics):
            yield line, metrics
        elif number < len(lines):
            raise UserError(
                f"line {number} of {path} is not a JSON object whose metrics are numbers: fix the "
                "line or move the file away."
            )


def _are_metrics(values: Mapping[str, Any]) -> bool:
    """Whether the values of a line that metadist writes are numbers."""
    iteration, seconds = values.get("iteration"), values.get("seconds", 0)
    measured = [value for name, value in values.items() if _MEASURED.fullmatch(name)]
    return (
        isinstance(iteration, int)
        and abs(iteration) < 1 << 63
        and _is_number(seconds)
        and 0 <= seconds < math.inf
        and all(_is_number(v) or (isinstance(v, str) and v in _NON_FINITE) for v in measured)
    )


def _is_number(value: Any) -> bool:
    # An integer of JSON has any number of digits.
    return isinstance(value, float) or (isinstance(value, int) and abs(value) < _MAX_INTEGER)


def _truncate_after(path: Path, iteration: int) -> None:
    kept = [line for line, metrics in _lines(path) if metrics["iteration"] <= iteration]
    content = b"".join(line + b"\n" for line in kept)
    if content != path.read_bytes():
        atomic_write(path, content)
