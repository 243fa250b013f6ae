"""The models' C++, compiled once on the machine that runs it."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_log = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("norm_relu_pool.cpp")
# Contraction would let two places of the source round one expression differently.
_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"),
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled functions, or None where no compiler is found or it cannot compile them.

    The first process on a machine compiles, in some seconds, into `$METADIST_CACHE`,
    `$XDG_CACHE_HOME/metadist` or `~/.cache/metadist`; `CXX` names another compiler. Any rank may
    call it, at any time.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        return None
    try:
        return ctypes.CDLL(str(_compiled(compiler)))
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        _log.debug("%s cannot be compiled, PyTorch does its work: %s", _SOURCE.name, error)
        return None


def _compiled(compiler: str) -> Path:
    command = [*compiler.split(), *_FLAGS]
    made_from = [" ".join(command), _version(compiler), _processor(), _SOURCE.read_text("utf-8")]
    digest = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
    target = _directory() / f"{_SOURCE.stem}-{digest}.so"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        # Two processes may compile at once: each puts a whole file in its place.
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / target.name
            subprocess.run(
                [*command, "-o", str(made), str(_SOURCE)],
                check=True,
                capture_output=True,
                timeout=_SECONDS,
            )
            made.replace(target)
    return target


def _directory() -> Path:
    if chosen := os.environ.get("METADIST_CACHE"):
        return Path(chosen).expanduser()
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path.home() / ".cache") / "metadist"


def _version(compiler: str) -> str:
    return subprocess.run(
        [*compiler.split(), "--version"], check=True, capture_output=True, text=True, timeout=10
    ).stdout


def _processor() -> str:
    """What `-march=native` goes by: a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
