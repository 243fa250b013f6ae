"""Lengths in `conf/` that follow a run's: `${share:0.1,${trainer.iterations}}`."""

from omegaconf import OmegaConf


def share(part: float, whole: int) -> int:
    """A part of so many iterations, at least 1, so that a shorter run keeps its schedule's shape.

    Args:
        part: from 0 to 1.
        whole: iterations.
    """
    return max(1, round(part * whole))


OmegaConf.register_new_resolver("share", share, replace=True)
