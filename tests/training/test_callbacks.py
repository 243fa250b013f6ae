"""Callbacks: hooks, early stopping, weight averaging; every strategy, stopped and resumed."""

import functools
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from commands import run_command
from omegaconf import DictConfig, OmegaConf
from tiny import SMALL, build, compose, records, train, train_world, without_times
from worlds import RankFailed, run_world

from metadist.config import build_experiment, load_learner
from metadist.distributed import get_rank
from metadist.errors import UserError
from metadist.inference import evaluate_run
from metadist.loggers import Logger
from metadist.models import MLP
from metadist.reports import read_results, read_test_predictions
from metadist.training import Callback, EarlyStopping, Interrupted, Trainer
from metadist.training.checkpoints import Checkpoints, read_checkpoint
from metadist.training.export import export_weights

STRATEGIES = [("local", 1), ("rpc", 2), ("allreduce", 2)]
LOCAL_IS_SLOW = [pytest.param("local", 1, marks=pytest.mark.slow), *STRATEGIES[1:]]
ALLREDUCE_IS_SLOW = [STRATEGIES[0], pytest.param("allreduce", 2, marks=pytest.mark.slow)]


class Recorder(Callback):
    """Counts the calls of its hooks, and keeps the count in the checkpoints."""

    def __init__(self, stop_at: int = 0, stop_rank: int = 0, stop_in: str = "iteration") -> None:
        self.stop_at, self.stop_rank, self.stop_in = stop_at, stop_rank, stop_in
        self.calls: list[str] = []

    def on_train_start(self, trainer):
        self.calls.append(f"start {trainer.state.iteration}")

    def on_iteration_end(self, trainer, output):
        assert output.loss == trainer.state.train_loss
        self.calls.append(f"iteration {trainer.state.iteration}")
        self.stop(trainer, "iteration")

    def on_validation_end(self, trainer, metrics):
        assert {"validation_loss", "validation_accuracy", "validation_ci95"} <= metrics.keys()
        self.calls.append(f"validation {trainer.state.iteration}")
        self.stop(trainer, "validation")

    def stop(self, trainer, hook):
        at = (trainer.state.iteration, get_rank(), hook)
        if at == (self.stop_at, self.stop_rank, self.stop_in):
            trainer.state.should_stop = True

    def on_test_end(self, trainer, results):
        self.calls.append("test")
        results["calls"] = list(self.calls)

    def on_checkpoint(self, trainer, path):
        assert path.is_file()
        self.calls.append(path.name)

    def state_dict(self):
        return {"calls": list(self.calls)}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Failing(Callback):
    def on_iteration_end(self, trainer, output):
        raise ZeroDivisionError("in the user's callback")


class Counted(Callback):
    """Counts the calls of the hooks that every rank and a resumed run call."""

    def __init__(self) -> None:
        self.built = self.forgotten = 0

    def on_build(self, experiment):
        assert experiment.state.iteration == 0
        self.built += 1

    def reset_validations(self, state):
        assert state.best == {}
        self.forgotten += 1


class Refuses(Callback):
    def on_build(self, experiment):
        if get_rank() == 1:
            raise UserError("the callback does not fit: leave it out.")


class Forgetful(Callback):
    def state_dict(self):
        {"last": 1.0}  # noqa: B018


class Unsaved(Callback):
    def state_dict(self):
        return {"path": Path("somewhere")}


def run(size: int, directory: Path, *overrides: str) -> list:
    """Train in this process, or in a world; the results of each rank."""
    if size == 1:
        return [train(str(directory), *overrides)]
    return train_world(size, directory, *overrides)


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """The directory of a run without callbacks."""
    directory = tmp_path_factory.mktemp("plain")
    train(str(directory), "strategy=local")
    return directory


@pytest.fixture(scope="module")
def three(tmp_path_factory) -> dict:
    """The results of three iterations without callbacks."""
    directory = tmp_path_factory.mktemp("three")
    return train(str(directory), "strategy=local", "trainer.iterations=3")


def mine(name: str) -> str:
    return f"+callbacks.mine._target_={__name__}.{name}"


def without_best(calls: list[str]) -> list[str]:
    return [call for call in calls if not call.startswith("best")]


UNTIL_ITERATION_THREE = [
    *("start 0", "iteration 1", "iteration 2", "validation 2", "iteration-00000002.pt"),
    "iteration 3",
]
"""What a Recorder records, without the best checkpoints."""


def test_hooks_are_called_in_order(tmp_path):
    calls = train(str(tmp_path), "strategy=local", mine("Recorder"))["calls"]
    assert next(call for call in calls if call.startswith("best")) == "best-00000002.pt"
    assert without_best(calls) == [
        *UNTIL_ITERATION_THREE,
        "iteration 4",
        "validation 4",
        "iteration-00000004.pt",
        "test",
    ]
    assert read_results(tmp_path)["calls"] == calls


@pytest.mark.parametrize(("strategy", "size"), LOCAL_IS_SLOW)
def test_a_callback_of_any_driver_stops_training(tmp_path, three, strategy, size):
    rank = size - 1 if strategy == "allreduce" else 0
    stop = ("+callbacks.mine.stop_at=3", f"+callbacks.mine.stop_rank={rank}")
    results, *others = run(size, tmp_path, f"strategy={strategy}", mine("Recorder"), *stop)
    assert results["iterations"] == results["tested_iteration"] == 3
    assert "best-00000002.pt" in results["calls"]
    assert without_best(results["calls"]) == [
        *UNTIL_ITERATION_THREE,
        "validation 3",
        "iteration-00000003.pt",
        "test",
    ]
    if strategy == "rpc":
        assert others == [{}]
    else:
        assert all(other["calls"] == results["calls"] for other in others)
    # The state that is tested is that of three iterations.
    for name in ("test_accuracy", "test_loss", "train_loss", "validation_accuracy"):
        assert results[name] == three[name]


def test_all_drivers_stop_after_a_validation_in_which_one_of_them_asks_for_it(tmp_path):
    stop = [f"+callbacks.mine.stop_{name}" for name in ("at=2", "rank=1", "in=validation")]
    options = ("strategy=allreduce", mine("Recorder"), *stop, "timeout_seconds=10")
    results = train_world(2, tmp_path, *options)
    assert [each["iterations"] for each in results] == [2, 2]
    assert results[0]["calls"][-2:] == ["iteration-00000002.pt", "test"]


def interrupted(directory: Path, after: str, configuration: DictConfig) -> str:
    """Train, with a signal to this rank at a call of a hook."""
    kind, _, iteration = after.partition(" ")
    x = build_experiment(configuration, directory, "maml")
    log_metrics = x.logger.log_metrics

    def record_and_stop(line) -> None:
        log_metrics(line)
        logged = "validation" if "validation_loss" in line else "iteration"
        if (logged, line["iteration"]) == (kind, int(iteration)):
            os.kill(os.getpid(), signal.SIGTERM)

    x.logger.log_metrics = record_and_stop
    try:
        Trainer(x).run()
    except Interrupted as error:
        return f"{type(error).__name__}: {error}"
    return "finished"


EARLY = (
    "callbacks=[early_stopping,ema]",
    "callbacks.early_stopping.patience=2",
    "callbacks.early_stopping.min_delta=10",
    "callbacks.ema.decay=0.5",
    "trainer.iterations=12",
    "trainer.eval_every=1",
)
"""Stops at the third validation: no accuracy improves by 10."""


@pytest.fixture(scope="module")
def early(tmp_path_factory) -> dict[str, Path]:
    """The directories of runs that stop early, by their strategy."""
    directories = {}
    for strategy, size in STRATEGIES:
        directories[strategy] = tmp_path_factory.mktemp(strategy)
        run(size, directories[strategy], f"strategy={strategy}", *EARLY)
    return directories


@pytest.mark.parametrize(
    ("strategy", "size", "after"),
    [
        pytest.param("local", 1, "validation 3", marks=pytest.mark.slow),
        pytest.param("rpc", 2, "iteration 3", marks=pytest.mark.slow),
        pytest.param("rpc", 2, "validation 3", marks=pytest.mark.slow),
        pytest.param("allreduce", 2, "iteration 1", marks=pytest.mark.slow),
        ("allreduce", 2, "iteration 3"),
    ],
)
def test_early_stopping_and_averaging_resume_with_the_same_bits(
    tmp_path, early, strategy, size, after
):
    options = (f"strategy={strategy}", *EARLY)
    whole, parts = early[strategy], tmp_path / "parts"
    message = run_world(interrupted, size, parts, after, compose(*SMALL, *options))[0]
    assert message.startswith("Interrupted: ")
    assert not (parts / "results.json").exists()
    run(size, parts, *options, "resume=auto")
    assert read_results(parts)["iterations"] == read_results(whole)["iterations"] == 3
    assert without_times(records(parts)) == without_times(records(whole))
    assert read_test_predictions(parts) == read_test_predictions(whole)
    left, right = (
        read_checkpoint(directory / "checkpoints/iteration-00000003.pt")
        for directory in (whole, parts)
    )
    assert left["should_stop"] is right["should_stop"] is True
    assert left["callbacks"]["early_stopping"] == right["callbacks"]["early_stopping"]
    for one, other in (
        (left["learner"], right["learner"]),
        (left["trained"]["learner"], right["trained"]["learner"]),
        (left["callbacks"]["ema"], right["callbacks"]["ema"]),
    ):
        assert one.keys() == other.keys() and len(one) > 3
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_strategies_stop_and_average_alike(early):
    local, rpc, allreduce = map(read_test_predictions, early.values())
    assert local == rpc == allreduce


@pytest.mark.parametrize("test_checkpoint", ["last", pytest.param("best", marks=pytest.mark.slow)])
def test_the_average_is_validated_tested_and_saved(tmp_path, plain, test_checkpoint):
    weights, evaluated = [], []

    x = build(
        tmp_path,
        "strategy=local",
        "callbacks=ema",
        "callbacks.ema.decay=0.75",
        f"trainer.test_checkpoint={test_checkpoint}",
    )
    map_tasks, log_metrics = x.strategy.map_tasks, x.logger.log_metrics

    def record_weights(line):
        if "train_loss" in line:
            weights.append([each.detach().double() for each in x.learner.parameters()])
        log_metrics(line)

    def record_evaluated(mapper, learner, batch):
        evaluated.append([each.detach().double() for each in learner.parameters()])
        return map_tasks(mapper, learner, batch)

    x.logger.log_metrics, x.strategy.map_tasks = record_weights, record_evaluated
    results = Trainer(x).run()

    average, averages = weights[0], []
    for step in weights:
        average = [0.75 * a + 0.25 * w for a, w in zip(average, step, strict=True)]
        averages.append(average)
    tested = results["tested_iteration"]
    for found, iteration in zip(evaluated, (2, 4, tested), strict=True):
        torch.testing.assert_close(found, averages[iteration - 1], rtol=1e-5, atol=1e-7)
    saved = load_learner(tmp_path).learner
    found = [each.detach().double() for each in saved.parameters()]
    torch.testing.assert_close(found, averages[tested - 1], rtol=1e-5, atol=1e-7)
    assert results["method"]["callbacks"] == {"ema": {"name": "WeightAveraging", "decay": 0.75}}
    # Training is the same as without it.
    assert read_results(plain)["train_loss"] == results["train_loss"]
    losses = [
        [line["train_loss"] for line in records(directory) if "train_loss" in line]
        for directory in (tmp_path, plain)
    ]
    assert losses[0] == losses[1]


def test_the_average_continues_if_the_same_learner_is_trained_on(tmp_path):
    options = ("strategy=local", "callbacks=ema", "callbacks.ema.decay=0.5")
    whole = train(str(tmp_path / "whole"), *options)
    x = build(tmp_path / "parts", *options)
    for iterations in (2, 4):
        x.trainer_config = replace(x.trainer_config, iterations=iterations)
        results = Trainer(x).run()
    assert results["test_loss"] == whole["test_loss"]
    again = build(tmp_path / "again", *options)
    again.callbacks = x.callbacks  # another learner has an average of its own
    assert Trainer(again).run()["test_loss"] == whole["test_loss"]


def test_running_statistics_are_averaged(tmp_path):
    options = ("strategy=local", "model.running_statistics=true", "callbacks=ema")
    train(str(tmp_path), *options, "trainer.iterations=2", "trainer.eval_every=0")
    saved = read_checkpoint(Checkpoints(tmp_path).newest())
    name = next(name for name in saved["learner"] if name.endswith("running_mean"))
    assert not torch.equal(saved["learner"][name], saved["trained"]["learner"][name])


class Values:
    """What early stopping reads of a trainer."""

    def __init__(self, metric="accuracy", eval_every=1) -> None:
        result = SimpleNamespace(metrics={metric: 0.5, f"{metric}_before": 0.25, "own": 1.0})
        self.experiment = SimpleNamespace(
            metric=metric,
            learner=SimpleNamespace(eval=lambda: None),
            evaluate_mapper=SimpleNamespace(run_each=lambda learner, batch: [result]),
            trainer_config=SimpleNamespace(eval_every=eval_every),
        )
        self.state = SimpleNamespace(iteration=0, should_stop=False)

    def stops_after(self, callback, name, values) -> int:
        callback.on_train_start(self)
        for value in values:
            self.state.iteration += 1
            callback.on_validation_end(self, {f"validation_{name}": value})
            if self.state.should_stop:
                break
        return self.state.iteration


@pytest.mark.parametrize(
    ("options", "name", "values", "expected"),
    [
        ({"patience": 1}, "accuracy", [0.1, 0.2, 0.2, 0.3], 3),
        ({"patience": 2}, "accuracy", [0.5, 0.4, 0.6, 0.5, 0.6, 0.9], 5),
        ({"patience": 2, "metric": "loss"}, "loss", [3.0, 2.0, 2.5, 1.0, 1.0, 1.0], 6),
        ({"patience": 1, "min_delta": 0.1}, "accuracy", [0.1, 0.15, 0.5], 2),
        ({"patience": 1, "min_delta": 0.1}, "accuracy", [0.1, 0.25, 0.5], 3),
        ({"patience": 2}, "accuracy", [float("nan"), float("nan"), 0.5], 2),
        ({}, "accuracy", [0.5] * 9, 6),
        ({"patience": 1, "mode": "min"}, "accuracy", [0.5, 0.4, 0.6], 3),
        ({"patience": 1, "metric": "own", "mode": "min"}, "own", [2.0, 1.0, 1.5], 3),
    ],
)
def test_early_stopping_counts_validations_without_improvement(options, name, values, expected):
    assert Values().stops_after(EarlyStopping(**options), name, values) == expected


def test_early_stopping_says_what_has_not_improved(caplog):
    caplog.set_level("INFO")
    Values().stops_after(EarlyStopping(patience=2), "accuracy", [0.5, 0.25, 0.375])
    (message,) = caplog.messages
    assert message.endswith(
        "after iteration 3: validation_accuracy has not improved on 0.5 for 2 validations"
    )


def test_early_stopping_rounds_the_best_value(caplog):
    caplog.set_level("INFO")
    Values().stops_after(EarlyStopping(patience=1), "accuracy", [0.2000000048428774, 0.1])
    (message,) = caplog.messages
    assert message.endswith("validation_accuracy has not improved on 0.2 for 1 validation")


def test_only_rank_zero_says_that_it_stops(caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Values().stops_after(EarlyStopping(patience=1), "accuracy", [0.5, 0.25, 0.5]) == 2
    assert not caplog.messages


def test_early_stopping_refuses_what_cannot_be():
    with pytest.raises(UserError, match=r"needs validations: set trainer\.eval_every"):
        Values(eval_every=0).stops_after(EarlyStopping(), "accuracy", [])
    with pytest.raises(UserError, match="own needs a mode"):
        Values().stops_after(EarlyStopping(metric="own"), "own", [])
    message = r"no validation metric acuracy \(did you mean accuracy\?\): choose one of loss"
    with pytest.raises(UserError, match=message):
        Values().stops_after(EarlyStopping(metric="acuracy"), "accuracy", [])
    assert Values("mse").stops_after(EarlyStopping(patience=1), "mse", [2.0, 1.0, 1.5]) == 3


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("trainer.eval_every=0", "needs validations"),
        ("callbacks.early_stopping.metric=acuracy", "no validation metric acuracy"),
        ("callbacks.early_stopping.metric=accuracy_before", "no validation metric"),
    ],
)
def test_early_stopping_is_refused_before_the_run_starts(tmp_path, option, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path / "run", "strategy=local", "callbacks=early_stopping", option)
    assert not (tmp_path / "run").exists()


def test_callbacks_are_asked_when_the_experiment_is_built(tmp_path):
    options = ("strategy=local", "trainer.iterations=2", mine("Counted"))
    train(str(tmp_path), *options)
    again = build(tmp_path, *options, "resume=auto", "trainer.iterations=3")
    assert (again.callbacks["mine"].built, again.callbacks["mine"].forgotten) == (1, 0)
    other = build(tmp_path, *options, "resume=auto", "trainer.eval_seed=9")
    assert (other.callbacks["mine"].built, other.callbacks["mine"].forgotten) == (1, 1)


def test_a_callback_of_any_rank_may_refuse_the_run(tmp_path):
    arguments = (*SMALL, "strategy=rpc", mine("Refuses"), f"hydra.run.dir={tmp_path}")
    outcomes = run_command("maml.py", *arguments, size=2, directory=Path(__file__).parent)
    assert [outcome.status for outcome in outcomes] == [2, 2]
    errors = "".join(outcome.err for outcome in outcomes)
    assert errors == "error: on rank 1: the callback does not fit: leave it out.\n"


def test_a_hook_with_other_arguments_is_refused():
    with pytest.raises(TypeError, match=r"define it as on_test_end\(self, trainer, results\)"):
        type("Mine", (Callback,), {"on_test_end": lambda self, trainer: None})
    type("Mine", (Callback,), {"on_test_end": lambda self, *arguments: None})
    type("Mine", (Callback,), {"on_train_start": staticmethod(lambda trainer: None)})

    def with_epoch(hook):
        return functools.wraps(hook)(lambda self, trainer, output: hook(self, trainer, output, 1))

    def hook(self, trainer, output, epoch):
        pass

    type("Mine", (Callback,), {"on_iteration_end": with_epoch(hook)})


def test_a_misspelt_hook_is_refused():
    with pytest.raises(TypeError, match=r"on_validation_ends .*did you mean on_validation_end\?"):

        class Misspelt(Callback):
            def on_validation_ends(self, trainer, metrics):
                pass


def test_a_callback_must_be_a_subclass(tmp_path):
    with pytest.raises(UserError, match=r"callbacks\.mine\._target_=.*Callback: derive the class"):
        build(tmp_path, "strategy=local", "+callbacks.mine._target_=fractions.Fraction")
    with pytest.raises(UserError, match=r"callbacks\.ema\.decay=1.0 does not fit"):
        build(tmp_path, "strategy=local", "callbacks=ema", "callbacks.ema.decay=1.0")


@pytest.mark.parametrize(
    ("strategy", "size"), [("rpc", 2), pytest.param("allreduce", 2, marks=pytest.mark.slow)]
)
def test_an_error_in_a_callback_keeps_its_traceback(tmp_path, strategy, size):
    options = (f"strategy={strategy}", mine("Failing"), "timeout_seconds=10")
    outcomes = train_world(size, tmp_path, *options, may_fail=True)
    assert isinstance(outcomes[0], RankFailed)
    assert "ZeroDivisionError: in the user's callback" in str(outcomes[0])
    assert 'test_callbacks.py", line' in str(outcomes[0])


def test_a_state_that_a_checkpoint_cannot_hold_is_refused(tmp_path):
    x = build(tmp_path, "strategy=local", mine("Unsaved"))
    with pytest.raises(UserError, match=r"Unsaved\.state_dict \(callbacks\.mine\) holds a Posix"):
        Trainer(x).run()
    assert x.state.iteration == 0
    x = build(tmp_path, "strategy=local", mine("Forgetful"))
    with pytest.raises(UserError, match=r"Forgetful\.state_dict \(callbacks\.mine\) returned None"):
        Trainer(x).run()


def test_a_callback_may_be_added_or_left_out_on_resume(tmp_path, plain):
    whole = read_results(plain)
    stopped = ("strategy=local", "+callbacks.mine.stop_at=2", mine("Recorder"), "callbacks=ema")
    assert train(str(tmp_path / "left out"), *stopped)["iterations"] == 2
    found = train(str(tmp_path / "left out"), *stopped, "resume=auto", "trainer.eval_tasks=9")
    assert found["iterations"] == 2  # only the test was left
    found = train(str(tmp_path / "left out"), "strategy=local", "resume=auto")
    for name in ("iterations", "test_accuracy", "train_loss"):
        assert found[name] == whole[name]
    half = f"resume={plain}/checkpoints/iteration-00000002.pt"
    found = train(str(tmp_path / "added"), "strategy=local", half, "callbacks=ema")
    assert found["train_loss"] == whole["train_loss"]


@pytest.mark.parametrize("name", ["maml", "ddp"])
def test_the_group_is_chosen_with_and_without_a_plus(name):
    one = compose("callbacks=early_stopping", name=name).callbacks
    assert one == compose("+callbacks=early_stopping", name=name).callbacks
    both = compose("callbacks=[early_stopping,ema]", mine("Recorder"), name=name).callbacks
    assert list(both) == ["early_stopping", "ema", "mine"]


def test_integers_are_not_averaged(tmp_path):
    options = ("strategy=local", "algorithm=reptile", "callbacks=ema", "algorithm.inner_steps=2")
    x = build(tmp_path, *options, "trainer.eval_every=0")
    Trainer(x).run()
    assert x.evaluated_learner is not x.learner
    assert x.evaluated_learner.step == x.learner.step == 8  # of four iterations


class FreezeBody(Callback):
    """Freezes all but the last layer after the first iteration."""

    def on_iteration_end(self, trainer, output):
        for name, parameter in trainer.experiment.learner.named_parameters():
            parameter.requires_grad_("convolutions" not in name and "norms" not in name)


@pytest.mark.parametrize(
    "algorithm",
    [
        *("maml", "reptile"),
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("meta_sgd", "maml_plus_plus", "imaml")
        ),
    ],
)
def test_layers_that_a_callback_freezes_are_neither_trained_nor_adapted(tmp_path, algorithm):
    x = build(
        tmp_path,
        *("strategy=local", f"algorithm={algorithm}", "logger=[]", "trainer.eval_every=0"),
        f"+callbacks.freeze._target_={__name__}.FreezeBody",
    )
    x.logger = Logger()
    trainer, model = Trainer(x), x.learner.model
    trainer.callbacks[0].on_iteration_end(trainer, trainer.train_step(1))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    trainer.train_step(2)
    changed = {n for n, each in model.state_dict().items() if not torch.equal(each, before[n])}
    assert changed == {"head.weight", "head.bias"}
    if algorithm not in ("imaml", "reptile"):
        assert set(x.learner.initial()) == changed
    model.requires_grad_(False)
    if algorithm not in ("imaml", "reptile"):
        with pytest.raises(UserError, match=r"all parameters that .* adapts are frozen"):
            x.learner.initial()
        assert len(x.learner.eval().initial()) > 2  # as for inference: all are adapted


class CausalMask(MLP):
    """A network with an attention mask, a running maximum that starts at minus infinity, and a
    constant of 8 bits.
    """

    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__(input_shape, outputs, hidden=[8], batch_norm=False)
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1))
        self.register_buffer("largest", torch.tensor(-torch.inf))
        self.register_buffer("scale", torch.tensor(2.0).to(torch.float8_e4m3fn))

    def forward(self, inputs):
        self.largest.copy_(self.largest.maximum(inputs.max()))
        return super().forward(inputs) + self.mask[0, 0]


@pytest.mark.parametrize(("strategy", "size"), ALLREDUCE_IS_SLOW)
def test_infinite_elements_of_buffers_stay_or_become_finite(tmp_path, strategy, size):
    options = (f"strategy={strategy}", "callbacks=ema", f"model._target_={__name__}.CausalMask")
    run(size, tmp_path, *options)
    saved = read_checkpoint(Checkpoints(tmp_path).newest())
    for contents in (saved["learner"], saved["trained"]["learner"]):
        assert contents["model.mask"].tolist() == [[0, -torch.inf], [0, 0]]
        assert 0.9 < contents["model.largest"] <= 1
        assert contents["model.scale"].float() == 2


class KeepsItsInput(MLP):
    """A network with a buffer that each task replaces."""

    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__(input_shape, outputs, hidden=[8], batch_norm=False)
        self.register_buffer("last", torch.tensor(1000.0))

    def forward(self, inputs):
        self.last.fill_(0.1088952)
        return super().forward(inputs)


def test_buffers_are_rounded_once(tmp_path):
    model = f"model._target_={__name__}.KeepsItsInput"
    train(str(tmp_path), "strategy=local", "trainer.iterations=1", model)
    saved = read_checkpoint(Checkpoints(tmp_path).newest())
    assert saved["learner"]["model.last"] == torch.tensor(0.1088952)


class FreezeAt(Callback):
    """Freezes the layers before the head in an iteration, and unfreezes them in another one."""

    def __init__(self, freeze: int = 0, unfreeze: int = 0) -> None:
        self.freeze, self.unfreeze = freeze, unfreeze

    def on_iteration_end(self, trainer, output):
        for iteration, trains in ((self.freeze, False), (self.unfreeze, True)):
            if trainer.state.iteration == iteration:
                for name, parameter in trainer.experiment.learner.named_parameters():
                    parameter.requires_grad_(trains or "head" in name)


class FrozenLayers(MLP):
    """A network whose hidden layers are frozen when it is made."""

    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__(input_shape, outputs, hidden=[8], batch_norm=False)
        self.layers.requires_grad_(False)


@pytest.mark.parametrize(
    "options",
    [
        ("freeze=1", "callbacks=ema", "callbacks.ema.decay=0.5"),
        ("unfreeze=1", f"model._target_={__name__}.FrozenLayers"),
    ],
)
def test_layers_that_are_frozen_or_not_resume_with_the_same_bits(tmp_path, options):
    change, *others = options
    callback = f"+callbacks.change._target_={__name__}.FreezeAt"
    common = ("strategy=local", *others, callback, f"+callbacks.change.{change}")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train(str(whole), *common)
    results = train(str(parts), *common, f"resume={whole}/checkpoints/iteration-00000002.pt")
    later = [line for line in records(whole) if line["iteration"] > 2]
    assert len(later) == 3 and without_times(records(parts)) == without_times(later)
    assert results["test_loss"] == read_results(whole)["test_loss"]


@pytest.mark.parametrize(("strategy", "size"), ALLREDUCE_IS_SLOW)
def test_the_best_checkpoint_is_tested_with_its_own_frozen_layers(tmp_path, strategy, size):
    options = (
        *(f"strategy={strategy}", "optimizer.lr=3", "trainer.test_checkpoint=best"),
        f"+callbacks.change._target_={__name__}.FreezeAt",
        *("+callbacks.change.freeze=1", "+callbacks.change.unfreeze=3"),
    )
    run(size, tmp_path, *options)
    results = read_results(tmp_path)
    assert results["tested_iteration"] == 2
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(compose(*SMALL, *options), tmp_path / ".hydra" / "config.yaml")
    assert evaluate_run(tmp_path, trust_code=True)["test_loss"] == results["test_loss"]


class TestDuringTraining(Callback):
    """Tests the run after the last iteration and after each validation."""

    __test__ = False

    def __init__(self) -> None:
        self.tested: list[int] = []

    def on_iteration_end(self, trainer, output):
        if trainer.state.iteration == trainer.config.iterations:
            self.tested.append(trainer.test()["tested_iteration"])

    def on_validation_end(self, trainer, metrics):
        self.tested.append(trainer.test()["tested_iteration"])


class EvaluatesItsModel(Callback):
    """Returns the model instead of the learner."""

    def on_build(self, experiment):
        self.model = experiment.learner.model

    def evaluated_learner(self):
        return self.model


def test_only_a_learner_is_evaluated(tmp_path):
    callback = f"+callbacks.mine._target_={__name__}.EvaluatesItsModel"
    expected = r"^EvaluatesItsModel\.evaluated_learner returned a Conv4: return a .*Learner"
    with pytest.raises(UserError, match=expected):
        train(str(tmp_path), "strategy=local", callback)


@pytest.mark.parametrize("average", [pytest.param((), marks=pytest.mark.slow), ("callbacks=ema",)])
def test_training_continues_with_its_own_weights_after_a_test(tmp_path, average):
    options = ("strategy=local", "trainer.test_checkpoint=best", "optimizer.lr=3", *average)
    train(str(tmp_path / "plain"), *options)
    x = build(tmp_path / "tested", *options)
    x.callbacks = {**x.callbacks, "test": (callback := TestDuringTraining())}
    Trainer(x).run()
    assert callback.tested == [2, 2, 2]
    assert without_times(records(tmp_path / "tested")) == without_times(records(tmp_path / "plain"))
    (left, right) = (
        read_checkpoint(tmp_path / name / "checkpoints/iteration-00000004.pt")["learner"]
        for name in ("tested", "plain")
    )
    assert all(torch.equal(tensor, right[name]) for name, tensor in left.items())


def test_frozen_layers_are_frozen_where_the_run_is_loaded(tmp_path):
    frozen = f"+callbacks.freeze._target_={__name__}.FreezeBody"
    options = ("strategy=local", frozen, "algorithm.eval_inner_steps=3")
    result = train(str(tmp_path), *options)
    (tmp_path / ".hydra").mkdir()
    OmegaConf.save(compose(*SMALL, *options), tmp_path / ".hydra" / "config.yaml")
    learner = load_learner(tmp_path).learner
    assert {n for n, each in learner.named_parameters() if each.requires_grad} == {
        "model.head.weight",
        "model.head.bias",
    }
    assert evaluate_run(tmp_path)["test_loss"] == result["test_loss"]
    file = export_weights(tmp_path, tmp_path / "weights.safetensors")
    assert set(load_learner(file).learner.eval().initial()) == {"head.weight", "head.bias"}
