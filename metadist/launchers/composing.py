"""Each job of a sweep composed once.

Hydra's basic sweeper composes every job to see that it can be, and its basic launcher, in the same
process, composes it again to run it: on jobs of seconds the second time shows.
"""

from collections.abc import Sequence

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig

_MOST = 200  # jobs whose configuration is kept, half a megabyte each


def compose_once(config: DictConfig) -> None:
    """Hands the launcher what the sweeper composed, where both are Hydra's basic ones.

    Of others nothing is assumed. A job is then run as `conf/` was when the sweep began, as far as
    configurations are kept; the jobs after those are composed anew when their turn comes.

    Args:
        config: the sweep's, with `hydra`.
    """
    basic = "hydra._internal.core_plugins.basic_"
    parts = (config.hydra.sweeper._target_, config.hydra.launcher._target_)
    if parts != (f"{basic}sweeper.BasicSweeper", f"{basic}launcher.BasicLauncher"):
        return
    loader = GlobalHydra.instance().config_loader()
    compose = loader.load_sweep_config
    kept: dict[tuple[str, ...], DictConfig | None] = {}

    # Hydra gives the arguments by these names as well.
    def load_sweep_config(master_config: DictConfig, sweep_overrides: Sequence[str]) -> DictConfig:
        job = tuple(sweep_overrides)
        composed = kept.get(job) if master_config is config else None
        if composed is not None:
            kept[job] = None  # given once: a run writes into its configuration
            return composed
        composed = compose(master_config, list(sweep_overrides))
        if master_config is config and len(kept) < _MOST:
            kept.setdefault(job, composed)
        return composed

    loader.load_sweep_config = load_sweep_config
