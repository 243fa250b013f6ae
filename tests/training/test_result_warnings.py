"""Results that look wrong are reported with what to try."""

import math
from types import SimpleNamespace

import pytest
import torch
from tiny import SMALL, build, compose, run_results, train

from metadist.algorithms import Learner
from metadist.config import build_experiment
from metadist.models import Conv4
from metadist.training import Trainer
from metadist.training.result_warnings import (
    optimizer_warnings,
    result_warnings,
    start_warnings,
)

SINUSOID = [
    *(item for item in SMALL if not item.startswith(("++dataset.", "model.", "task."))),
    *("dataset=sinusoid", "model=mlp", "model.hidden=[8]", "model.batch_norm=false"),
    *("task.shots=5", "strategy=local", "logger=console"),
]


@pytest.fixture(scope="module")
def classification(tmp_path_factory):
    return build(tmp_path_factory.mktemp("run"), "strategy=local")


def rows(*means: float, last: float = 0.02) -> dict:
    found = [{"steps": k, "mean": mean, "ci95": 0.02} for k, mean in enumerate(means)]
    found[-1]["ci95"] = last
    return {"test_loss": 1.0, "test_accuracy_by_steps": found}


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ({"test_loss": 1.0}, []),
        ({"test_loss": 10.9}, []),  # the uniform distribution over 3 classes has ln 3 = 1.0986
        ({"test_loss": 11.0}, ["11 is 10 times that of the uniform distribution (1.1): lower alg"]),
        ({"test_loss": math.nan}, ["the test loss is nan: lower algorithm.inner_lr or optimizer"]),
        (rows(0.2, 0.60, 0.59), []),  # within the interval
        (rows(0.2, 0.5, 0.6), []),
        (rows(0.2, 0.6, 0.5, last=0.2), []),
        (rows(0.2, 0.776, 0.64, 0.583), ["0.776 after 1, 0.583 after 3): lower algorithm.inner_"]),
        (rows(0.2, 0.6, 0.5), ["lower algorithm.inner_lr or algorithm.eval_inner_steps, chosen"]),
        (rows(0.3, 0.2), ["the test accuracy falls with inner steps (0.3 after 0, 0.2 after 1)"]),
        (rows(0.3, 0.2), ["lower algorithm.inner_lr, chosen by"]),
    ],
)
def test_classification(classification, results, expected):
    found = result_warnings(classification, results)
    assert len(found) == len(expected)
    assert all(part in text for part, text in zip(expected, found, strict=True)), found
    # A number of steps that the test has chosen would make its result too good.
    assert not any("eval_inner_steps=" in text for text in found)
    assert all("chosen by validation" in text for text in found if " after " in text)


def test_an_error_that_rises_with_inner_steps(tmp_path):
    x = build_experiment(compose(*SINUSOID), tmp_path, "maml")

    def warnings(*means: float) -> list[str]:
        by_steps = rows(*means)["test_accuracy_by_steps"]
        return result_warnings(x, {"test_loss": 0.5, "test_mse_by_steps": by_steps})

    assert warnings(4.0, 0.9, 0.5) == warnings(4.0, 0.5, 0.51) == []
    (found,) = warnings(4.0, 0.5, 0.9)
    assert found.startswith("the test mse rises with inner steps (0.5 after 1, 0.9 after 2): lower")


def test_a_diverging_inner_loop_is_reported_at_the_end(tmp_path, capsys):
    configuration = compose(*SINUSOID, "algorithm.inner_lr=2.0", "algorithm.eval_inner_steps=2")
    results = Trainer(build_experiment(configuration, tmp_path, "maml")).run()
    assert results["test_mse"] > 100
    (loss,) = run_results(tmp_path)["warnings"]
    assert "times that of predicting 0" in loss and "lower algorithm.inner_lr" in loss
    text = capsys.readouterr().out
    assert text.index("test MSE") < text.index(f"warning: {loss}")


def test_a_usual_run_has_no_warnings(tmp_path):
    configuration = compose(*SINUSOID, "algorithm.inner_lr=0.01")
    assert Trainer(build_experiment(configuration, tmp_path, "maml")).run()["warnings"] == []


def test_reptile_has_its_published_outer_step(tmp_path, capsys):
    short = ("strategy=local", "algorithm=reptile", "trainer.iterations=1", "logger=console")
    short += ("algorithm.eval_inner_steps=2", "trainer.eval_every=0")
    x = build(tmp_path / "published", *short)
    (group,) = x.optimizer.param_groups
    assert (type(x.optimizer).__name__, group["lr"], group["momentum"]) == ("SGD", 1.0, 0)
    assert result_warnings(x, {"test_loss": 1.0}) == []
    results = train(str(tmp_path / "adam"), *short, "optimizer=adam")
    warning = "the outer optimizer is Adam, and Reptile was published with SGD: try optimizer=rep"
    assert results["warnings"][0].startswith(warning)
    text = capsys.readouterr().out
    assert text.index(warning) < text.index("iteration 1 of 1")
    assert train(str(tmp_path / "lr"), *short, "optimizer.lr=0.1")["warnings"] == []


def of_the_head(named_parameters, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for name, p in named_parameters if ".head." in name], lr=lr)


def test_parameters_that_no_group_of_the_optimizer_has(tmp_path, capsys):
    own = ("~optimizer.fused", f"optimizer._target_={__name__}.of_the_head")
    x = build_experiment(compose(*SINUSOID, *own, "algorithm.inner_lr=0.01"), tmp_path, "maml")
    (warning,) = Trainer(x).run()["warnings"]
    assert warning.startswith("the optimizer has no group with model.") and "head" not in warning
    text = capsys.readouterr().out
    assert text.index(warning) < text.index("iteration 1 of ")
    for name, parameter in x.learner.named_parameters():
        parameter.requires_grad_(".head." in name)
    assert optimizer_warnings(x) == []


def test_losses_without_inner_loop_name_the_optimizer(classification):
    x = SimpleNamespace(**vars(classification))
    x.metric, x.learner = "accuracy", Learner(torch.nn.Linear(1, 1))
    x.optimizer = torch.optim.SGD(x.learner.parameters())
    x.configuration = {"algorithm": {}}
    (found,) = result_warnings(x, {"test_loss": math.inf})
    assert found.startswith("the test loss is inf: lower optimizer.lr, or set trainer.clip_norm; ")


class OwnModel(Conv4):
    """A model of the user's, with batch norms that keep running statistics."""

    def __init__(self, input_shape, outputs, **options):
        super().__init__(input_shape, outputs, running_statistics=True, **options)


class FrozenNorms(OwnModel):
    """Its batch norms use their running statistics in training, too."""

    def train(self, mode=True):
        super().train(mode)
        self.norms.eval()
        return self


def own_model(kind: type) -> tuple[str, ...]:
    return f"model._target_={__name__}.{kind.__name__}", "~model.running_statistics"


def test_running_statistics_that_were_not_asked_for(tmp_path, capsys):
    options = ("strategy=local", "logger=console", "algorithm.inner_lr=0.01")
    x = build(tmp_path, *options, *own_model(OwnModel))
    (warning,) = Trainer(x).run()["warnings"]
    assert "running statistics (4 of 4) normalize" in warning
    assert "set track_running_stats=False" in warning
    text = capsys.readouterr().out
    assert text.index(warning) < text.index("iteration 1 of 4")
    modes = [module.training for module in x.learner.modules()]
    for left, norm in zip((3, 2, 1, 0), x.learner.model.norms, strict=True):
        norm.track_running_stats = False
        found = start_warnings(x)
        assert [f"({left} of 4)" in text for text in found] == [True] * (left > 0)
    assert [module.training for module in x.learner.modules()] == modes


@pytest.mark.parametrize(
    ("overrides", "name"),
    [
        (["model.running_statistics=true"], "maml"),
        (own_model(FrozenNorms), "maml"),
        ([*own_model(OwnModel), "algorithm=prototypical"], "maml"),
        ([*own_model(OwnModel), "task.micro_batch_size=4"], "ddp"),
    ],
)
def test_running_statistics_that_are_no_problem(tmp_path, overrides, name):
    x = build(tmp_path, "strategy=local", *overrides, name=name)
    for training in (True, False):
        x.learner.train(training)
        assert start_warnings(x) == []
