"""What `conf/` needs so that all ranks agree on one directory that rank zero writes."""

import datetime
import time

from omegaconf import OmegaConf

from metadist.distributed import get_rank
from metadist.distributed.errors import RendezvousTimeoutError
from metadist.distributed.rendezvous import world_store

_TIMEOUT = 30.0


def register_resolvers() -> None:
    """Make `${run_stamp:}` known to OmegaConf. Any process, any time."""
    OmegaConf.register_new_resolver("run_stamp", _run_stamp, use_cache=True, replace=True)


def _run_stamp(timeout_seconds: object = _TIMEOUT) -> str:
    """The date and time at which rank zero started, the same on every rank and after restarts.

    To the microsecond: two runs started at once have a directory each.
    """
    timeout = float(timeout_seconds) if isinstance(timeout_seconds, int | float) else _TIMEOUT
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    store, key = world_store(timeout), "metadist/run_stamp"
    if get_rank() == 0:
        return store.compare_set(key, "", now).decode()
    deadline = time.monotonic() + timeout
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise RendezvousTimeoutError(
                f"rank zero did not name the run's directory within {timeout:g} s."
            )
        time.sleep(0.01)
    return store.get(key).decode()
