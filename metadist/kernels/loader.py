"""C++ kernels, compiled once per machine and called by ctypes, and where Triton can be used."""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from metadist.kernels.transforms import is_eager

_log = logging.getLogger(__name__)

Backend = Literal["cpp", "triton"]
"""The language of a kernel."""

_GPU_TYPES = (torch.float32, torch.float64, torch.bfloat16)
_MIXED_TYPES = (torch.bfloat16, torch.float32)
"""Types of inputs and parameters that may differ, on GPUs."""
_MAX_TASKS = 2**16 - 1  # the largest second and third dimension of a grid
_AMPERE = 8
"""The lowest compute capability with bfloat16 and TensorFloat-32."""
_TYPES = {torch.float32: "f32", torch.float64: "f64"}
VECTOR_BYTES = 64
"""Size of the largest vectors in `vectors.h`; channels must fill whole vectors."""

_FLAGS = (
    *("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC"),
    *("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi"),
)
SOURCES = (
    *("matmul", "norm_relu_pool", "unfold"),
    *("winograd", "direct", "few_channels", "fused_block"),
)
"""The sources of the models' layers. `uniform` is for sampling tasks, `all_reduce` for sums of
ranks."""
_COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_SECONDS = 120


def backend(inputs: Tensor, *parameters: Tensor | None) -> Backend | None:
    """The language of the kernels that can compute tensors; None if there are none.

    Parameters have the type and device of the inputs; on GPUs, bfloat16 inputs may have float32
    parameters. `is_eager` must hold. On CPUs, the C++ functions run in float32 or float64, with one
    thread (`torch.get_num_threads() == 1`), without autocast, and need a C++ compiler. On the
    current NVIDIA GPU, from compute capability 8.0 on, the Triton kernels run in float32, float64
    or bfloat16, for fewer than 65,536 tasks, and need Triton and a C compiler. Any rank may call
    it; the first one on a machine compiles the C++ kernels.

    Args:
        inputs: the inputs, in Triton with a first dimension of tasks.
        parameters: the other tensors; None is skipped.
    """
    if not is_eager(inputs, *parameters):
        return None
    dtype, device = inputs.dtype, inputs.device
    for parameter in parameters:  # `all` with a generator takes twice as long
        if parameter is not None and (
            parameter.device != device
            or (parameter.dtype != dtype and (dtype, parameter.dtype) != _MIXED_TYPES)
        ):
            return None
    if inputs.is_cpu:
        supported = (
            dtype in _TYPES
            and torch.get_num_threads() == 1
            and not torch.is_autocast_enabled("cpu")
            and has_cpp()
        )
        return "cpp" if supported else None
    supported = (
        inputs.is_cuda
        and dtype in _GPU_TYPES
        and not (
            torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda") not in _GPU_TYPES
        )
        and len(inputs) <= _MAX_TASKS
        and device.index == torch.cuda.current_device()
        and has_triton(device, dtype)
    )
    return "triton" if supported else None


def in_memory(argument: Any) -> Any:
    """An argument of a kernel; a tensor whose negation PyTorch has put off is negated in a copy.

    Raises:
        RuntimeError: a tensor has no memory, as gradients of a kernel's outputs may.
    """
    if not isinstance(argument, Tensor):
        return argument
    if not argument.data_ptr() and argument.numel():
        raise RuntimeError(
            f"a kernel got a {type(argument).__name__} without memory, such as a gradient of its "
            "outputs: use layers with `native=False`"
        )
    return argument.resolve_neg()


@functools.cache
def has_cpp() -> bool:
    """Whether there are the C++ kernels of the models' layers, which it compiles in parallel."""
    with ThreadPoolExecutor() as pool:
        return None not in pool.map(library, SOURCES)


@functools.cache
def has_triton(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether Triton can compile and run kernels on a GPU. Any rank may call it.

    Args:
        device: the GPU.
        dtype: the type of the tensors; before Triton 3.5, there are no products of float64.
    """
    try:
        if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] < _AMPERE:
            raise RuntimeError("the kernels need an NVIDIA GPU of compute capability 8.0 or higher")
        from metadist.kernels import convolution_gpu, norm_relu_pool_gpu  # Triton may be missing

        with torch.cuda.device(device):
            x = torch.ones(1, 2, 1, 1, 16, device=device, dtype=dtype)
            weight, bias = x.new_ones(1, 1, 1, 16, 16), x.new_ones(1, 16)
            geometry = ((1, 1), (1, 1), (0, 0))
            convolution_gpu.convolve(*geometry, x, weight, bias, torch.empty_like(x))
            convolution_gpu.weight_grad(*geometry, x, x, weight, bias)
            gamma = bias.float() if dtype is torch.bfloat16 else bias  # as under autocast
            statistics = torch.empty_like(gamma), torch.empty_like(gamma)
            norm_relu_pool_gpu.forward(1, x, gamma, gamma, 1.0, torch.empty_like(x), *statistics)
            torch.cuda.synchronize()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of Triton and of its compilers, which have many types of errors
        _log.info("cannot use Triton, using PyTorch, which is slower: %s", error)
        return False
    return True


def int64_fields(*names: str) -> tuple[tuple[str, type[ctypes.c_int64]], ...]:
    """The fields of a `ctypes.Structure` that is a struct of `int64_t` in C++."""
    return tuple((name, ctypes.c_int64) for name in names)


def call(
    name: str,
    function: str,
    dtype: torch.dtype,
    *arguments: Tensor | float | ctypes.Structure | None,
) -> None:
    """Call an exported function, for tensors whose `backend` is "cpp".

    Args:
        name: the name of the source file, without `.cpp`.
        function: the function's name, without the suffix of the type.
        dtype: the type of the tensors.
        arguments: the function's arguments; tensors must be contiguous, None is a null pointer.
    """
    given = list(map(in_memory, arguments))  # copies among them live until the call returns
    _function(library(name), f"{function}_{_TYPES[dtype]}")(*map(_as_ctypes, given))


@functools.cache
def _function(compiled: ctypes.CDLL, name: str) -> Callable[..., None]:
    """The function that an exported pointer of a library refers to; see `export.h`."""
    address = ctypes.c_void_p.in_dll(compiled, name).value
    assert address
    return ctypes.CFUNCTYPE(None)(address)


def _as_ctypes(argument: Tensor | float | ctypes.Structure | None) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(argument.data_ptr())
    return ctypes.c_double(argument) if isinstance(argument, float) else argument


def native_available(module: nn.Module, device: torch.device) -> bool | None:
    """Whether the kernels are available for a device; None if no layer of the module uses them.

    Any rank may call it; the first one on a machine compiles the C++ kernels, which takes some
    seconds.

    Args:
        module: the module that is to run.
        device: the device on which it is to run.
    """
    if not any(getattr(layer, "native", False) for layer in module.modules()):
        return None
    return has_triton(device, torch.float32) if device.type == "cuda" else has_cpp()


def disable_native(module: nn.Module) -> None:
    """Use PyTorch instead of the kernels in all layers of a module."""
    layer: Any  # `native` is an attribute of some layers only
    for layer in module.modules():
        if hasattr(layer, "native"):
            layer.native = False


@functools.cache
def library(name: str) -> ctypes.CDLL | None:
    """The compiled library of a source; None without a working compiler.

    The first process on a machine compiles it, which takes some seconds, into
    `$XDG_CACHE_HOME/metadist/native` or `~/.cache/metadist/native`. Libraries that other users can
    write to are not loaded. `CXX` selects the compiler. Any rank may call it, at any time.

    Args:
        name: the name of the source file, without `.cpp`.
    """
    compiler = os.environ.get("CXX") or next(filter(None, map(shutil.which, _COMPILERS)), None)
    if compiler is None:
        _log.info("no C++ compiler found: using PyTorch instead of %s.cpp, which is slower", name)
        return None
    source = Path(__file__).with_name(f"{name}.cpp")
    try:
        path = _compiled(source, compiler)
        try:
            return ctypes.CDLL(str(path))
        except OSError:  # truncated by a crash, or built on a machine with other libraries
            path.unlink(missing_ok=True)
            return ctypes.CDLL(str(_compiled(source, compiler)))
    except (OSError, RuntimeError, Timeout, subprocess.SubprocessError) as error:
        _log.info("cannot compile %s, using PyTorch, which is slower: %s", source.name, error)
        return None


def _compiled(source: Path, compiler: str) -> Path:
    command = [*compiler.split(), *_FLAGS]
    sources = [path.read_text("utf-8") for path in (source, *sorted(source.parent.glob("*.h")))]
    key = [" ".join(command), compiler_version(compiler), _cpu_features(), *sources]
    digest = hashlib.sha256("\0".join(key).encode()).hexdigest()[:16]
    target = _cache_directory() / f"{source.stem}-{digest}.so"
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    _check_permissions(target.parent)
    if not target.exists():
        with FileLock(target.with_suffix(".lock"), timeout=TIMEOUT_SECONDS):
            if not target.exists():
                compile_source([*command, str(source)], target)
    _check_permissions(target)
    return target


def compile_source(command: list[str], target: Path) -> None:
    """Run a compiler command without `-o`, and move the library to `target` atomically."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        output = Path(folder) / target.name
        subprocess.run(
            [*command, "-o", str(output)],
            check=True, timeout=TIMEOUT_SECONDS,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        output.chmod(0o700)
        output.replace(target)


def _cache_directory() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "metadist" / "native"


def _check_permissions(path: Path) -> None:
    """Refuse a path that other users can write to, since its code is executed."""
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise PermissionError(f"{path} is owned or writable by other users")


@functools.cache
def compiler_version(compiler: str) -> str:
    """The output of `compiler --version`."""
    return subprocess.run(
        [*compiler.split(), "--version"], check=True, capture_output=True, text=True, timeout=10
    ).stdout


@functools.cache
def _cpu_features() -> str:
    """The CPU features that `-march=native` depends on; machines with one home may differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
