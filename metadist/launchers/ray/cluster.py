"""Starts a Ray cluster on this machine or connects to one. Ray is imported on demand."""

import contextlib
import importlib
import logging
import os
import secrets
import socket
import threading
from types import ModuleType
from typing import Any

from metadist.distributed.world import usable_cpus
from metadist.errors import UserError, first_line
from metadist.metrics import counted
from metadist.training.signals import preserved_handlers

_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray Train logs an error every second, because a local node has no dashboard.
    "RAY_LOGGER_LEVEL": "error",
    # Forwarded lines have no colors, because they may go to a file.
    "RAY_COLOR_PREFIX": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    # Workers keep the working directory of the command, so that relative paths stay valid.
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    # The interval at which Ray Train polls its workers for reports and failures; by default 2 s.
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_TRAIN_METRICS_ENABLED": "0",
}
_LOOPBACK = {
    # "0" makes Ray use 127.0.0.1 as the node address, as it does by default on Windows and macOS.
    # The variable has an effect on every platform.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # A local node is never preempted.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
}
_CONNECT_TIMEOUT = 5.0

_init_lock = threading.Lock()
_reserved_ports: list[socket.socket] = []


def load_ray(module: str = "ray") -> ModuleType:
    """Import Ray, or one of its modules, with metadist's defaults for Ray's environment variables.

    Raises:
        UserError: Ray is not installed.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] in ("ray", "pyarrow", "pandas"):
            raise UserError(
                f"Ray is not installed ({error.name} is missing): pip install -e '.[ray]' in "
                "metadist's folder."
            ) from None
        raise


def init_ray(address: str | None = None) -> bool:
    """Use the Ray of this process, connect to the cluster at `address`, or start a local node.

    A local node has as many CPUs as this process may use, binds to loopback, has no dashboard and
    ends with this process. Ray forwards the output of workers (`log_to_driver`).

    Args:
        address: the "IP:PORT" of a running cluster's head, or "auto". Default: the environment
            variable RAY_ADDRESS, or a local node.

    Returns:
        Whether this call started a local node.

    Raises:
        UserError: Ray is not installed, or there is no cluster at the address.
    """
    ray = load_ray()
    with _init_lock:
        if ray.is_initialized():
            return False
        address = address or os.environ.get("RAY_ADDRESS") or None
        options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": True}
        with preserved_handlers():  # Ray installs a handler that exits on SIGTERM
            if address is None:
                _bind_to_loopback()
                _set_token()
                ray.init(
                    address="local", num_cpus=usable_cpus(), include_dashboard=False, **options
                )
            else:
                try:
                    _check_reachable(address)
                    ray.init(address=address, **options)
                except (ConnectionError, ValueError, RuntimeError, OSError) as error:
                    raise UserError(
                        f"there is no Ray cluster at {address} ({first_line(error)}): start "
                        "one with `ray start --head`, or leave the address out to start Ray on "
                        "this machine."
                    ) from None
        return address is None


def shutdown_ray() -> None:
    """Stop a local node that `init_ray` started, or disconnect from a cluster."""
    ray = load_ray()
    with _init_lock:
        if ray.is_initialized():
            ray.shutdown()


def check_resources(num_workers: int, use_gpu: bool, option: str) -> None:
    """Refuse more workers than the cluster has CPUs or GPUs for.

    Args:
        num_workers: the number of workers, with one CPU each, or one CPU and one GPU each.
        use_gpu: whether each worker needs a GPU.
        option: the option that set `num_workers`, for the message.

    Raises:
        UserError: the cluster has fewer CPUs or GPUs.
    """
    resources = load_ray().cluster_resources()
    for kind in ("CPU", "GPU") if use_gpu else ("CPU",):
        available = int(resources.get(kind, 0))
        if num_workers > available:
            raise UserError(
                f"{option} asks for {num_workers} workers with a {kind} each, and the Ray cluster "
                f"has {counted(available, kind)}: ask for fewer, or give "
                "launcher.address (in Python, ray.init) a larger cluster."
            )


def max_concurrent_trials(num_workers: int, use_gpu: bool = False) -> int:
    """The number of runs of `num_workers` workers that fit on the cluster at a time, at least one.

    Use it as `max_concurrent_trials` of a Ray Tune search over distributed training runs, because
    Tune does not count the workers that a trial starts.
    """
    resources = load_ray().cluster_resources()
    return max(1, int(resources.get("GPU" if use_gpu else "CPU", 1) // num_workers))


def trial_resources() -> Any:
    """The resources of a Ray Tune trial itself: one byte of memory, because its workers request the
    CPUs and Tune does not accept an empty request.
    """
    return load_ray("ray.tune").PlacementGroupFactory([{"memory": 1}])


def reserve_port() -> int:
    """A free port, reserved for rank zero's store as long as this process lives.

    While a socket is bound to the port and does not listen, no other process is given the port, but
    a socket with SO_REUSEADDR, such as the store's, can listen on it.
    """
    bound_socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound_socket.bind(("", 0))
    _reserved_ports.append(bound_socket)
    return bound_socket.getsockname()[1]


def _check_reachable(address: str) -> None:
    """Try a TCP connection, because Ray itself would retry for minutes.

    Raises:
        OSError: nothing listens at IP:PORT.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_TIMEOUT):
            pass


def _bind_to_loopback() -> None:
    os.environ.update({name: os.environ.get(name, value) for name, value in _LOOPBACK.items()})
    # Ray reads the variable when it is imported, which may have happened before.
    with contextlib.suppress(ImportError, AttributeError):  # not a public name
        constants: Any = importlib.import_module("ray._private.ray_constants")
        constants.ENABLE_RAY_CLUSTER = os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "1"


def _set_token() -> None:
    """Set an authentication token for a local node, which other users of the machine cannot read.

    Since 2.60 Ray requires a token for a local node, unless RAY_AUTH_MODE disables it, and would
    write one to ~/.ray/auth_token.
    """
    variables = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if not any(name in os.environ for name in variables):
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
