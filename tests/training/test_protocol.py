"""Comparability of results, and the test of the best checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
from omegaconf import DictConfig
from tiny import SMALL, build, compose, train
from worlds import run_world

from metadist.config import build_experiment
from metadist.distributed import get_rank
from metadist.errors import UserError
from metadist.reports import protocol_differences
from metadist.training import Trainer, saved_state
from metadist.training.checkpoints import Checkpoints, read_checkpoint, write_checkpoint
from metadist.training.export import export_weights
from metadist.training.resume import replace_later_checkpoints
from metadist.training.saved_state import load_best

CHANGES = {
    "trainer.eval_tasks=5": "test_tasks",
    "task.queries=1": "queries",
    "task.train_shots=2": "train_shots",
    "algorithm.eval_inner_steps=2": "eval_inner_steps",
    "algorithm.transductive=false": "batch_norm",
    "trainer.test_checkpoint=best": "checkpoint",
    "trainer.eval_seed=4": "eval_seed",
    "model.pooling=max": "backbone",
}


def test_runs_carry_what_they_differ_in(tmp_path):
    short = ["strategy=local", "trainer.iterations=1", "trainer.validation_tasks=1"]
    one = train(str(tmp_path / "a"), *short, "optimizer.lr=0.1", "seed=3")
    other = train(str(tmp_path / "b"), *short, *CHANGES, "algorithm.inner_lr=0.2")
    found = protocol_differences({"one": one["protocol"], "other": other["protocol"]})
    assert set(found) == set(CHANGES.values())
    assert (one["seed"], other["seed"]) == (3, 0)
    assert [run["method"]["options"]["inner_lr"] for run in (one, other)] == [0.4, 0.2]
    assert [run["method"]["model"]["pooling"] for run in (one, other)] == ["stride", "max"]
    expected = "Conv4, filters=4, pooling=stride, flatten=False, dropout=0.0"
    assert one["protocol"]["backbone"] == expected
    # The width of the network is a difference, and the kernels are none.
    wider = train(str(tmp_path / "c"), *short, "model.filters=5", "model.native=false")
    found = protocol_differences({"one": one["protocol"], "wider": wider["protocol"]})
    assert set(found) == {"backbone"}
    assert "native" not in found["backbone"]["wider"]


def best_and_last(directory: Path, first: DictConfig, second: DictConfig) -> None:
    """A run whose validation is best at iteration 2, tested at the end and then at its best."""
    x = build_experiment(first, directory / "run", "maml")
    log_metrics = x.logger.log_metrics

    def nothing_is_better(line) -> None:
        log_metrics(line)
        if "validation_loss" in line and line["iteration"] == 4:
            x.state.best["accuracy"] = 2.0

    x.logger.log_metrics = nothing_is_better
    last = Trainer(x).run()
    best = Trainer(build_experiment(second, directory / "run", "maml")).run()
    if get_rank() == 0:
        for name, results in (("last", last), ("best", best)):
            (directory / f"{name}.json").write_text(json.dumps(results), encoding="utf-8")


@pytest.fixture(scope="module")
def tested_twice(tmp_path_factory) -> Path:
    """The directory in which `best_and_last` ran."""
    directory = tmp_path_factory.mktemp("tested")
    first = compose(*SMALL, "strategy=allreduce")
    second = compose(*SMALL, "strategy=allreduce", "resume=auto", "trainer.test_checkpoint=best")
    run_world(best_and_last, 2, directory, first, second)
    return directory


def test_the_best_checkpoint_is_tested_when_asked_for(tmp_path, tested_twice):
    last, best = (json.loads((tested_twice / f"{n}.json").read_text()) for n in ("last", "best"))
    assert last["protocol"]["checkpoint"] == "last" and last["tested_iteration"] == 4
    assert best["protocol"]["checkpoint"] == "best by validation"
    assert best["tested_iteration"] == 2 == best["best_validation"]["iteration"]
    # What a sweep goes by is the figure of the network that is tested.
    chosen = best["best_validation"]["accuracy"]
    assert best["validation_accuracy"] == chosen != last["validation_accuracy"]
    assert best["iterations"] == 4 and best["test_loss"] != last["test_loss"]
    # What the run goes on from is still its last state.
    saved = read_checkpoint(tested_twice / "run/checkpoints/iteration-00000004.pt")
    assert saved["iteration"] == 4
    # A run that ended after the best iteration has the same test.
    short = train(str(tmp_path), "strategy=local", "trainer.iterations=2")
    assert short["test_loss"] == pytest.approx(best["test_loss"], rel=1e-6)


def test_the_tested_state_is_that_of_the_results(tmp_path, tested_twice):
    run = shutil.copytree(tested_twice / "run", tmp_path / "run")
    path, contents = saved_state.tested_checkpoint(run)
    assert (path.name, contents["iteration"]) == ("best-00000002.pt", 2)  # tested again on resume
    export_weights(run, tmp_path / "weights.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match=path.name):  # the last one is another state
        saved_state.tested_checkpoint(run)
    path.write_bytes(content)
    (run / "results.json").unlink()
    assert saved_state.tested_checkpoint(run)[0].name == "iteration-00000004.pt"


def test_the_state_of_an_unfinished_run_is_the_best_where_that_will_be_tested(tmp_path):
    train(str(tmp_path), "strategy=local", "trainer.test_checkpoint=best")
    (tmp_path / "results.json").unlink()
    folder = tmp_path / "checkpoints"
    newest, best = folder / "iteration-00000004.pt", folder / "best-00000002.pt"
    contents = read_checkpoint(newest)
    write_checkpoint(best, read_checkpoint(folder / "iteration-00000002.pt"))
    write_checkpoint(newest, contents | {"best": {"iteration": 2, "accuracy": 2.0}})
    assert saved_state.tested_checkpoint(tmp_path)[0] == best
    write_checkpoint(newest, contents | {"best": {}})  # before the first validation
    assert saved_state.tested_checkpoint(tmp_path)[0] == newest


@pytest.mark.parametrize(
    "other",
    ["trainer.eval_seed=5", pytest.param("trainer.validation_tasks=4", marks=pytest.mark.slow)],
)
def test_validations_of_other_tasks_are_not_compared(tmp_path, caplog, other):
    options = ("strategy=local", "callbacks=early_stopping")
    train(str(tmp_path), *options)
    same = build(tmp_path, *options, "resume=auto")
    assert same.state.best and same.state.validated == 4 and not caplog.messages
    assert same.callbacks["early_stopping"].best is not None
    x = build(tmp_path, *options, "resume=auto", other, "trainer.test_checkpoint=best")
    assert "of other tasks" in caplog.text and not x.state.best
    assert x.callbacks["early_stopping"].best is None
    assert Trainer(x).run()["tested_iteration"] == 4  # validated anew, and the only one


def test_the_best_by_other_validation_tasks_is_no_longer_the_best(tmp_path):
    train(str(tmp_path), "strategy=local")
    saved = Checkpoints(tmp_path)
    best = saved.best
    other = ("resume=auto", "trainer.eval_seed=5", "trainer.eval_every=0")
    assert train(str(tmp_path), "strategy=local", *other)["best_validation"] == {}
    assert saved.best is None and best.with_name(f"{best.name}.superseded").exists()


def test_the_best_checkpoint_that_a_run_resumes_from_is_kept_until_the_next(tmp_path):
    train(str(tmp_path), "strategy=local")
    saved = Checkpoints(tmp_path)
    for _, path in saved.iterations():
        path.unlink()
    best = saved.best
    x = build(tmp_path, "strategy=local", "resume=auto", "trainer.eval_seed=5")
    replace_later_checkpoints(x)
    assert not x.state.best and saved.candidates()[0] == best


def test_a_stop_after_other_validation_tasks_is_withdrawn(tmp_path):
    options = ("strategy=local", "callbacks=early_stopping", "trainer.iterations=3")
    options = (*options, "callbacks.early_stopping.patience=1", "trainer.eval_every=1")
    never = "callbacks.early_stopping.min_delta=2.0"
    assert train(str(tmp_path), *options, never)["iterations"] == 2
    assert build(tmp_path, *options, never, "resume=auto").state.should_stop
    other = (*options, never, "resume=auto", "trainer.eval_seed=5")
    assert not build(tmp_path, *other).state.should_stop
    assert train(str(tmp_path), *other)["iterations"] == 3


def test_the_best_of_no_validation_is_refused_before_any_work(tmp_path):
    with pytest.raises(UserError, match=r"needs validations: set trainer\.eval_every"):
        build(tmp_path, "trainer.test_checkpoint=best", "trainer.eval_every=0")
    assert not list(tmp_path.iterdir())


def test_no_best_is_said(tmp_path):
    with pytest.raises(UserError, match=r"no best checkpoint.*test_checkpoint=last"):
        load_best(build(tmp_path, "strategy=local", "trainer.test_checkpoint=best"))


def test_the_best_so_far_comes_along_to_another_directory(tmp_path):
    options = ("strategy=local", "trainer.test_checkpoint=best")
    train(str(tmp_path / "a"), *options)
    folder = tmp_path / "a" / "checkpoints"
    newest, best = folder / "iteration-00000004.pt", folder / "best-00000002.pt"
    # As if the validation after iteration 2 could not be surpassed.
    contents = read_checkpoint(newest) | {"best": {"iteration": 2, "accuracy": 2.0}}
    write_checkpoint(newest, contents)
    write_checkpoint(best, read_checkpoint(folder / "iteration-00000002.pt"))
    found = train(str(tmp_path / "b"), *options, f"resume={newest}", "trainer.iterations=6")
    assert found["tested_iteration"] == 2 and found["iterations"] == 6
    assert (tmp_path / "b" / "checkpoints" / best.name).exists()
    only_tested = Trainer(build(tmp_path / "e", *options, f"resume={newest}")).test()
    assert only_tested["tested_iteration"] == 2
    best.unlink()
    with pytest.raises(UserError, match=rf"{best} is missing.*test_checkpoint=last"):
        build(tmp_path / "c", *options, f"resume={newest}")
    build(tmp_path / "d", "strategy=local", f"resume={newest}")
