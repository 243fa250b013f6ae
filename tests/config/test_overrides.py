"""Options that the command line replaces: no values of those that they replace."""

import functools

import hydra
import pytest
from omegaconf import OmegaConf
from tiny import CONF

from metadist.algorithms import MAML
from metadist.config import compose, instantiate
from metadist.errors import UserError


class Mine(MAML):
    """An algorithm with defaults of its own."""

    def __init__(self, model: object, inner_lr: float = 0.7, inner_steps: int = 3):
        super().__init__(model)


class NeedsRate:
    """A class with an option that it requires."""

    def __init__(self, lr: float):
        self.lr = lr


MINE = f"{__name__}.Mine"

PRESET = """# @package _global_
defaults:
  - override /algorithm: reptile
  - override /optimizer: sgd
  - override /scheduler: step
  - override /model: mlp
algorithm: {inner_steps: 7}
optimizer: {lr: 0.5, momentum: 0.0}
scheduler: {step_size: 12}
model: {batch_norm: false}
"""


@pytest.fixture(scope="module")
def composed(tmp_path_factory):
    """Composes with conf/ and the preset `mine` of the user, the same overrides once."""
    root = tmp_path_factory.mktemp("options")
    (root / "experiment").mkdir()
    (root / "experiment" / "mine.yaml").write_text(PRESET)

    @functools.cache
    def composed(*overrides: str):
        with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
            return compose("maml", [f"hydra.searchpath=[file://{root}]", *overrides])

    return composed


def values(node) -> dict:
    return {key: node[key] for key in node if key != "_target_"}


def test_a_class_of_the_user_has_its_own_defaults(composed):
    cfg = composed(f"algorithm._target_={MINE}", "algorithm.inner_lr=0.2")
    assert values(cfg.algorithm) == {"inner_lr": 0.2} and cfg.algorithm._target_ == MINE
    assert cfg.model == composed().model


@pytest.mark.parametrize("group", ["optimizer", "reducer"])
def test_a_missing_option_is_given_as_its_error_says(composed, group):
    target = f"{group}._target_={__name__}.NeedsRate"  # in conf/, optimizer has the option
    with pytest.raises(UserError) as caught:
        instantiate(composed(target)[group], group)
    assert f"as in ++{group}.lr=VALUE." in str(caught.value)
    assert instantiate(composed(target, f"++{group}.lr=0.5")[group], group).lr == 0.5


def test_a_misspelt_key_of_a_class_of_the_user_is_refused(composed):
    cfg = composed(f"algorithm._target_={MINE}", "+algorithm.inner_step=2")
    with pytest.raises(UserError, match=r"inner_step is not an option .*did you mean inner_steps"):
        instantiate(cfg.algorithm, "algorithm", model=None)


def test_nodes_below_a_replaced_class_stay_if_the_command_line_sets_them(composed):
    cfg = composed("dataset._target_=mine.Glyphs", "dataset.normalize.mean=[0.5]")
    assert values(cfg.dataset).keys() == {"normalize"}
    assert cfg.dataset.normalize == {**composed().dataset.normalize, "mean": [0.5]}


def test_the_same_class_again_replaces_nothing(composed):
    target = f"algorithm._target_={composed().algorithm._target_}"
    assert composed(target, "algorithm.inner_lr=0.2") == composed("algorithm.inner_lr=0.2")


@pytest.mark.parametrize(
    ("overrides", "group", "expected"),
    [
        (
            [f"algorithm._target_={MINE}", "algorithm={inner_lr:0.3}"],
            "algorithm",
            {"inner_lr": 0.3},
        ),
        ([f"algorithm={{_target_:{MINE},inner_lr:0.3}}"], "algorithm", {"inner_lr": 0.3}),
        (
            ["+experiment=maml_omniglot_5w1s", "optimizer=sgd", "optimizer={lr:0.7}"],
            "optimizer",
            {"lr": 0.7},
        ),
    ],
)
def test_values_of_a_dictionary_are_kept(composed, overrides, group, expected):
    found = values(composed(*overrides)[group])
    assert {key: found[key] for key in expected} == expected
    assert group == "optimizer" or found == expected


def test_a_class_in_a_dictionary_is_followed_by_overrides_of_its_keys(composed):
    stop = "metadist.training.EarlyStopping"
    cfg = composed(f"+callbacks.mine={{_target_:{stop},patience:5}}", "callbacks.mine.patience=3")
    assert cfg.callbacks.mine == {"_target_": stop, "patience": 3}
    cfg = composed(f"+parts={{a:{{_target_:{stop}}},b:{{size:1}}}}", "parts.b.size=3")
    assert cfg.parts == {"a": {"_target_": stop}, "b": {"size": 3}}


def test_a_replaced_class_stays_uncalled(composed):
    partial = ("+model.block._target_=a.A", "+model.block._partial_=true", "+model.block.x=1")
    assert composed(*partial).model.block == {"_target_": "a.A", "_partial_": True, "x": 1}
    cfg = composed("+dataset._partial_=true", "dataset._target_=mine.Glyphs")
    assert values(cfg.dataset) == {"_partial_": True}


@pytest.mark.parametrize("value", ["${model.filters}", "${no.such.key}", "${no_such_resolver:1}"])
def test_an_interpolation_without_a_value_is_left_to_who_reads_it(composed, value):
    configuration = composed(f"model.filters={value}")
    assert OmegaConf.to_container(configuration, resolve=False)["model"]["filters"] == value


@pytest.mark.parametrize(
    "group",
    [
        *("algorithm", "scheduler"),
        *(pytest.param(group, marks=pytest.mark.slow) for group in ("optimizer", "model")),
    ],
)
def test_the_options_of_a_preset_can_be_replaced(composed, group):
    option = {"algorithm": "maml", "optimizer": "adam", "scheduler": "cosine", "model": "conv4"}
    chosen = f"{group}={option[group]}"
    preset, replaced = composed("+experiment=mine"), composed("+experiment=mine", chosen)
    assert replaced[group] == composed(chosen)[group]
    plain = [OmegaConf.to_container(each, resolve=False) for each in (replaced, preset)]
    assert {key for key in plain[0] if plain[0][key] != plain[1][key]} == {group}


def test_the_command_line_sets_values_of_what_it_chooses(composed):
    cfg = composed("scheduler=cosine", "+experiment=mine", "scheduler.eta_min=${optimizer.lr}")
    assert cfg.scheduler.eta_min == 0.5 and "step_size" not in cfg.scheduler
    cfg = composed("+experiment=mine", "algorithm=maml", f"algorithm._target_={MINE}")
    assert values(cfg.algorithm) == {}


def test_keys_of_what_the_command_line_chooses_can_be_deleted(composed):
    cfg = composed("+experiment=mine", "scheduler=cosine", "~scheduler.eta_min")
    assert values(cfg.scheduler).keys() == {"T_max"}


def test_values_of_a_preset_that_do_not_apply_are_named(composed, caplog):
    caplog.set_level("INFO")
    composed("+experiment=mine", "optimizer=adam", "model=mlp")
    (message,) = caplog.messages  # a model that the preset chooses too keeps its values
    assert message.startswith(
        "optimizer=adam replaces optimizer=sgd: the values for optimizer in the preset"
    )


def test_a_key_of_the_replaced_option_is_refused(composed):
    cfg = composed("+experiment=mine", "scheduler=cosine", "scheduler.step_size=3")
    with pytest.raises(UserError, match="step_size is not an option of CosineAnnealingLR"):
        instantiate(cfg.scheduler, "scheduler", optimizer=None)


@pytest.mark.parametrize("preset", [(), ("+experiment=maml_omniglot_5w1s",)])
def test_an_option_that_another_one_chooses_has_its_own_values(composed, preset):
    cfg = composed(*preset, "algorithm=reptile")
    assert values(cfg.optimizer) == {"lr": 1.0, "momentum": 0}
    cfg = composed(*preset, "algorithm=reptile", "optimizer.lr=0.5")
    assert values(cfg.optimizer) == {"lr": 0.5, "momentum": 0}
    cfg = composed(*preset, "algorithm=reptile", "optimizer=adam")
    assert values(cfg.optimizer) == {"lr": 0.001, "fused": True}


def test_choosing_what_the_preset_chooses_keeps_its_values(composed):
    preset = composed("+experiment=mine")
    assert preset.scheduler.step_size == 12
    assert composed("+experiment=mine", "scheduler=step", "model=mlp") == preset


OWN = """
hydra:
  searchpath: [pkg://metadist.conf]
defaults:
  - maml
  - override /model: mlp
  - _self_
algorithm: {inner_lr: 0.9}
model: {hidden: [7]}
optimizer: {lr: 0.5}
"""


def test_options_replace_the_values_of_a_primary_configuration_of_the_user(tmp_path, caplog):
    (tmp_path / "own.yaml").write_text(OWN)
    caplog.set_level("INFO")
    with hydra.initialize_config_dir(str(tmp_path), version_base="1.3"):
        unchanged = compose("own", ["seed=1"])
        again = compose("own", ["algorithm=maml", "model=mlp"])
        other = compose("own", ["algorithm=anil", "algorithm.inner_steps=4", "model=conv4"])
        reptile = compose("own", ["algorithm=reptile"])
    for cfg in (unchanged, again):
        assert (cfg.algorithm.inner_lr, cfg.model.hidden, cfg.optimizer.lr) == (0.9, [7], 0.5)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        expected = compose("maml", ["algorithm=anil", "algorithm.inner_steps=4"])
        plain = compose("maml", ["algorithm=reptile"])
    assert (other.algorithm, other.model) == (expected.algorithm, expected.model)
    assert other.optimizer.lr == 0.5
    assert (reptile.algorithm, reptile.optimizer) == (plain.algorithm, plain.optimizer)
    assert reptile.model.hidden == [7]
    message = "algorithm=anil replaces algorithm=maml: the values for algorithm in the preset or "
    assert f"{message}own.yaml do not apply" in caplog.text


def test_another_class_of_metadist_has_its_own_defaults(composed):
    cfg = composed("algorithm._target_=metadist.algorithms.Prototypical")
    assert values(cfg.algorithm) == {}


def test_choosing_an_option_without_a_preset_logs_nothing(caplog):
    caplog.set_level("INFO")
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        cfg = compose("ddp", ["model=mlp", "logger=console"])
    assert cfg.model.running_statistics is True and not caplog.messages


def test_options_that_set_no_values_of_others_are_composed_once(monkeypatch):
    calls, compose_with_hydra = [], hydra.compose
    monkeypatch.setattr(
        hydra, "compose", lambda *a, **k: calls.append(a) or compose_with_hydra(*a, **k)
    )
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        compose("maml", ["strategy=local", "logger=jsonl", "callbacks=ema", "seed=1"])
    assert len(calls) == 1
