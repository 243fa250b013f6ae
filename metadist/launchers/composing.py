"""Each job of a sweep composed once.

Hydra's basic sweeper composes every job to see that it can be, and its basic launcher, in the same
process, composes it again to run it: on jobs of seconds the second time shows.
"""

from collections.abc import Sequence

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

_MOST = 200  # configurations kept, of half a megabyte each
_BASIC = (
    "hydra._internal.core_plugins.basic_sweeper.BasicSweeper",
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
)


def compose_once(config: DictConfig) -> None:
    """Hands the launcher what the sweeper composed, where both are Hydra's basic ones.

    Other sweepers compose nothing, and other launchers compose in processes of their own.

    Args:
        config: the sweep's, with `hydra`.
    """
    if (config.hydra.sweeper._target_, config.hydra.launcher._target_) != _BASIC:
        return
    loader = GlobalHydra.instance().config_loader()
    compose = loader.load_sweep_config
    kept: dict[tuple[str, ...], DictConfig | None] = {}

    def once(master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        job = tuple(sweep_overrides)
        composed = kept.get(job)
        if composed is not None:
            kept[job] = None  # given once: a run writes into its configuration
            return composed
        composed = compose(master_config, list(sweep_overrides))
        if len(kept) < _MOST:
            kept.setdefault(job, composed)
        return composed

    loader.load_sweep_config = once
