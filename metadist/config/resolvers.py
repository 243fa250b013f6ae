"""OmegaConf resolvers that `conf/` uses; importing this module registers them."""

import datetime
from collections.abc import Callable

import omegaconf
from omegaconf import OmegaConf

from metadist.deadlines import wait_until
from metadist.distributed import get_rank
from metadist.distributed.errors import RendezvousTimeoutError
from metadist.distributed.store import RENDEZVOUS_TIMEOUT, world_store


def fraction(part: int | float, whole: int) -> int:
    """`${fraction:0.1,${trainer.iterations}}`: a fraction of a number of iterations, at least 1.

    Args:
        part: the fraction, from 0 to 1.
        whole: the number of iterations.
    """
    return max(1, round(part * whole))


_programs = 0
"""The number of calls of main functions in this process; restarts count from zero again."""


def begin_program() -> None:
    """Give `run_stamp` a new value. Every rank calls it, once per call of a main function."""
    global _programs
    _programs += 1


def run_stamp(timeout_seconds: object = RENDEZVOUS_TIMEOUT) -> str:
    """`${run_stamp:}`: the date and time at which rank zero started the run or the sweep.

    It is the same on every rank and after restarts. It includes microseconds, so that two runs that
    start at the same time have different directories.

    Raises:
        RendezvousTimeoutError: rank zero did not set it within `timeout_seconds`.
    """
    timeout = (
        float(timeout_seconds) if isinstance(timeout_seconds, int | float) else RENDEZVOUS_TIMEOUT
    )
    now = datetime.datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    store, key = world_store(timeout), f"metadist/run_stamp/{_programs}"
    if get_rank() == 0:
        return store.compare_set(key, "", now).decode()
    if not wait_until(lambda: store.check([key]), timeout, pause=0.01):
        raise RendezvousTimeoutError(
            f"rank zero did not set the run's directory within {timeout:g} s."
        )
    return store.get(key).decode()


_IS_OLD = omegaconf.__version__.startswith("2.3.")

register_resolver: Callable[..., None] = (
    OmegaConf.register_new_resolver if _IS_OLD else OmegaConf.register_resolver
)
"""OmegaConf's function of this purpose, which version 2.4 has renamed."""

register_resolver("fraction", fraction, replace=True)
register_resolver("run_stamp", run_stamp, use_cache=True, replace=True)
