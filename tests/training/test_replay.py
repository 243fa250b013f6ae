"""A task once more from its key: the run's own numbers, to the last bit."""

import math
import shutil

import pytest
from commands import run_command
from omegaconf import OmegaConf
from tiny import SMALL, compose, records

from metadist.config import build_experiment, load_experiment
from metadist.distributed.reducers import MeanReducer
from metadist.errors import UserError
from metadist.reports import read_test_predictions
from metadist.training import Callback, Trainer
from metadist.training.replay import parse_key, replay

KEY_TOO_LARGE = f"1,train,{2**63},4"


def test_keys_are_read_as_they_are_written():
    assert parse_key("7,train,17,3").tolist() == [7, 0, 17, 3]
    assert parse_key(" 7, 2, 0, 599").tolist() == [7, 2, 0, 599]
    for text in (
        "",
        "1,2,3",
        "1,2,3,4,5",
        "1,dev,3,4",
        "-1,train,3,4",
        "1,3,3,4",
        "1,train,x,4",
        KEY_TOO_LARGE,
    ):
        with pytest.raises(UserError, match="no task's key"):
            parse_key(text)


class Doubled(MeanReducer):
    """A reducer of the user's own: twice the mean."""

    def divisor(self, sizes):
        return super().divisor(sizes) / 2


def make_doubled() -> MeanReducer:
    return Doubled()


def train_and_replay(directory, overrides, keys, trust_code=False):
    """A run with one task per iteration, and the replay of its tasks."""
    configuration = compose(*SMALL, "strategy=local", *overrides)
    (directory / ".hydra").mkdir(parents=True)
    OmegaConf.save(configuration, directory / ".hydra" / "config.yaml")
    Trainer(build_experiment(configuration, directory, "maml")).run()
    return [
        replay(load_experiment(directory, trust_code=trust_code), parse_key(key)) for key in keys
    ]


OPTIONS = ["trainer.meta_batch_size=1", "trainer.checkpoint_every=3", "trainer.eval_every=0"]


def test_losses_are_those_of_the_record(tmp_path):
    keys = [f"0,train,{iteration},0" for iteration in (1, 2, 3, 4)]
    found = train_and_replay(tmp_path, OPTIONS, keys)
    losses = [line["train_loss"] for line in records(tmp_path)]
    assert [each.loss for each in found] == losses
    norms = [line["gradient_norm"] for line in records(tmp_path)]
    for each, norm in zip(found, norms, strict=True):
        assert math.hypot(*each.gradients.values()) == pytest.approx(norm, rel=1e-5)
        assert each.plot.read_bytes()[:4] == b"\x89PNG"
    assert [each.outer_steps for each in found] == [0, 1, 2, 0]
    assert found[3].start.endswith("iteration-00000003.pt")


@pytest.mark.parametrize("reducer", ["Doubled", "make_doubled"])
def test_outer_steps_are_replayed_with_the_reducer_of_the_run(tmp_path, reducer):
    options = [*OPTIONS, "optimizer=sgd", f"reducer._target_={__name__}.{reducer}"]
    keys = ["0,train,3,0", "0,train,4,0"]
    found = train_and_replay(tmp_path, options, keys, True)
    losses = [line["train_loss"] for line in records(tmp_path)]
    assert [2 * each.loss for each in found] == losses[2:]
    with pytest.raises(UserError, match=rf"test_replay\.{reducer} is needed to replay outer steps"):
        replay(load_experiment(tmp_path), parse_key("0,train,4,0"))


def test_the_command_shows_a_task_that_went_wrong(tmp_path):
    options = ["algorithm.inner_lr=1e30", "algorithm.inner_steps=3", "strategy=local"]
    run_dir = f"hydra.run.dir={tmp_path}/run"
    ended = run_command("maml.py", *SMALL, *options, run_dir)[0]
    assert ended.status == 2 and ended.err.count("\n") == 1 and "0,train,1,0" in ended.err, ended
    shown = run_command("metadist", "replay", f"{tmp_path}/run", "--key", "0,train,1,0")[0]
    assert shown.status == 0, shown
    assert "loss nan" in shown.out and "<- not finite" in shown.out
    assert (tmp_path / "run/replays/task-0-train-1-0.png").exists()
    later = replay(load_experiment(tmp_path / "run"), parse_key("0,train,2,0"))
    assert later.outer_steps == 1  # the step that went wrong is left out
    assert not math.isfinite(later.loss)
    tested = replay(load_experiment(tmp_path / "run"), parse_key("0,test,0,5"))
    assert any("accuracy" in line for line in tested.lines())
    refused = run_command("metadist", "replay", f"{tmp_path}/run", "--key", "0,train,5,0")[0]
    assert refused.status == 2 and refused.err.count("\n") == 1, refused
    for key in ("0,train,0,0", "0,test,0,7", "nonsense"):
        with pytest.raises(UserError):
            replay(load_experiment(tmp_path / "run"), parse_key(key))
    with pytest.raises(UserError, match="not a run directory"):
        load_experiment(tmp_path)
    shutil.rmtree(tmp_path / "run/replays")
    (tmp_path / "run/replays").touch()
    with pytest.raises(UserError, match=r"replay a task of a copy of the directory\.$"):
        replay(load_experiment(tmp_path / "run"), parse_key("0,train,1,0"))


def test_evaluated_tasks_and_initial_weights_are_the_runs(tmp_path):
    train_and_replay(tmp_path / "first", OPTIONS, [])
    options = [*OPTIONS, f"init_from={tmp_path / 'first'}", "callbacks=ema", "seed=3"]
    options.append("trainer.checkpoint_every=2")
    keys = ["3,train,1,0", "3,train,2,0", "0,test,0,5"]
    found = train_and_replay(tmp_path / "run", options, keys)
    losses = [line["train_loss"] for line in records(tmp_path / "run")]
    assert [each.loss for each in found[:2]] == losses[:2]
    assert found[0].start == str(tmp_path / "first")
    tested = read_test_predictions(tmp_path / "run")[5]
    assert (found[2].loss, found[2].metrics["accuracy"]) == (tested["loss"], tested["accuracy"])
    assert set(found[2].metrics) == {"accuracy", "accuracy_before"}
    assert found[2].start.endswith("iteration-00000004.pt")
    checkpoints = tmp_path / "run" / "checkpoints"
    best = shutil.move(checkpoints / "iteration-00000002.pt", checkpoints / "best-00000002.pt")
    from_best = replay(load_experiment(tmp_path / "run"), parse_key("3,train,4,0"))
    assert (from_best.start, from_best.outer_steps, from_best.loss) == (str(best), 1, losses[3])
    shutil.move(best, checkpoints / "iteration-00000002.pt")
    # A named checkpoint is taken as it is, whether newer or older than the task.
    for iteration, named in ((2, 4), (4, 2)):
        path = checkpoints / f"iteration-{named:08d}.pt"
        other = replay(load_experiment(tmp_path / "run"), parse_key(f"3,train,{iteration},0"), path)
        assert (other.start, other.outer_steps) == (str(path), 0)
        assert other.loss != losses[iteration - 1]


def test_a_test_task_is_evaluated_with_the_state_that_was_tested(tmp_path):
    options = ["trainer.test_checkpoint=best", "optimizer.lr=1.0", "trainer.checkpoint_every=1"]
    options += ["trainer.eval_every=1", "trainer.meta_batch_size=1"]
    (found,) = train_and_replay(tmp_path, options, ["0,test,0,5"])
    assert found.loss == read_test_predictions(tmp_path)[5]["loss"]
    assert "best-" in found.start


class HalveTheRate(Callback):
    """Changes the training after each iteration."""

    def on_iteration_end(self, trainer, output):
        for group in trainer.experiment.optimizer.param_groups:
            group["lr"] /= 2


def test_steps_that_are_taken_again_without_callbacks_say_so(tmp_path):
    options = [*OPTIONS, f"+callbacks.mine._target_={__name__}.HalveTheRate"]
    keys = ["0,train,1,0", "0,train,3,0", "0,train,4,0"]
    first, third, fourth = train_and_replay(tmp_path, options, keys)
    assert (first.callbacks, third.callbacks, fourth.callbacks) == (("mine",), ("mine",), ())
    assert "from the seed without callbacks.mine: these may" in first.lines()[0]
    assert "2 outer steps from there without callbacks.mine: give" in third.lines()[0]
    losses = [line["train_loss"] for line in records(tmp_path)]
    assert (first.loss, fourth.loss) == (losses[0], losses[3])
