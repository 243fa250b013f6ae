"""Which run it is."""

import pytest
from metadist.training.identity import flat, identity, is_around

CONFIGURATION = {
    "seed": 3,
    "model": {"_target_": "m.Model", "filters": 8},
    "dataset": {"root": "/here", "download": True, "classes": 100},
    "trainer": {"iterations": 5, "meta_batch_size": 4, "clip_value": None, "clip_norm": 1.0},
    "strategy": {"_target_": "m.Rpc"},
    "logger": {"console": {"_target_": "m.Console"}},
    "resume": "auto",
}


@pytest.mark.parametrize(
    "key", ["dataset.root", "logger", "logger.console.every", "launcher.jobs", "hydra.run.dir"]
)
def test_what_lies_around_a_run(key):
    assert is_around(key)


@pytest.mark.parametrize("key", ["dataset", "dataset.classes", "seed", "resumed", "trainer.root"])
def test_what_belongs_to_it(key):
    assert not is_around(key)


def test_values_by_dotted_keys():
    found = flat(CONFIGURATION)
    assert found["model.filters"] == "8"
    assert found["trainer.clip_value"] == "None"
    assert not [key for key in found if key.startswith(("logger", "resume", "dataset.root"))]


def test_the_numbers_follow_from_these():
    assert identity(CONFIGURATION) == {
        "seed": "3",
        "model._target_": "m.Model",
        "model.filters": "8",
        "dataset.classes": "100",
        "trainer.meta_batch_size": "4",
        "trainer.clip_value": "None",
        "trainer.clip_norm": "1.0",
    }
