"""The script that submitit would hand to SLURM for a sweep, without a SLURM at hand."""

from collections.abc import Sequence
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from metadist.errors import UserError


def slurm_script(conf: Path, name: str, overrides: Sequence[str]) -> str:
    """What `sbatch` would get for each job of `experiments/NAME.py -m OVERRIDES`.

    Args:
        conf: the folder of the configuration.
        name: the experiment's, "maml" or "ddp".
        overrides: the command's words, `hydra/launcher=submitit_slurm` and options of it among
            them, such as `hydra.launcher.gpus_per_node=4`. What is swept (`seed=1,2`) is left out:
            the script is the same for every job.

    Raises:
        UserError: submitit is not installed, or another launcher was chosen.
    """
    try:
        from submitit import SlurmExecutor
    except ImportError:
        raise UserError(
            "hydra/launcher=submitit_slurm needs submitit: pip install -e '.[sweeps]'."
        ) from None

    class Shown(SlurmExecutor):
        """It composes scripts on machines without SLURM too."""

        @classmethod
        def affinity(cls) -> int:
            return 1

    parsed = OverridesParser.create().parse_overrides(list(overrides))
    fixed = [
        word
        for word, override in zip(overrides, parsed, strict=True)
        if not override.is_sweep_override()
    ]
    with hydra.initialize_config_dir(str(conf), version_base="1.3"):
        composed = hydra.compose(name, fixed, return_hydra_config=True)
    node = composed.hydra.launcher
    if not str(node.get("_target_")).endswith("SlurmLauncher"):
        raise UserError(
            f"hydra.launcher is {node.get('_target_')}: add hydra/launcher=submitit_slurm."
        )
    no_parameters = ("_target_", "submitit_folder", "max_num_timeout")
    parameters = {
        str(key): OmegaConf.to_container(value) if OmegaConf.is_config(value) else value
        for key, value in node.items()
        if key not in no_parameters and value is not None
    }
    executor = Shown(folder=str(node.submitit_folder), max_num_timeout=node.max_num_timeout)
    executor.update_parameters(**executor._convert_parameters(parameters))
    return executor._make_submission_file_text(executor._submitit_command_str, "")
