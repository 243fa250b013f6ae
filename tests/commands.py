"""Runs an experiment's command on every rank of a small job, and captures its output."""

import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from tiny import compose
from worlds import run_world

from metadist.launchers import RunSpec

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = {"metadist": "metadist/__main__.py", "worker": "metadist/launchers/worker.py"}


def without_gloo(text: str) -> str:
    """A program's output without the line that every rank prints in PyTorch before 2.11."""
    return re.sub(r"\[Gloo\] Rank \d+ is connected .*\n", "", text)


class CommandResult(NamedTuple):
    """Exit status and output of a rank's command."""

    status: int
    out: str
    err: str


def run_command(
    script: str,
    *overrides: str,
    size: int = 1,
    directory: Path | None = None,
    **options: Any,
) -> list[CommandResult]:
    """Run `experiments/SCRIPT OVERRIDES` from a directory, on `size` ranks; the outcome of each.

    With "metadist" as the script it is `metadist OVERRIDES`, with "worker" a launched worker, whose
    only argument is a file of `specification`.
    """
    return run_world(command, size, script, overrides, directory, **options)


def specification(directory: Path, *overrides: str) -> str:
    """The file of a job of MAML, composed here once instead of several times on every rank."""
    directory.mkdir(exist_ok=True)
    file = directory.with_name(f"{directory.name}.specification.yaml")
    spec = RunSpec("maml", directory, compose(*overrides), overrides)
    file.write_text(spec.to_yaml(), encoding="utf-8")
    return str(file)


def command(
    script: str, overrides: tuple[str, ...], directory: Path | None = None
) -> CommandResult:
    """Run it in this process, which is a rank; the process must end afterwards."""
    path = ROOT / PROGRAMS.get(script, f"experiments/{script}")
    sys.argv = [str(path), *overrides]
    os.chdir(directory or tempfile.gettempdir())
    files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115
    for descriptor, file in zip((1, 2), files, strict=True):
        os.dup2(file.fileno(), descriptor)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    status: Any = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as leaving:
        status = leaving.code
    sys.stdout.flush()
    sys.stderr.flush()
    texts = []
    for file in files:
        file.seek(0)
        texts.append(file.read().decode())
    return CommandResult(0 if status is None else status, *texts)
