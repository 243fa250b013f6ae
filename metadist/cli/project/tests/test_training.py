"""The experiment, run by the command with small numbers."""

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent


def test_the_experiment_trains(tmp_path):
    command = [sys.executable, "-m", "metadist", "maml", "--config-dir", "conf"]
    options = ["trainer.iterations=20", "trainer.eval_tasks=50", "strategy=local"]
    subprocess.run(
        [*command, "+experiment=my_experiment", *options, f"hydra.run.dir={tmp_path}"],
        cwd=PROJECT,
        check=True,
        timeout=600,
    )
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert results["iterations"] == 20
    assert results["test_accuracy"] > 0.3  # chance is 0.2
