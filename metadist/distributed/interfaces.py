"""The network interface that RPC, Gloo and NCCL bind to."""

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping

from metadist.distributed.world import is_single_node

_CHOSEN_BY = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
_VARIABLES = (*_CHOSEN_BY, "NCCL_SOCKET_IFNAME")
"""Each library reads a variable of its own."""


@contextlib.contextmanager
def bound_to_interface() -> Iterator[None]:
    """Sockets of RPC, Gloo and NCCL opened inside bind to one interface.

    On one node it is loopback. On several nodes it is the one that the user named in
    TP_SOCKET_IFNAME or GLOO_SOCKET_IFNAME, for all three; without, each library chooses. A
    variable that the user has set stays as it is.
    """
    interface = _interface()
    with default_environment(dict.fromkeys(_VARIABLES, interface) if interface else {}):
        yield


@contextlib.contextmanager
def default_environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Environment variables inside the block, except those that the user has set."""
    added = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _interface() -> str:
    """The interface's name; "" for each library's own choice."""
    if is_single_node():
        names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    else:
        names = [os.environ[name] for name in _CHOSEN_BY if name in os.environ]
    return names[0] if names else ""
