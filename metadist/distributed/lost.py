"""What is raised when another process of the world is gone."""

import contextlib
from collections.abc import Iterator


class PeerLost(ConnectionError):
    """Another process of the world died, froze or cannot be reached."""


class SomePeerLost(PeerLost):
    """Some other process is gone, and the one who raises it cannot tell which."""


class NeverCame(PeerLost, TimeoutError):
    """A process of the world did not come to a meeting in time."""


class AllGaveUp(NeverCame):
    """Rank zero has given up waiting for others than this one, and says so itself."""


_OF_BACKENDS = ("gloo", "nccl", "connection closed", "connection reset", "broken pipe")


@contextlib.contextmanager
def peers_in_backend() -> Iterator[None]:
    """Around collectives that run inside other code: what Gloo and NCCL say of a rank that is
    gone, as `SomePeerLost`; any other error as it is.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(word in str(error).lower() for word in _OF_BACKENDS):
            raise
        reason = str(error).strip().splitlines()[0]
        raise SomePeerLost(f"a rank left or stopped during a collective ({reason}).") from None
