"""Ray Tune over whole experiments: it finds the better of two inner learning rates on glyphs."""

import json
from pathlib import Path

import pytest

pytest.importorskip("ray")

from ray_workers import ROOT
from tiny import SMALL

from metadist.errors import UserError
from metadist.launchers.ray.tune import tune_experiment

pytestmark = pytest.mark.slow  # `make test-slow` installs Ray

MAML = ROOT / "experiments" / "maml.py"
LONGER = (
    "model.filters=8",
    "trainer.iterations=30",
    "trainer.eval_every=5",
    "trainer.validation_tasks=40",
    "trainer.checkpoint_every=10",
)


@pytest.mark.slow
def test_options_that_do_not_fit_are_refused_before_any_trial(ray, tmp_path):
    with pytest.raises(UserError, match="the options do not fit"):
        tune_experiment(MAML, {}, ["modell=mlp"], directory=tmp_path)
    with pytest.raises(UserError, match="num_workers=99 asks for 99 workers"):
        tune_experiment(MAML, {}, directory=tmp_path, num_workers=99)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["grid", "asha"])
def test_it_finds_the_better_inner_rate_on_glyphs(ray, tmp_path, scheduler):
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    asha = ASHAScheduler(time_attr="iteration", max_t=30, grace_period=5, reduction_factor=2)
    found = tune_experiment(
        MAML,
        {"algorithm.inner_lr": tune.grid_search([0.4, 0.0001])},
        [*SMALL, *LONGER],
        directory=tmp_path,
        num_workers=2,
        scheduler=asha if scheduler == "asha" else None,
    )
    best = found.get_best_result()
    assert not found.errors and best.config == {"algorithm.inner_lr": 0.4}
    # What the trial reported is what its run measured; the run's directory is whole.
    run = Path(best.metrics["run_directory"])
    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    assert best.metrics["validation_accuracy"] == results["validation_accuracy"]
    assert best.metrics["iteration"] == 30 and results["world_size"] == 2
    reports = list(best.metrics_dataframe["iteration"])
    assert sorted(set(reports)) == [5, 10, 15, 20, 25, 30]
    worse = next(each for each in found if each.config != best.config)
    assert (worse.metrics["iteration"] < 30) == (scheduler == "asha")
