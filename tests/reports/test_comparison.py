"""The configuration fingerprint, and differences between protocols."""

import pytest

from metadist.reports import (
    config_fingerprint,
    flatten_config,
    format_differences,
    is_runtime_key,
    protocol_differences,
)

CONFIGURATION = {
    "seed": 3,
    "model": {"_target_": "m.Model", "filters": 8},
    "dataset": {"root": "/here", "download": True, "classes": 100},
    "trainer": {"iterations": 5, "meta_batch_size": 4, "clip_value": None, "clip_norm": 1.0},
    "algorithm": {"inner_lr": 0.4},
    "task": {"ways": 5},
    "optimizer": {"lr": 0.1},
    "scheduler": {"gamma": 0.5},
    "reducer": {"_target_": "m.Mean"},
    "strategy": {"_target_": "m.Rpc"},
    "callbacks": {"ema": {"decay": 0.9}},
    "logger": {"console": {"_target_": "m.Console"}},
    "resume": "auto",
}


@pytest.mark.parametrize(
    "key",
    [
        *("dataset.download", "logger", "logger.console.every", "launcher.jobs"),
        *("hydra.run.dir", "resume", "sweep.on_failure", "timeout_seconds"),
        *("rendezvous_timeout_seconds", "trainer.checkpoint_every", "trainer.keep_checkpoints"),
    ],
)
def test_runtime_keys(key):
    assert is_runtime_key(key)


@pytest.mark.parametrize(
    "key", ["dataset", "dataset.classes", "dataset.root", "seed", "resumed", "trainer.root"]
)
def test_other_keys_are_not_runtime_keys(key):
    assert not is_runtime_key(key)


def test_values_by_dotted_keys():
    found = flatten_config(CONFIGURATION)
    assert found["model.filters"] == "8"
    assert found["trainer.clip_value"] == "None"
    assert not [key for key in found if key.startswith(("logger", "resume"))]
    engine = {"strategy": {"engine": "${oc.select:allreduce_engine,sum}"}}
    assert flatten_config(engine)["strategy.engine"] == "sum"
    assert flatten_config({**engine, "allreduce_engine": "ddp"})["strategy.engine"] == "ddp"


def test_the_fingerprint_holds_what_determines_the_numbers():
    assert config_fingerprint(CONFIGURATION) == {
        "seed": "3",
        "model._target_": "m.Model",
        "model.filters": "8",
        "dataset.classes": "100",
        "trainer.meta_batch_size": "4",
        "trainer.clip_value": "None",
        "trainer.clip_norm": "1.0",
        "algorithm.inner_lr": "0.4",
        "task.ways": "5",
        "optimizer.lr": "0.1",
        "scheduler.gamma": "0.5",
        "reducer._target_": "m.Mean",
        "callbacks.ema.decay": "0.9",
    }


PROTOCOL = {"ways": 5, "shots": 1, "eval_inner_steps": 3}


def test_equal_protocols_do_not_differ():
    assert protocol_differences({"a": PROTOCOL, "b": dict(PROTOCOL)}) == {}
    assert protocol_differences({"a": PROTOCOL}) == protocol_differences({}) == {}


def test_each_difference_is_named_with_who_has_what():
    runs = {"a": PROTOCOL, "b": {**PROTOCOL, "shots": 5}, "c": {**PROTOCOL, "rotations": True}}
    found = protocol_differences(runs)
    assert found == {
        "shots": {"a": 1, "b": 5, "c": 1},
        "rotations": {"a": "—", "b": "—", "c": True},
    }
    assert format_differences(found) == [
        "shots differs: 1 (a, c), 5 (b)",
        "rotations differs: — (a, b), True (c)",
    ]
    assert list(protocol_differences(runs, ignore=["shots"])) == ["rotations"]
