"""The script that SLURM would get, composed without it."""

from pathlib import Path

import pytest

from metadist.errors import UserError
from metadist.launchers.slurm import slurm_script

CONF = Path(__file__).resolve().parents[2] / "conf"


def test_the_script_asks_for_what_was_configured(tmp_path):
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    words = ["hydra/launcher=submitit_slurm", "launcher=torchrun", "launcher.nproc_per_node=4"]
    words += ["hydra.launcher.gpus_per_node=4", "hydra.launcher.timeout_min=720"]
    words += [
        "hydra.launcher.mem_gb=16",
        "seed=range(3)",
        "hydra.launcher.setup=['module load a','module load b']",
        "algorithm.inner_lr=0.1,0.4",
        f"hydra.sweep.dir={tmp_path}",
    ]
    script = slurm_script(CONF, "maml", words)
    assert script.startswith("#!/bin/bash")
    for line in ("gpus-per-node=4", "time=720", "mem=16GB", "job-name=maml", "nodes=1"):
        assert f"#SBATCH --{line}\n" in script, script
    assert "module load a\nmodule load b\n" in script  # a comma alone makes no sweep
    assert str(tmp_path) in script and "srun " in script


def test_another_launcher_is_refused():
    pytest.importorskip("submitit")
    with pytest.raises(UserError, match="submitit_slurm"):
        slurm_script(CONF, "maml", [])
