"""The C++ kernels: compiled once on each machine, called through ctypes."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

_log = logging.getLogger(__name__)

_TYPES = {torch.float32: "f32", torch.float64: "f64"}
LANES = 64
"""Bytes that channels must fill: a register of `vectors.h`, or several."""

_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
SOURCES = ("matmul", "norm_relu_pool", "patches", "winograd", "few_channels", "first_block")
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 120


def can_call(name: str, tensor: Tensor) -> bool:
    """Whether the functions of a source can be called with tensors like this one.

    They are for CPUs and one thread, know neither torch.func's transforms nor torch.compile nor
    autocast, and need a C++ compiler. Any rank may call it.

    Args:
        name: of the source, beside this file, without `.cpp`.
        tensor: of the type and device in question.
    """
    return (
        tensor.is_cpu
        and tensor.dtype in _TYPES
        and torch.get_num_threads() == 1
        and not in_transform()
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and library(name) is not None
    )


def in_transform() -> bool:
    """Whether one of torch.func's transforms, such as vmap, is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def call(
    name: str,
    function: str,
    dtype: torch.dtype,
    *arguments: Tensor | float | ctypes.Structure | None,
) -> None:
    """Call a source's function for a type of numbers, once `can_call` has said yes.

    Args:
        name: of the source.
        function: the function.
        dtype: the type of the tensors' numbers.
        arguments: as the function has them; tensors are contiguous, None is a null pointer.
    """
    called = getattr(library(name), f"{function}_{_TYPES[dtype]}")
    called.restype = None
    called(*map(_passed, arguments))


def _passed(argument: Tensor | float | ctypes.Structure | None) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else argument


def native_available(learner: nn.Module) -> bool | None:
    """Whether this machine has the kernels that a learner's layers use; None if they use none.

    Any rank may call it; the first on a machine compiles, in some seconds.
    """
    if not any(getattr(layer, "native", False) for layer in learner.modules()):
        return None
    with ThreadPoolExecutor() as pool:
        return None not in pool.map(library, SOURCES)


def disable_native(learner: nn.Module) -> None:
    """Use PyTorch instead of the kernels in all layers of a learner."""
    for layer in learner.modules():
        if hasattr(layer, "native"):
            layer.native = False


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """A source's compiled functions; None where no compiler is found or it cannot compile them.

    The first process on a machine compiles, in some seconds, into `$XDG_CACHE_HOME/metadist/native`
    or `~/.cache/metadist/native`, which nobody else may write to; `CXX` names another compiler.
    Any rank may call it, at any time.

    Args:
        name: of the source, beside this file, without `.cpp`.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        _log.info("no C++ compiler found: PyTorch does the work of %s.cpp, slower", name)
        return None
    source = Path(__file__).with_name(f"{name}.cpp")
    try:
        made = _compiled(source, compiler)
        try:
            return ctypes.CDLL(str(made))
        except OSError:  # cut short by a crash, or of a machine with other libraries
            made.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, RuntimeError, Timeout, subprocess.SubprocessError) as error:
        _log.info("%s cannot be compiled, PyTorch does its work, slower: %s", source.name, error)
        return None


def _compiled(source: Path, compiler: str) -> Path:
    command = [*compiler.split(), *_FLAGS]
    texts = [path.read_text("utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
    made_from = [" ".join(command), _version(compiler), _processor(), *texts]
    digest = hashlib.sha256("\0".join(made_from).encode()).hexdigest()[:16]
    target = _directory() / f"{source.stem}-{digest}.so"
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _refuse_others(target.parent)
    if not target.exists():
        with FileLock(target.with_suffix(".lock"), timeout=_SECONDS):  # one of a machine's workers
            if not target.exists():
                _compile([*command, str(source)], target)
    _refuse_others(target)
    return target


def _compile(command: list[str], target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        _run([*command, "-o", str(made)])
        made.chmod(0o700)
        made.replace(target)


def _run(command: list[str]) -> None:
    """Run a compiler; one that takes too long is ended with the processes that it has started."""
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as compiler:
        try:
            status = compiler.wait(_SECONDS)
        except BaseException:
            os.killpg(compiler.pid, signal.SIGKILL)
            raise
    if status:
        raise subprocess.CalledProcessError(status, command)


def _directory() -> Path:
    users = os.environ.get("XDG_CACHE_HOME")
    return (Path(users) if users else Path.home() / ".cache") / "metadist" / "native"


def _refuse_others(path: Path) -> None:
    """What is loaded runs: nobody else may have written it."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} belongs to, or can be written by, somebody else")


@functools.cache
def _version(compiler: str) -> str:
    return subprocess.run(
        [*compiler.split(), "--version"], check=True, capture_output=True, text=True, timeout=10
    ).stdout


@functools.cache
def _processor() -> str:
    """What `-march=native` goes by: a home directory may be shared by unlike machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
