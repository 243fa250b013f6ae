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
_SCOPES_OF_THE_USER = ("system", "global")
_DIFF = ("diff", "--quiet", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty")


def environment_of(experiment: Experiment) -> dict[str, Any]:
    """The environment of this process and the number of workers. Any rank may call it."""
    mapper, gpu = experiment.train_mapper, {}
    device = resolve_device(mapper.device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        gpu = {"gpu": name, "task_chunk_size": mapper.chunk_size}  # "auto" depends on the GPU
    return {
        "metadist": __version__,
        **commit(Path.cwd()),
        "python": sys.version.split()[0],
        **{name: _version(name) for name in _PACKAGES},
        "platform": platform.platform(),
        "host": host_name(),
        "device": str(device),
        **gpu,
        **({} if mapper.precision == "float32" else {"precision": mapper.precision}),
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

    {} without a repository. The directory may be another person's: hooks and programs that the
    repository's own configuration names, such as filters, are not run.
    """
    options = {"core.fsmonitor": "false", "core.hooksPath": os.devnull}
    listing = ("config", "-z", "--show-scope", "--name-only", "--get-regexp", "^filter")
    try:
        head = _git(directory, options, "rev-parse", "HEAD").strip()
    except (OSError, ValueError, subprocess.SubprocessError):
        return {}
    try:
        with contextlib.suppress(subprocess.CalledProcessError):  # there are no filters
            fields = _git(directory, options, *listing).split("\0")
            filters = zip(fields[::2], fields[1::2], strict=False)
            options |= {name: "" for scope, name in filters if scope not in _SCOPES_OF_THE_USER}
        _git(directory, options, *_DIFF, "HEAD")
    except subprocess.CalledProcessError as error:
        head += "-dirty" if error.returncode == 1 else ""
    except (OSError, subprocess.SubprocessError):  # whether files differ is not known
        pass
    return {"commit": head}


def _git(directory: Path, options: Mapping[str, str], *arguments: str) -> str:
    """The output of a Git command with some values of the configuration replaced."""
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_ALLOW_PROTOCOL": "none"}
    first = int(environment.get("GIT_CONFIG_COUNT") or 0)
    for number, (key, value) in enumerate(options.items(), first):
        environment |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    completed = subprocess.run(
        ["git", "-C", str(directory), *arguments],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        timeout=_GIT_SECONDS,
        check=True,
        stdin=subprocess.DEVNULL,
        env={**environment, "GIT_CONFIG_COUNT": str(first + len(options))},
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
