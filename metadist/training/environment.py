"""The environment of a run: versions, commit, device, workers."""

import contextlib
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from metadist import __version__
from metadist.distributed import get_world_size
from metadist.distributed.world import host_name
from metadist.training.device import resolve_device
from metadist.training.experiment import Experiment

_PACKAGES = ("torch", "torchvision", "numpy", "hydra-core")
_GIT_SECONDS = 2.0


def environment_of(experiment: Experiment) -> dict[str, Any]:
    """The environment of this process and the number of workers. Rank zero calls it."""
    device = resolve_device(experiment.train_mapper.device)
    mapper, gpu = experiment.train_mapper, {}
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        gpu = {"gpu": name, "task_chunk_size": mapper.chunk_size}  # "auto" depends on the GPU
    precision = mapper.precision
    return {
        "metadist": __version__,
        **commit(Path.cwd()),
        "python": sys.version.split()[0],
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "host": host_name(),
        "device": str(device),
        **gpu,
        **({} if precision == "float32" else {"precision": precision}),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "strategy": experiment.strategy.name,
        "world_size": get_world_size(),
        "directory": str(Path.cwd()),
    }


@cache
def commit(directory: Path) -> dict[str, str]:
    """The `commit` of a directory's Git repository, with `-dirty` if files differ from it.

    {} without a repository. The directory may be another person's: programs that the repository's
    configuration names, such as filters, are not run.
    """
    options = {"core.fsmonitor": "false"}
    try:
        head = _git(directory, options, "rev-parse", "HEAD").strip()
        with contextlib.suppress(subprocess.CalledProcessError):  # no filters
            names = _git(directory, {}, "config", "-z", "--name-only", "--get-regexp", "^filter")
            options |= dict.fromkeys(filter(None, names.split("\0")), "")
        try:
            changes = ("--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")
            _git(directory, options, "diff", "--quiet", *changes, "HEAD")
        except subprocess.CalledProcessError:
            head += "-dirty"
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": head}


def _git(directory: Path, options: Mapping[str, str], *arguments: str) -> str:
    """The output of a Git command with some values of the configuration replaced."""
    configuration = {"GIT_CONFIG_COUNT": str(len(options)), "GIT_NO_LAZY_FETCH": "1"}
    for number, (key, value) in enumerate(options.items()):
        configuration |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    completed = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        text=True,
        timeout=_GIT_SECONDS,
        check=True,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **configuration},
    )
    return completed.stdout


@cache
def cpu_name() -> str:
    """The model of the CPU, or its architecture if Linux does not report the model."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
