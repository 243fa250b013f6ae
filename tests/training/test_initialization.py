"""`init_from`: the weights of another run, also of another algorithm."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny import build, records, train, train_world, without_times
from torch import nn

from metadist.algorithms import MAML, MAMLPlusPlus
from metadist.errors import UserError
from metadist.models import MLP, Conv4
from metadist.reports import read_results
from metadist.training.checkpoints import Checkpoints, read_checkpoint, write_checkpoint
from metadist.training.export import export_weights
from metadist.training.initialization import initialize
from metadist.training.pretrained import pretrained_weights

SHORT = ("strategy=local", "trainer.iterations=1", "trainer.eval_every=0", "trainer.eval_tasks=1")


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    """A finished run of ANIL."""
    directory = tmp_path_factory.mktemp("anil")
    train(str(directory), "algorithm=anil", "strategy=local")
    return directory


def weights(source: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(Checkpoints(source).newest())["learner"]


def test_maml_starts_with_the_weights_of_anil(source, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    x = build(tmp_path, "strategy=local", f"init_from={source}")
    found = x.learner.state_dict()
    assert found.keys() == weights(source).keys()
    assert all(torch.equal(tensor, weights(source)[name]) for name, tensor in found.items())
    assert x.state.iteration == 0
    (message,) = [text for text in caplog.messages if "initialized" in text]
    assert message.endswith(f"(iteration 4): {len(found)} of {len(found)} tensors loaded")


@pytest.mark.parametrize("scheduler", ["none", "cosine"])
def test_without_iterations_the_initial_weights_are_tested(source, tmp_path, scheduler):
    options = ("algorithm=anil", "strategy=local", f"scheduler={scheduler}")
    found = train(str(tmp_path), *options, f"init_from={source}", "trainer.iterations=0")
    expected = read_results(source)
    assert found["iterations"] == 0
    for name in ("test_accuracy", "test_loss", "ci95"):
        assert found[name] == expected[name]
    assert all("train_loss" not in record for record in records(tmp_path))


def test_a_checkpoint_file_is_the_same_as_its_run(source, tmp_path):
    file = Checkpoints(source).newest()
    x = build(tmp_path, "strategy=local", f"init_from={file}")
    assert torch.equal(
        x.learner.state_dict()["model.head.weight"], weights(source)["model.head.weight"]
    )


def test_what_does_not_fit_keeps_its_initial_value_and_is_named(source, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    options = ["strategy=local", "algorithm=meta_sgd", "task.ways=4"]
    fresh = build(tmp_path / "fresh", *options).learner.state_dict()
    found = build(tmp_path / "run", *options, f"init_from={source}").learner.state_dict()
    heads = {"model.head.weight", "model.head.bias"}
    for name, tensor in found.items():
        known = name in weights(source) and name not in heads
        assert torch.equal(tensor, weights(source)[name] if known else fresh[name]), name
    (message,) = [text for text in caplog.messages if "initialized" in text]
    assert "of another shape: model.head.weight, model.head.bias" in message
    assert "not in the checkpoint: " in message and "\n" not in message
    assert f" and {len(found.keys() - weights(source).keys()) - 6} more" in message


def test_each_step_of_maml_plus_plus_starts_with_the_batch_norms_of_the_weights():
    name, model = "prototypical_omniglot_20w1s_cosine", {"filters": 64, "pooling": "max"}
    learner = MAMLPlusPlus(Conv4((1, 28, 28), 20, **model), inner_steps=3)
    initialize(learner, name)
    found, saved = learner.state_dict(), load_file(pretrained_weights()[name])
    for kind in ("weight", "bias"):
        steps = found[f"model.norms.0.{kind}"]
        assert steps.shape == (3, 64)
        assert all(torch.equal(each, saved[f"model.norms.0.{kind}"]) for each in steps)
    again = MAMLPlusPlus(Conv4((1, 28, 28), 20, **model), inner_steps=3)
    again.load_state_dict(again.convert_state(found))  # its own state stays as it is
    assert torch.equal(again.state_dict()["model.norms.0.weight"], found["model.norms.0.weight"])


@pytest.mark.parametrize(("unused", "listed"), [(6, "a0, a1, a2, a3, a4, a5"), (0, "")])
def test_tensors_that_are_not_used_are_named(tmp_path, unused, listed):
    learner, path = MAML(nn.Linear(2, 2)), tmp_path / "a.pt"
    saved = {name: tensor + 1 for name, tensor in learner.state_dict().items()}
    more = {f"a{number}": torch.ones(1) for number in range(unused)}
    write_checkpoint(path, {"iteration": 3, "learner": {**saved, **more}})
    line, _ = initialize(learner, path)
    assert line == (
        f"initialized from {path} (iteration 3): 2 of 2 tensors loaded"
        + (f"; of the checkpoint not used: {listed}" if listed else "")
    )
    assert all(torch.equal(tensor, saved[name]) for name, tensor in learner.state_dict().items())


def test_a_warning_says_that_most_tensors_do_not_fit(tmp_path):
    learner, path = MAML(MLP((2,), 2, [3])), tmp_path / "a.pt"
    write_checkpoint(path, {"iteration": 3, "learner": MAML(MLP((2,), 2, [4])).state_dict()})
    _, warning = initialize(learner, path)
    total = len(learner.state_dict())
    assert f"1 of {total} tensors fit, and the others start untrained" in warning


def test_pretrained_weights_are_given_by_name():
    name = "maml_omniglot_5w1s_cosine"
    learner = MAML(Conv4((1, 28, 28), 5, filters=64, pooling="max"))
    line, _ = initialize(learner, name)
    assert line.startswith(f"initialized from {pretrained_weights()[name]} (iteration ")
    found = load_file(pretrained_weights()[name])
    state = learner.state_dict()
    assert f"{len(state)} of {len(state)} tensors loaded" in line
    assert all(torch.equal(tensor, found[each]) for each, tensor in state.items())


def test_weights_of_another_class_split_are_warned_about(source, tmp_path, caplog):
    build(tmp_path / "same", "strategy=local", "algorithm=anil", f"init_from={source}")
    assert not [each for each in caplog.messages if "division of the classes" in each]
    more = "dataset.train_classes=9"
    build(tmp_path / "other", "strategy=local", more, f"init_from={source}")
    (message,) = [each for each in caplog.messages if "division of the classes" in each]
    assert f"init_from={source} was trained on another division" in message
    assert "'train': 9" in message and "may have seen classes of the test" in message


def test_pretrained_weights_know_their_class_split():
    learner = MAML(Conv4((1, 28, 28), 5, filters=64))
    name = "prototypical_omniglot_20w1s_cosine"
    _, warning = initialize(learner, name, {"dataset": "omniglot", "class_split": "random"})
    assert "class_split is vinyals there and random here" in warning
    assert initialize(learner, name, {"dataset": "mini_imagenet", "class_split": "x"})[1] is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model=mlp", "task.ways=4"], "has no tensor that fits MAML and its model"),
        (["init_from=2024"], "2024 is neither a path nor the name of pretrained weights"),
        (["init_from=missing"], "missing is neither a path nor the name of pretrained weights"),
        (["init_from=runs/maml_omniglot_5w1s_cosine"], "neither a path nor the name"),
    ],
)
def test_what_cannot_be_used_is_refused(source, tmp_path, overrides, message):
    options = [f"init_from={source}", *overrides]
    with pytest.raises(UserError, match=message):
        build(tmp_path, "strategy=local", *options, omit=("model.filters",))


def test_a_resumed_run_goes_on_from_its_own_checkpoint(source, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(source, copy)
    options = ["strategy=local", "trainer.eval_tasks=1", f"init_from={copy}"]
    train(str(tmp_path / "run"), *options, "trainer.iterations=2")
    shutil.rmtree(copy)
    train(str(tmp_path / "run"), *options, "resume=auto")
    train(str(tmp_path / "whole"), *options[:2], f"init_from={source}")
    resumed, whole = (without_times(records(tmp_path / name)) for name in ("run", "whole"))
    losses = [
        [line["train_loss"] for line in lines if "train_loss" in line] for lines in (resumed, whole)
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 4


def test_any_strategy_starts_with_the_same_weights(source, tmp_path):
    options = (*SHORT[1:], f"init_from={source}")
    train(str(tmp_path / "local"), *options, "strategy=local")
    alone = without_times(records(tmp_path / "local"))
    for strategy in ("rpc", "allreduce"):
        train_world(2, tmp_path / strategy, *options, f"strategy={strategy}")
        assert without_times(records(tmp_path / strategy)) == alone


def test_the_count_of_iterations_is_not_loaded(tmp_path):
    options = (*SHORT, "algorithm=maml_plus_plus", "algorithm.inner_steps=2")
    train(str(tmp_path / "first"), *options)
    x = build(tmp_path / "second", *options, f"init_from={tmp_path / 'first'}")
    assert x.learner.iteration == 0


def test_moments_and_steps_of_reptiles_adam_are_loaded_together(tmp_path):
    options = (*SHORT, "algorithm=reptile", "algorithm.eval_inner_steps=1")
    train(str(tmp_path / "first"), *options)
    for ways, loaded in ((3, True), (4, False)):
        more = (f"task.ways={ways}", f"init_from={tmp_path / 'first'}")
        learner = build(tmp_path / str(ways), *options, *more).learner
        assert bool(learner.step) is bool(learner.exp_avg_sq.any()) is loaded


class WithExtraState(Conv4):
    """A model that saves more than tensors."""

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        pass


class WithMask(MAML):
    """MAML with a buffer that checkpoints have, and one that they lack."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("mask", torch.ones(3), persistent=False)


def test_buffers_are_loaded_beside_one_that_is_not_saved(tmp_path):
    saved = WithMask(nn.Linear(1, 1))
    saved.scale.fill_(7)
    path = tmp_path / "weights.pt"
    write_checkpoint(path, {"iteration": 3, "learner": saved.state_dict()})
    learner = WithMask(nn.Linear(1, 1))
    message, _ = initialize(learner, path)
    assert learner.scale == 7 and message.endswith("3 of 3 tensors loaded")


def test_what_modules_save_beside_tensors_is_not_taken_over(tmp_path):
    own = [*SHORT, f"model._target_={__name__}.WithExtraState"]
    train(str(tmp_path / "first"), *own)
    x = build(tmp_path / "second", *own, f"init_from={tmp_path / 'first'}")
    saved = weights(tmp_path / "first")
    assert torch.equal(x.learner.model.head.weight, saved["model.head.weight"])
    with pytest.raises(UserError, match=r"model\._extra_state of .* is no tensor"):
        export_weights(tmp_path / "first", tmp_path / "weights.safetensors")
