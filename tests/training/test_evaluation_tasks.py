"""The tasks of validation and test: one list for every algorithm and every seed."""

import pytest
import torch
from tiny import build

from metadist.tasks import key_split, task_keys
from metadist.training import Trainer
from metadist.training import trainer as trainer_module


@pytest.fixture
def run_recorded(monkeypatch):
    """Runs a shrunken experiment; its evaluations' keys and its training's."""

    def run_with(directory, *overrides):
        evaluated, trained = [], []
        evaluate, keys = trainer_module.evaluate, trainer_module.training_keys

        def record(strategy, mapper, learner, keys, *rest):
            evaluated.append(keys)
            return evaluate(strategy, mapper, learner, keys, *rest)

        def draw(*arguments):
            trained.append(keys(*arguments))
            return trained[-1]

        with monkeypatch.context() as patch:
            patch.setattr(trainer_module, "evaluate", record)
            patch.setattr(trainer_module, "plot_run", lambda *_: [])
            patch.setattr(trainer_module, "training_keys", draw)
            experiment = build(directory, "strategy=local", "trainer.iterations=2", *overrides)
            results = Trainer(experiment).run()
        return experiment, results, evaluated, torch.cat(trained)

    return run_with


@pytest.mark.slow
def test_every_algorithm_and_every_seed_is_evaluated_on_the_same_tasks(tmp_path, run_recorded):
    first, results, lists, trained = run_recorded(tmp_path / "a")
    assert results["protocol"]["eval_seed"] == 0
    assert [key_split(keys[0]) for keys in lists] == ["validation", "test"]
    assert torch.equal(lists[1], task_keys(0, "test", 0, range(7)))
    for name, overrides in (
        ("b", ["seed=5"]),
        ("c", ["algorithm=prototypical"]),
        ("d", ["algorithm=reptile", "seed=6"]),
    ):
        other, _, theirs, others = run_recorded(tmp_path / name, *overrides)
        assert all(map(torch.equal, lists, theirs))
        assert torch.equal(trained, others) == (other.seed == first.seed)
        for keys in theirs:
            drawn, expected = (x.tasks.sample(keys[0]).query.inputs for x in (other, first))
            assert torch.equal(drawn, expected)


def test_another_list_can_be_asked_for(tmp_path, run_recorded):
    _, results, lists, _ = run_recorded(tmp_path, "trainer.eval_seed=9")
    assert results["protocol"]["eval_seed"] == 9
    assert all((keys[:, 0] == 9).all() for keys in lists)
