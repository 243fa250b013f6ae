"""Validations: when they are due, which one is the best, and in which order files are written."""

import contextlib
import copy
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tiny import build, records

from metadist.distributed.reducers import MeanReducer
from metadist.errors import UserError
from metadist.loggers import Logger
from metadist.tasks import task_keys
from metadist.training import Callback, Trainer, checkpoints
from metadist.training import trainer as trainer_module
from metadist.training.checkpoints import Checkpoints, read_checkpoint
from metadist.training.clipping import gradient_norm
from metadist.training.evaluation import Estimate
from metadist.training.resume import restore_from
from metadist.training.saved_state import checkpoint_contents, load_best
from metadist.training.trainer import total_weight


class Recorder(Logger):
    """Notes what is logged, and in which order files are written."""

    def __init__(self):
        self.events, self.metrics = [], []

    def log_metrics(self, metrics):
        self.events.append("metrics")
        self.metrics.append(dict(metrics))

    def flush(self):
        self.events.append("flush")


def evaluation_of(estimates: dict[str, Estimate]) -> SimpleNamespace:
    """What `evaluate` returns, with estimates of the test's."""
    metrics = {"loss": torch.full((3,), estimates["loss"].mean)}
    return SimpleNamespace(estimates=estimates, metrics=metrics, predictions=[])


def validated(monkeypatch, directory, values: list[float], regression: bool) -> tuple:
    """A trainer after a validation with each of the values, one outer step after another."""
    x = build(directory, "strategy=local")
    x.tasks.regression = regression
    x.logger = logger = Recorder()
    trainer = Trainer(x)
    for name in ("save_best", "save"):
        write = getattr(trainer.checkpoints, name)
        noted = lambda *given, n=name, w=write: logger.events.append(n) or w(*given)  # noqa: E731
        monkeypatch.setattr(trainer.checkpoints, name, noted)
    for value in values:
        metric = Estimate(value, 0.25, 3)
        estimates = {"loss": Estimate(7.0, 9.0, 3), x.metric: metric}
        monkeypatch.setattr(trainer_module, "evaluate", lambda *_, e=estimates: evaluation_of(e))
        x.state.iteration += 1
        trainer.validate()
    return x, trainer, logger


SHORT = ("trainer.meta_batch_size=1", "trainer.validation_tasks=1", "trainer.eval_tasks=1")
NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("regression", "values", "iteration"),
    [
        (False, [0.2, 0.6, 0.4], 2),
        (False, [0.6, 0.2, 0.4], 1),
        (False, [0.6, 0.6], 1),
        (False, [NAN, 0.1, NAN], 2),
        (True, [2.0, 0.5, 1.0], 2),
        (True, [0.5, 2.0, 1.0], 1),
        (True, [3.0, 2.0, 1.0], 3),
        (True, [NAN, INF, 9.0, NAN, -INF], 3),
    ],
)
def test_the_best_is_the_highest_accuracy_or_the_lowest_mse(
    tmp_path, monkeypatch, regression, values, iteration
):
    x, trainer, _ = validated(monkeypatch, tmp_path, values, regression)
    metric = "mse" if regression else "accuracy"
    assert x.state.best == {"iteration": iteration, metric: values[iteration - 1]}
    contents = read_checkpoint(trainer.checkpoints.best)
    assert contents["iteration"] == iteration and contents["best"] == x.state.best
    assert x.state.validated == len(values)
    (last,) = x.state.validation.items()
    assert last[0] == f"validation_{metric}"
    assert last[1] == values[-1] or math.isnan(values[-1])


def test_without_a_finite_validation_there_is_no_best(tmp_path, monkeypatch):
    x, trainer, logger = validated(monkeypatch, tmp_path, [NAN, INF], False)
    assert x.state.best == {} and trainer.checkpoints.best is None
    assert "save_best" not in logger.events
    with pytest.raises(UserError, match="no best checkpoint, because there was no validation"):
        load_best(x)


def test_metrics_are_on_disk_before_the_checkpoints_that_follow_them(tmp_path, monkeypatch):
    _, trainer, logger = validated(monkeypatch, tmp_path, [0.5, 0.1], False)
    assert logger.events == ["metrics", "flush", "save_best", "metrics"]
    logger.events.clear()
    trainer.save_checkpoint()
    assert logger.events == ["flush", "save"]


def test_what_a_validation_logs(tmp_path, monkeypatch):
    _, _, logger = validated(monkeypatch, tmp_path, [0.5], False)
    assert logger.metrics == [
        {
            "iteration": 1,
            "validation_loss": 7.0,
            "validation_accuracy": 0.5,
            "validation_ci95": 0.25,
        }
    ]


def test_a_validations_tasks_mean_and_interval_by_hand(tmp_path):
    x = build(tmp_path, "strategy=local", "trainer.validation_tasks=9", "trainer.eval_seed=4")
    x.logger = logger = Recorder()
    estimates = Trainer(x).validate()
    learner, found = copy.deepcopy(x.learner).eval(), []
    with torch.no_grad():
        for key in task_keys(4, "validation", 0, range(9)):
            found.append(learner(x.tasks.sample(key)).metrics["accuracy"].item())
    accuracies = torch.tensor(found, dtype=torch.float64)
    assert estimates["accuracy"].mean == pytest.approx(accuracies.mean().item(), abs=1e-7)
    interval = 1.96 * accuracies.std().item() / 3
    assert estimates["accuracy"].ci95 == pytest.approx(interval, abs=1e-7)
    assert logger.metrics[0]["validation_ci95"] == estimates["accuracy"].ci95


@pytest.mark.parametrize(
    ("every", "iterations", "expected"), [(2, 4, [2, 4]), (3, 4, [3, 4]), (9, 4, [4]), (0, 4, [])]
)
def test_when_validations_are_due(tmp_path, every, iterations, expected):
    options = (f"trainer.eval_every={every}", f"trainer.iterations={iterations}", *SHORT)
    Trainer(build(tmp_path, "strategy=local", "trainer.checkpoint_every=0", *options)).run()
    lines = records(tmp_path)
    assert [line["iteration"] for line in lines if "validation_loss" in line] == expected
    saved = sorted(path.name for path in (tmp_path / "checkpoints").glob("iteration-*"))
    assert saved == ["iteration-00000004.pt"]


@pytest.mark.parametrize(("every", "expected"), [(1, [2, 3, 4]), (2, [2, 4]), (3, [3, 4])])
def test_when_checkpoints_are_due(tmp_path, every, expected):
    options = ("trainer.eval_every=0", f"trainer.checkpoint_every={every}", *SHORT)
    Trainer(build(tmp_path, "strategy=local", *options)).run()
    saved = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert saved == [f"iteration-{number:08d}.pt" for number in expected]  # at most three


@pytest.mark.parametrize("which", ["last", "best"])
def test_the_tested_state_is_the_last_or_the_best(tmp_path, monkeypatch, which):
    x = build(tmp_path, "strategy=local", f"trainer.test_checkpoint={which}")
    x.logger = Recorder()
    trainer, weight = Trainer(x), x.learner.model.head.weight
    evaluate = trainer_module.evaluate
    for number, value in ((1, 0.75), (2, 0.25)):
        fixed = {"loss": Estimate(1.0, 0.1, 3), "accuracy": Estimate(value, 0.1, 3)}
        monkeypatch.setattr(trainer_module, "evaluate", lambda *_, e=fixed: evaluation_of(e))
        x.state.iteration = number
        with torch.no_grad():
            weight.fill_(float(number))
        trainer.validate()
    monkeypatch.setattr(trainer_module, "evaluate", evaluate)
    x.state.train_seconds = 2.0
    results = trainer.test()
    assert results["tested_iteration"] == {"last": 2, "best": 1}[which]
    assert (weight == results["tested_iteration"]).all()
    assert results["validation_accuracy"] == {"last": 0.25, "best": 0.75}[which]
    assert results["best_validation"] == {"iteration": 1, "accuracy": 0.75}
    assert (
        results["protocol"]["checkpoint"] == {"last": "last", "best": "best by validation"}[which]
    )
    assert results["tasks_per_second"] == 2 * 5 / 2.0 and results["iterations"] == 2
    assert results["test_tasks"] == results["protocol"]["test_tasks"] == 7
    with contextlib.ExitStack() as stack:
        if which == "best":
            with pytest.raises(UserError, match=r"train\(\) was called in or after the test"):
                trainer.train()
            with pytest.raises(UserError, match=r"validate\(\) was called in or after the test"):
                trainer.validate()
            refused = pytest.raises(UserError, match=r"save_checkpoint\(\) was called in")
            stack.enter_context(refused)
        trainer.save_checkpoint()
    assert trainer.checkpoints.path(2).exists() == (which == "last")


def test_a_run_that_ended_before_its_last_validation_catches_up(tmp_path):
    x = build(tmp_path, "strategy=local")
    x.logger, x.state.iteration = Recorder(), 4
    trainer = Trainer(x)
    trainer.train()
    assert [line["iteration"] for line in x.logger.metrics] == [4]
    saved = read_checkpoint(trainer.checkpoints.path(4))
    assert saved["validated"] == 4 and saved["validation"] == x.state.validation != {}
    trainer.train()
    assert len(x.logger.metrics) == 1  # once for each state


class FailsAt3(Callback):
    """Ends training after the first iteration that follows a resume at iteration 2."""

    def on_iteration_end(self, trainer, output):
        if trainer.state.iteration == 3:
            raise KeyboardInterrupt


def test_a_validation_after_a_resume_is_saved_before_training_goes_on(tmp_path):
    x = build(tmp_path, "strategy=local")
    x.logger, x.callbacks["fails"], x.state.iteration = Recorder(), FailsAt3(), 2
    trainer = Trainer(x)
    trainer.save_checkpoint()  # as after a signal in the validation
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    saved = read_checkpoint(trainer.checkpoints.path(2))
    assert saved["validated"] == 2 == saved["best"]["iteration"]


# --- an outer step -----------------------------------------------------------------------------


def test_the_logged_learning_rate_is_that_of_the_step(tmp_path):
    x = build(tmp_path, "strategy=local", "scheduler=cosine", "optimizer.lr=0.25")
    x.logger = recorder = Recorder()
    for iteration in (1, 2, 3):
        Trainer(x).train_step(iteration)
    rates = [0.125 * (1 + math.cos(math.pi * k / 4)) for k in range(3)]  # four iterations in all
    assert [line["learning_rate"] for line in recorder.metrics] == pytest.approx(rates)


def test_random_numbers_of_the_optimizer_are_those_of_seed_and_iteration(tmp_path):
    drawn: list[tuple] = []

    class Draws(torch.optim.SGD):
        def step(self, closure=None):
            drawn.append((torch.rand(()).item(), np.random.rand(), random.random()))

    for seed in (0, 1):
        x = build(tmp_path, "strategy=local", f"seed={seed}")
        x.logger, x.optimizer = Recorder(), Draws(x.learner.parameters())
        for iteration in (1, 2, 1):
            Trainer(x).train_step(iteration)
    assert (drawn[0], drawn[3]) == (drawn[2], drawn[5])
    assert all(len(set(column)) == 4 for column in zip(*drawn, strict=True))


# --- running statistics -----------------------------------------------------------------------


@pytest.mark.parametrize("reducer", ["mean", "sum"])
def test_running_statistics_change_by_the_mean_over_tasks(tmp_path, reducer):
    options = ("strategy=local", "model.running_statistics=true", f"reducer={reducer}")
    x = build(tmp_path, *options)
    x.logger = recorder = Recorder()
    before = {name: buffer.clone() for name, buffer in x.learner.named_buffers()}
    changes: dict[str, torch.Tensor] = {name: torch.zeros_like(b) for name, b in before.items()}
    losses, accuracies = [], []
    for key in task_keys(0, "train", 1, range(5)):
        alone = copy.deepcopy(x.learner).train()
        result = alone(x.tasks.sample(key))
        losses.append(result.loss.item())
        accuracies.append(result.metrics["accuracy"].item())
        for name, buffer in alone.named_buffers():
            changes[name] += buffer - before[name]
    Trainer(x).train_step(1)
    assert len(before) == 12
    for name, buffer in x.learner.named_buffers():
        expected = before[name] + changes[name] / 5
        torch.testing.assert_close(buffer, expected.to(buffer), rtol=1e-5, atol=1e-6)
    scale = {"mean": 5, "sum": 1}[reducer]
    line = recorder.metrics[0]
    assert line["train_loss"] == pytest.approx(sum(losses) / scale, rel=1e-5)
    assert line["train_accuracy"] == pytest.approx(sum(accuracies) / 5, rel=1e-6)
    assert total_weight(x) == 5 / scale


@pytest.mark.parametrize(
    "tasks",  # of which some sums of 1 / tasks are below one
    [49, *(pytest.param(tasks, marks=pytest.mark.slow) for tasks in (35, 56))],
)
def test_integer_buffers_count_iterations_if_weights_are_rounded(tmp_path, tasks):
    one_shard = ("+partition=batch", "reducer=sum", "reducer.of_items=false")
    options = ("algorithm=maml_plus_plus", "model=mlp", f"trainer.meta_batch_size={tasks}")
    options = (*options, "algorithm.inner_steps=1", "model.hidden=[4]")
    x = build(tmp_path, "strategy=local", *one_shard, *options, omit=("model",))
    x.logger = Recorder()
    Trainer(x).train_step(1)
    assert dict(x.learner.named_buffers())["iteration"] == 1


class MeanOfFour(MeanReducer):
    def divisor(self, sizes):
        return 4.0


def test_metrics_are_means_when_the_loss_is_a_sum_of_shards(tmp_path):
    found = {}
    own = f"reducer._target_={__name__}.MeanOfFour"
    for reducer in ("reducer=mean", "reducer=sum", "reducer=sum reducer.of_items=false", own):
        x = build(tmp_path, "strategy=local", "+partition=batch", *reducer.split())
        x.logger = recorder = Recorder()
        Trainer(x).train_step(1)
        found[reducer] = recorder.metrics[0]["train_accuracy"]
    mean, *sums = found.values()
    assert sums == [pytest.approx(mean, rel=1e-6)] * 3


def test_the_gradient_norm_is_that_of_all_gradients():
    module = torch.nn.Linear(2, 1)
    assert gradient_norm(module.parameters()) == 0.0
    module.weight.grad, module.bias.grad = torch.tensor([[3.0, 0.0]]), torch.tensor([4.0])
    assert gradient_norm(module.parameters()) == 5.0
    module.weight.grad = torch.tensor([[3e30, 0.0]])  # its square is no float32
    module.bias.grad = torch.tensor([4e30])
    assert gradient_norm(module.parameters()) == pytest.approx(5e30)
    module.weight.grad = None
    assert gradient_norm(module.parameters()) == pytest.approx(4e30)


def head_apart(named_parameters, lr: float) -> torch.optim.Optimizer:
    """Gradient descent with the head in a group of its own."""
    named = dict(named_parameters)
    head = [named.pop(name) for name in list(named) if ".head." in name]
    return torch.optim.SGD([{"params": list(named.values())}, {"params": head}], lr=lr)


def test_the_gradients_of_all_groups_of_an_optimizer_are_clipped_together(tmp_path):
    own = f"optimizer._target_={__name__}.head_apart"
    x = build(tmp_path, "strategy=local", own, "~optimizer.fused", "trainer.clip_norm=1e-3")
    x.logger = Recorder()
    trainer, parameters = Trainer(x), list(x.learner.parameters())
    output = trainer.train_step(1)
    assert output.gradient_norm > 1e-2
    assert gradient_norm(parameters) == pytest.approx(1e-3, rel=1e-3)


# --- what a run resumes from ------------------------------------------------------------------


def test_a_configuration_key_that_only_one_side_has_is_another_run(tmp_path):
    x = build(tmp_path, "strategy=local")
    contents = checkpoint_contents(x)
    restore_from(x, tmp_path / "a.pt", contents)
    configuration = contents["configuration"]
    algorithm = configuration["algorithm"]
    more = {**configuration, "algorithm": {**algorithm, "old": 1}}
    with pytest.raises(UserError, match=r"algorithm\.old was 1 there and is not set now"):
        restore_from(x, tmp_path / "a.pt", {**contents, "configuration": more})
    other = {k: v for k, v in configuration.items() if k != "scheduler"}
    message = r"run: scheduler\._target_ was not set there and is [\w.]+ now; resume"
    with pytest.raises(UserError, match=message):
        restore_from(x, tmp_path / "a.pt", {**contents, "configuration": other})
    less = {k: v for k, v in algorithm.items() if k != "inner_lr"}
    less = {**configuration, "algorithm": less}
    with pytest.raises(UserError, match=r"algorithm.inner_lr was not set there and is 0\.4 now"):
        restore_from(x, tmp_path / "a.pt", {**contents, "configuration": less})


def test_callbacks_may_come_and_go_but_those_kept_have_the_same_options(tmp_path):
    x = build(tmp_path, "strategy=local", "callbacks=ema", "callbacks.ema.decay=0.9")
    contents, path = checkpoint_contents(x), tmp_path / "a.pt"
    restore_from(build(tmp_path, "strategy=local"), path, contents)
    both = build(tmp_path, "strategy=local", "callbacks=[ema,early_stopping]")
    with pytest.raises(UserError, match=r"callbacks\.ema\.decay was 0\.9 there and is 0\.999 now"):
        restore_from(both, path, contents)
    restore_from(
        build(tmp_path, "strategy=local", "callbacks=early_stopping"),
        path,
        checkpoint_contents(both) | {"configuration": contents["configuration"]},
    )


def test_the_precision_belongs_to_a_run(tmp_path):
    x, path = build(tmp_path, "strategy=local"), tmp_path / "a.pt"
    bf16 = build(tmp_path, "strategy=local", "trainer.precision=bf16")
    with pytest.raises(UserError, match=r"trainer\.precision was float32 there and is bf16 now"):
        restore_from(bf16, path, checkpoint_contents(x))
    with pytest.raises(UserError, match=r"trainer\.precision was bf16 there and is float32 now"):
        restore_from(x, path, checkpoint_contents(bf16))


@pytest.mark.parametrize(
    "wrong",
    [
        {"iteration": -1},
        {"iteration": 1.5},
        {"train_seconds": math.inf},
        {"train_seconds": -1.0},
        {"wall_seconds": "1"},
        {"best": None, "learner": {}},
        {"optimizer": {}},
    ],
)
def test_contents_that_do_not_fit_are_refused(tmp_path, wrong):
    x = build(tmp_path, "strategy=local")
    with pytest.raises(UserError, match="another model or optimizer"):
        restore_from(x, tmp_path / "a.pt", {**checkpoint_contents(x), **wrong})


def test_a_checkpoint_that_lacks_a_part_is_refused(tmp_path):
    x = build(tmp_path, "strategy=local")
    contents = checkpoint_contents(x)
    for name in contents.keys() - {"protocol", "skipped_steps"}:
        rest = {key: value for key, value in contents.items() if key != name}
        with pytest.raises(UserError, match=f"lacks {name}: it is of another version"):
            restore_from(x, tmp_path / "a.pt", rest)
    del contents["protocol"]  # of earlier versions
    restore_from(x, tmp_path / "a.pt", contents)


def test_resuming_from_an_earlier_checkpoint_renames_the_later_ones(tmp_path):
    Trainer(build(tmp_path, "strategy=local", "trainer.checkpoint_every=1")).run()
    folder = tmp_path / "checkpoints"

    def names() -> list[str]:
        return sorted(path.name for path in folder.iterdir())

    before = names()
    assert "iteration-00000003.pt" in before
    options = ("strategy=local", f"resume={folder}/iteration-00000002.pt")
    x = build(tmp_path, *options, "trainer.eval_seed=1")  # the run may still be refused
    assert x.state.iteration == 2 and names() == before
    Trainer(build(tmp_path, *options))
    assert [name for name in names() if name.startswith("iteration")] == [
        "iteration-00000002.pt",
        "iteration-00000003.pt.superseded",
        "iteration-00000004.pt.superseded",
    ]


def test_an_intact_checkpoint_of_another_format_is_not_skipped(tmp_path, monkeypatch):
    saved = Checkpoints(tmp_path)
    saved.save(1, {"iteration": 1})
    monkeypatch.setattr(checkpoints, "FORMAT", 99)
    with pytest.raises(UserError, match="has format 2, written by metadist"):
        build(tmp_path, "strategy=local", "resume=auto")
    assert saved.newest() is not None


def test_resuming_without_a_checkpoint_is_said(tmp_path, caplog):
    caplog.set_level("INFO")
    build(tmp_path, "strategy=local")
    assert not caplog.messages
    build(tmp_path, "strategy=local", "resume=auto")
    assert f"{tmp_path} has no checkpoint, so the run starts at iteration 0" in caplog.text


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"run's directory .* cannot be written"):
        build(tmp_path / "file" / "run", "strategy=local")
