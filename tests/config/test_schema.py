"""The top level of the configuration: unknown keys and values that do not fit."""

import pytest
from omegaconf import OmegaConf, open_dict
from tiny import compose

from metadist.config import validate
from metadist.errors import UserError


@pytest.fixture(scope="module")
def composed():
    return compose()


def changed(configuration, **values):
    copy = configuration.copy()
    with open_dict(copy):
        copy.update(values)
    return copy


@pytest.mark.parametrize("name", ["maml", "ddp"])
def test_both_experiments_fit(name):
    configuration = compose("seed=3", "timeout_seconds=7", name=name)
    settings = validate(configuration)
    assert (settings.seed, settings.threads, settings.timeout_seconds) == (3, 1, 7.0)
    assert settings.sweep.on_failure == "stop" and settings.resume is None


@pytest.mark.parametrize("name", ["maml", "ddp"])
def test_what_holds_without_overrides(name):
    settings = validate(compose(name=name))
    assert (settings.seed, settings.threads, settings.device) == (0, 1, "auto")
    assert (settings.timeout_seconds, settings.rendezvous_timeout_seconds) == (30, 300)
    assert settings.resume is settings.init_from is None


@pytest.mark.parametrize(
    "values",
    [
        {"shift": {"_target_": "metadist.tasks.Augment"}},
        {"shift": {"padding": 1}, "model": {"_target_": "my.Model", "padding": "${shift.padding}"}},
        {"width": 32, "model": {"_target_": "my.Model", "widths": ["${width}"]}},
        {"width": 32, "model": {"_target_": "my.Model", "width": "${oc.select:width,64}"}},
    ],
)
def test_a_group_or_a_value_of_the_users_own_is_accepted(composed, values):
    assert validate(changed(composed, **values)).seed == 0


def test_names_of_runs_may_be_numbers(composed):
    settings = validate(changed(composed, resume=2024, init_from=2025))
    assert (settings.resume, settings.init_from) == ("2024", "2025")


def test_numbers_may_come_from_the_environment(composed, monkeypatch):
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "17")
    monkeypatch.setenv("TIMEOUT", "2.5")
    values = {"seed": "${oc.env:SLURM_ARRAY_TASK_ID}", "timeout_seconds": "${oc.env:TIMEOUT}"}
    settings = validate(changed(composed, **values))
    assert (settings.seed, settings.timeout_seconds) == (17, 2.5)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"seed": -1}, "seed=-1 does not fit: .* greater than or equal to 0"),
        ({"seed": 2**63}, "seed=9223372036854775808 does not fit"),
        ({"seed": True}, "seed=True does not fit: .* integer"),
        ({"seed": "one"}, "seed=one does not fit: .* integer"),
        ({"seed": "1.0"}, r"seed=1\.0 does not fit: .* integer"),
        ({"seed": 1.0}, r"seed=1\.0 does not fit"),
        ({"threads": 0}, "threads=0 does not fit"),
        ({"resume": True}, "resume=True does not fit: write resume=auto or resume=PATH"),
        ({"init_from": True}, "init_from=True does not fit: write init_from=PATH or the name of"),
        ({"threads": 4097}, "threads=4097 does not fit"),
        ({"timeout_seconds": 0}, "timeout_seconds=0 does not fit: .* greater than 0"),
        ({"timeout_seconds": 1e6}, "timeout_seconds=1000000.0 does not fit"),
        ({"timeout_seconds": float("nan")}, "timeout_seconds=nan does not fit"),
        ({"timeout_seconds": True}, "timeout_seconds=True does not fit"),
        ({"rendezvous_timeout_seconds": 0}, "rendezvous_timeout_seconds=0 does not fit"),
        ({"timeout_seconds": "long"}, "timeout_seconds=long does not fit: .* number"),
        ({"sweep": "continue"}, "sweep=continue does not fit: write sweep.on_failure="),
        ({"sweep": 1}, "sweep=1 does not fit: write sweep.on_failure="),
        ({"sweep": None}, "sweep=None does not fit: write sweep.on_failure="),
        ({"sweep": {"on_failure": "maybe"}}, "sweep.on_failure=maybe .* 'stop' or 'continue'"),
        ({"sweep": {}}, "sweep.on_failure is missing"),
        (
            {"sweep": {"on_failure": "stop", "retries": 2}},
            "sweep.retries is not an option of sweep: its options are on_failure",
        ),
        ({"partitions": 1}, r"partitions is not a key or group .*: did you mean \+partition=…\?"),
        ({"sede": 1}, r"sede is not a key .*: did you mean seed=…\?"),
        ({"modell": {"_target_": "my.Model"}}, r"modell is not a key .*: did you mean model=…\?"),
        ({"shift": {"padding": 1}}, "shift is not a key or group of the configuration"),
        ({"zzz": 1}, r"zzz is not a key .*: check its spelling, or refer .* as \$\{zzz\}\."),
        ({"experiment": {"task": {"ways": 5}}}, "begin with the line `# @package _global_`"),
    ],
)
def test_what_does_not_fit_is_one_sentence(composed, values, message):
    with pytest.raises(UserError, match=message) as caught:
        validate(changed(composed, **values))
    assert "\n" not in str(caught.value)


def test_a_group_that_is_missing_is_named(composed):
    configuration = OmegaConf.create({key: composed[key] for key in composed if key != "model"})
    with pytest.raises(UserError, match="model is missing"):
        validate(configuration)
