"""Ray Tune over whole experiments: it finds the better of two inner learning rates on glyphs."""

import math
from pathlib import Path

import pytest

pytest.importorskip("ray")

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from tiny import SMALL, compose, run_results

from metadist.errors import UserError
from metadist.launchers.ray.tune import format_value, tune_experiment

pytestmark = pytest.mark.slow  # `make test-slow` installs Ray

LONGER = (
    "model.filters=8",
    "trainer.iterations=30",
    "trainer.eval_every=5",
    "trainer.validation_tasks=40",
    "trainer.checkpoint_every=10",
)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        0.4,
        1e-05,
        -math.inf,
        "glyphs",
        "my_module.MyAlgorithm",
        "data/omni-glot.zip",
        "",
        "1e-3",
        "7",
        "null",
        "True",
        "nan",
        "null.x",
        "a folder (new), 1=2",
        "[1,2]",
        "choice(1,2)",
        "it's",
        "C:\\",
        "a\\'b\\\\'",
        "\\n 'x\\",
        "two\nlines\n",
        [1, "2", None, ["a b", False]],
        [],
        {},
        {"lr": 0.1, "name": "1", "more": {"a.b-c": [None], "d_1/e": "f g"}, 3: "h"},
    ],
    ids=repr,
)
def test_an_option_has_the_spaces_value(value):
    read = OverridesParser.create().parse_override(f"key={format_value(value)}")
    assert repr(read.value()) == repr(value) and not read.is_sweep_override()


def test_what_no_option_can_have_is_one_sentence():
    with pytest.raises(UserError, match="of type set"):
        format_value({"key": {1, 2}})
    with pytest.raises(UserError, match="the key '1' of a dictionary"):
        format_value({"1": 2})


def test_a_groups_option_and_null_can_be_searched_over():
    space = {"algorithm": "anil", "trainer.clip_norm": None, "optimizer": {"lr": 0.25}}
    found = compose(*(f"{key}={format_value(value)}" for key, value in space.items()))
    assert found.algorithm._target_ == "metadist.algorithms.ANIL"
    assert found.trainer.clip_norm is None
    assert found.optimizer.lr == 0.25 and found.optimizer._target_ == compose().optimizer._target_


def test_options_that_do_not_fit_are_refused_before_any_trial(ray, tmp_path):
    with pytest.raises(UserError, match="modell is not a key or group"):
        tune_experiment("maml", {}, ["modell=mlp"], directory=tmp_path)
    for metric, mode in (("validation_mse", "max"), ("validation_accuracy", "min")):
        with pytest.raises(UserError, match="leave mode="):
            tune_experiment("maml", {}, directory=tmp_path, metric=metric, mode=mode)
    with pytest.raises(UserError, match="metric='validation_error' needs a mode"):
        tune_experiment("maml", {}, directory=tmp_path, metric="validation_error")
    with pytest.raises(UserError, match="num_workers=99 asks for 99 workers"):
        tune_experiment("maml", {}, directory=tmp_path, num_workers=99)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("scheduler", ["grid", "asha"])
def test_it_finds_the_better_inner_rate_on_glyphs(ray, tmp_path, scheduler):
    from ray import tune
    from ray.tune.schedulers import ASHAScheduler

    asha = ASHAScheduler(time_attr="iteration", max_t=30, grace_period=5, reduction_factor=2)
    others = {"strategy": "rpc", "trainer.clip_norm": None}
    found = tune_experiment(
        "maml",
        {"algorithm.inner_lr": tune.grid_search([0.4, 0.0001])} | others,
        [*SMALL, *LONGER],
        directory=tmp_path,
        num_workers=2,
        scheduler=asha if scheduler == "asha" else None,
    )
    best = found.get_best_result()
    assert not found.errors and best.config == {"algorithm.inner_lr": 0.4} | others
    # What the trial reported is what its run measured; the run's directory is whole.
    run = Path(best.metrics["run_directory"])
    results = run_results(run)
    assert best.metrics["validation_accuracy"] == results["validation_accuracy"]
    assert OmegaConf.load(run / ".hydra" / "config.yaml").trainer.clip_norm is None
    assert best.metrics["iteration"] == 30 and results["world_size"] == 2
    reports = list(best.metrics_dataframe["iteration"])
    assert sorted(set(reports)) == [5, 10, 15, 20, 25, 30]
    worse = next(each for each in found if each.config != best.config)
    assert (worse.metrics["iteration"] < 30) == (scheduler == "asha")
