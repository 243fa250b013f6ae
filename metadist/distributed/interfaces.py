"""The network interface that RPC, Gloo and NCCL bind to."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping

from metadist.distributed.errors import connection_errors_as_worker_lost
from metadist.distributed.world import host_name, is_single_node
from metadist.errors import UserError

_USER_VARIABLES = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_VARIABLES = (*_USER_VARIABLES, "NCCL_SOCKET_IFNAME")
"""The variables of TensorPipe, Gloo and NCCL: each library reads its own."""


@contextlib.contextmanager
def bound_to_interface() -> Iterator[None]:
    """Bind the sockets that RPC, Gloo and NCCL open inside the block to one interface.

    On one node this is loopback. On several nodes it is the interface that the user named in
    TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, for all three libraries; if neither is set, each library
    chooses its own. Variables that the user has set are not changed.

    Raises:
        UserError: a variable names an interface that this machine does not have.
        WorkerLostError: the ranks cannot connect in the block.
    """
    _check_interfaces()
    interface = _interface()
    variables = dict.fromkeys(_VARIABLES, interface) if interface else {}
    with (
        connection_errors_as_worker_lost("the ranks cannot connect to each other", _advice()),
        default_environment(variables),
    ):
        yield


def _check_interfaces() -> None:
    own = [name for _, name in socket.if_nameindex()]
    for variable in _USER_VARIABLES:
        value = os.environ.get(variable, "")
        if unknown := [name for name in value.split(",") if name and name not in own]:
            raise UserError(
                f"{variable}={value}: {host_name()} has no network interface {unknown[0]}: name "
                f"one of {', '.join(own)}."
            )


def _advice() -> str:
    if is_single_node():
        return ""
    return (
        ": set GLOO_SOCKET_IFNAME on every node to the interface with the address that the other "
        "nodes reach."
    )


@contextlib.contextmanager
def default_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables inside the block, except those that are set already."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _interface() -> str:
    """The interface's name; "" if each library is to choose its own."""
    if is_single_node():
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    else:
        names = [os.environ[name] for name in _USER_VARIABLES if name in os.environ]
    return names[0] if names else ""
