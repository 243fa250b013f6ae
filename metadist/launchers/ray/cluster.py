"""Ray, the cluster: started on this machine, or joined where it runs; imported when asked for."""

import contextlib
import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from metadist.distributed.world import usable_cpus
from metadist.errors import UserError

_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # One process prints, and it says what it says to a person, not to a log.
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Workers stay in the directory of the command: relative paths mean what they mean there.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # How soon Ray Train takes up a report, and sees that a worker has died: half a second.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
_LOOPBACK = {
    # Ray takes 127.0.0.1 for the machine's address, and listens nowhere else, where it is not to
    # be a cluster; by default only so on Windows and macOS, but the variable holds everywhere.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Nobody takes a machine away that Ray itself runs on.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}

_REACH_SECONDS = 5.0

_starting = threading.Lock()


def load_ray(module: str = "ray") -> ModuleType:
    """Import Ray, or one of its modules, quietly. Any process.

    Raises:
        UserError: it is not installed.
    """
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("ray", "pyarrow", "pandas"):
            raise UserError(
                f"Ray is not installed ({error.name} is missing): pip install 'metadist[ray]', or, "
                "in metadist's folder, pip install -e '.[ray]'."
            ) from None
        raise


def open_ray(address: str | None = None) -> bool:
    """Have Ray: the one that this process has already, the cluster at `address`, or a new one.

    A new one is of this machine alone: it has a CPU for each that this process may use, its
    sockets are bound to loopback, it shows no dashboard, reports nothing to anybody and dies with
    this process.

    Args:
        address: "auto" or "IP:PORT" of a running cluster's head. Default: as the environment
            variable RAY_ADDRESS says, or a new one.

    Returns:
        Whether this call started a new one.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    ray = load_ray()
    with _starting:
        if ray.is_initialized():
            return False
        address = address or os.environ.get("RAY_ADDRESS") or None
        quiet: dict[str, Any] = {
            "configure_logging": True,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
        }
        with _own_signal_handlers():
            if address is None:
                _bind_to_loopback()
                ray.init(address="local", num_cpus=usable_cpus(), include_dashboard=False, **quiet)
            else:
                try:
                    _reach(address)
                    ray.init(address=address, **quiet)
                except (ConnectionError, ValueError, RuntimeError, OSError) as error:
                    reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
                    raise UserError(
                        f"there is no Ray cluster at {address} ({reason}): start one with "
                        "`ray start --head`, or leave the address out to start Ray on this machine."
                    ) from None
        return address is None


def close_ray() -> None:
    """End a Ray that `open_ray` started, all its processes; leave one that runs elsewhere."""
    ray = load_ray()
    with _starting:
        if ray.is_initialized():
            ray.shutdown()


def require_workers(number: int, use_gpu: bool, option: str) -> None:
    """Refuse more workers than the cluster that this process is in has room for, ever.

    Args:
        number: of workers, each with one CPU, or one GPU and one CPU.
        use_gpu: whether each needs a GPU of its own.
        option: what asked for them, for the message.

    Raises:
        UserError: there are more than CPUs or GPUs.
    """
    resources = load_ray().cluster_resources()
    for kind in ("CPU", "GPU") if use_gpu else ("CPU",):
        there = int(resources.get(kind, 0))
        if number > there:
            raise UserError(
                f"{option} asks for {number} workers with a {kind} each, and the Ray cluster has "
                f"{there} {kind}{'' if there == 1 else 's'}: ask for fewer, or give "
                "launcher.address (in Python, ray.init) a larger cluster."
            )


def trials_at_once(num_replicas: int, use_gpu: bool = False) -> int:
    """How many trainings of so many workers the cluster has room for at a time, at least one.

    It is what `max_concurrent_trials` of a Ray Tune search over distributed trainings should be:
    Tune itself does not see the workers that a trial starts.
    """
    resources = load_ray().cluster_resources()
    return max(1, int(resources.get("GPU" if use_gpu else "CPU", 1) // num_replicas))


def trial_resources() -> Any:
    """What a trial of Ray Tune's needs itself, as a placement group: no CPU, for its workers have
    them. Tune insists on something, so it is a byte.
    """
    return load_ray("ray.tune").PlacementGroupFactory([{"memory": 1}])


def _reach(address: str) -> None:
    """Find soon that nobody listens at IP:PORT; Ray itself would try for minutes.

    Raises:
        OSError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_SECONDS):
            pass


def _bind_to_loopback() -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in _LOOPBACK.items()})
    # Read when Ray was imported, which may have been before.
    with contextlib.suppress(ImportError, AttributeError):  # no public name; it may go
        constants = importlib.import_module("ray._private.ray_constants")
        constants.ENABLE_RAY_CLUSTER = os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"


@contextlib.contextmanager
def _own_signal_handlers() -> Iterator[None]:
    """What this process does about signals stays; Ray would end it at once on SIGTERM."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
