"""Any overrides: an experiment, or one sentence; and schedules of the learning rate."""

import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra.errors import HydraException
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some
from omegaconf.errors import OmegaConfBaseException
from tiny import build
from torch import nn

from metadist.algorithms import Learner
from metadist.config.hydra_errors import describe_error, raised_by_hydra
from metadist.distributed import Shard
from metadist.errors import UserError
from metadist.loggers import LoggerCollection, Run
from metadist.models import MLP
from metadist.tasks import Episode, Examples, key_generator, task_keys
from metadist.training import Experiment, MetaBatch, Trainer

KEYS = (
    "trainer.iterations",
    "trainer.meta_batch_size",
    "trainer.eval_every",
    "trainer.keep_checkpoints",
    "trainer.clip_norm",
    "trainer.on_non_finite",
    "trainer.send_tasks",
    "task.ways",
    "task.shots",
    "task.queries",
    "algorithm.inner_lr",
    "algorithm.inner_steps",
    "algorithm.first_order",
    "optimizer.lr",
    "model.filters",
    "model.pooling",
    "model.dropout",
    "seed",
    "device",
    "resume",
    "scheduler",
    "model",
    "optimizer",
    "strategy.gradient",
)
VALUES = some.one_of(
    some.integers(-3, 12).map(str),
    some.floats(width=32).map(str),
    some.sampled_from(["null", "true", "false", "[]", "[1, 2]", "{}", "{a: 1}", "''", "???"]),
    some.sampled_from(["stop", "skip", "stride", "max", "worker", "mlp", "cosine", "sgd", "cpu"]),
    some.text("abcxyz019.-+_", min_size=1, max_size=6),
)


@settings(max_examples=20, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(some.lists(some.tuples(some.sampled_from(KEYS), VALUES), min_size=1, max_size=3))
def test_random_overrides_build_or_are_refused_in_one_sentence(pairs):
    options = [f"{key}={value}" for key, value in pairs]
    with tempfile.TemporaryDirectory() as folder:
        try:
            found = build(Path(folder) / "run", "strategy=local", *options)
        except Exception as error:
            refused = isinstance(error, UserError | HydraException | OmegaConfBaseException)
            if not refused and not raised_by_hydra(error):
                raise
            sentence = describe_error(error)
            assert sentence and "\n" not in sentence and len(sentence) < 700, sentence
        else:
            assert isinstance(found, Experiment)


def test_outputs_that_training_would_leave_out_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"train_ways=2 .* MAML .* not train 1 of its outputs"):
        build(tmp_path, "strategy=local", "task.train_ways=2")
    build(tmp_path, "strategy=local", "task.train_ways=5")
    build(tmp_path, "strategy=local", "task.train_ways=2", "algorithm=prototypical")


def test_a_run_without_validations_needs_no_validation_classes(tmp_path):
    overrides = ("strategy=local", "task.ways=6", "++dataset.validation_classes=5")
    with pytest.raises(UserError, match="the validation split of glyphs has only 5"):
        build(tmp_path, *overrides)
    experiment = build(tmp_path, *overrides, "trainer.eval_every=0", "logger=[]")
    assert Trainer(experiment).run()["protocol"]["ways"] == 6


class Sequences(nn.Module):
    """A model whose batch norm has several values per channel of each example."""

    def __init__(self, input_shape, outputs):
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(2), nn.Linear(8, outputs)

    def forward(self, inputs):
        values = inputs.unsqueeze(1) * torch.arange(1.0, 9.0).view(2, 4)
        return self.head(self.norm(values).flatten(1))


def test_batch_norm_of_a_single_example_is_refused(tmp_path):
    overrides = ("strategy=local", "dataset=sinusoid", "model=mlp")
    small = ("++dataset", "model")
    with pytest.raises(UserError, match=r"single value .* as with model\.batch_norm=false of mlp"):
        build(tmp_path, *overrides, omit=small)
    build(tmp_path, *overrides, "model.batch_norm=false", omit=small)
    build(tmp_path, *overrides, "task.shots=2", omit=small)
    for one, split in (("task.shots", "test"), ("task.train_shots", "train")):
        with pytest.raises(UserError, match=f"a single value per channel, in a {split} task"):
            build(
                tmp_path, *overrides, "task.shots=2", "task.train_shots=2", f"{one}=1", omit=small
            )
    own = ("~model", f"+model._target_={__name__}.Sequences")
    assert build(tmp_path, *overrides[:2], *own, "task.shots=1", omit=small)


def rates(directory, *overrides: str) -> list[float]:
    x = build(directory, "strategy=local", "optimizer=sgd", "optimizer.lr=0.1", *overrides)
    found = []
    for _ in range(5):
        found.append(x.optimizer.param_groups[0]["lr"])
        x.optimizer.step()
        x.scheduler.step()
    return found


def test_schedules_of_the_learning_rate(tmp_path):
    assert rates(tmp_path) == [0.1] * 5
    halved = ("scheduler=step", "scheduler.step_size=2", "scheduler.gamma=0.5")
    assert rates(tmp_path, *halved) == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])
    cosine = rates(tmp_path, "scheduler=cosine", "scheduler.eta_min=0.02")
    expected = [0.1, 0.08828427, 0.06, 0.03171573, 0.02]  # 0.02 + 0.04 (1 + cos(pi t / 4))
    assert cosine == pytest.approx(expected)
    with pytest.raises(UserError, match="cannot take a step"):
        rates(tmp_path, "scheduler=step", "scheduler.step_size=0")


@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_timeouts_and_sizes_reach_the_parts_of_a_run(tmp_path, strategy):
    options = ("timeout_seconds=7", "rendezvous_timeout_seconds=11", "strategy.call_timeout=13")
    x = build(tmp_path, f"strategy={strategy}", *options, "trainer.task_chunk_size=2")
    assert (x.strategy.rendezvous_timeout_seconds, x.strategy.call_timeout) == (11, 13)
    assert strategy != "rpc" or x.strategy.timeout_seconds == 7
    assert strategy != "allreduce" or x.strategy.device == torch.device("cpu")
    assert x.train_mapper.chunk_size == x.evaluate_mapper.chunk_size == 2
    assert x.title == f"MAML on glyphs, 3-way 1-shot, {strategy} on 1 worker"


class OwnTasks:
    """A task distribution with the public protocol's names alone."""

    input_shape, outputs, regression = (4,), 2, False

    def __init__(self, dataset, **options):
        pass

    def sample(self, key):
        inputs = torch.from_numpy(key_generator(key).standard_normal((4, 4), np.float32))
        targets = torch.arange(2)
        return Episode(Examples(inputs[:2], targets), Examples(inputs[2:], targets))

    def protocol(self):
        return {"dataset": "random vectors"}


def test_a_task_distribution_of_the_users_own_trains(tmp_path):
    target = f"task._target_={OwnTasks.__module__}.OwnTasks"
    options = ("strategy=local", target, "model=mlp", "model.batch_norm=false")
    omit = ("model", "task")
    x = build(tmp_path, *options, omit=omit)
    assert x.title == "MAML on random vectors, local on 1 worker"
    assert Trainer(x).run()["protocol"]["dataset"] == "random vectors"


def test_more_threads_than_cpus_are_a_warning_on_rank_zero(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
    build(tmp_path, "threads=1")
    assert not caplog.messages
    build(tmp_path, "threads=2")
    (message,) = caplog.messages
    assert message.startswith("threads=2 is more than the CPUs that this process may use, 1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    build(tmp_path, "threads=2")
    assert len(caplog.messages) == 1


def test_metrics_are_recorded_whatever_the_loggers_and_threads_are_set(tmp_path):
    x = build(tmp_path, "strategy=local", "logger=console", "threads=2")
    assert torch.get_num_threads() == 2
    x.logger.start(Run(tmp_path, "maml", {}, 1, 0, "title"))
    x.logger.close()
    assert (tmp_path / "metrics.jsonl").exists()


def test_initial_parameters_are_those_of_the_seed(tmp_path):
    heads = [
        build(tmp_path, "strategy=local", f"seed={seed}").learner.model.head.weight
        for seed in (0, 1, 0)
    ]
    assert torch.equal(heads[0], heads[2]) and not torch.equal(heads[0], heads[1])


def test_secrets_are_not_part_of_the_saved_configuration(tmp_path, monkeypatch):
    monkeypatch.setenv("SERVICE_TOKEN", "a1b2c3d4e5f6")
    option = "logger.wandb.project=${oc.env:SERVICE_TOKEN}"
    x = build(tmp_path, "strategy=local", "logger=[wandb]", option, omit=("logger",))
    assert x.configuration["logger"]["wandb"]["project"] == "***"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            "~optimizer.fused optimizer._target_=torch.optim.LBFGS",
            "LBFGS cannot take a step with a dense gradient",
        ),
        ("+optimizer._partial_=true", "gives a partial, which is no torch.optim"),
        ("+scheduler._partial_=true", "gives a partial, which is no torch.optim.lr_scheduler"),
        (
            "~optimizer.fused optimizer._target_=torch.optim.SparseAdam",
            "SparseAdam cannot take a step",
        ),
        (
            f"~optimizer.fused optimizer._target_={__name__}.WithClosure",
            "WithClosure cannot take a step with a dense gradient and without a closure",
        ),
        (f"~optimizer.fused optimizer._target_={__name__}.WithoutRate", "has no learning rate"),
        (f"~optimizer.fused optimizer._target_={__name__}.of_copies", "not the learner's param"),
        (
            "scheduler=none scheduler._target_=torch.optim.lr_scheduler.OneCycleLR "
            "~scheduler.factor ~scheduler.total_iters +scheduler.max_lr=0.1 "
            "+scheduler.total_steps=3",
            "the learning-rate schedule ends after 3 of 4 iterations",
        ),
        (
            "scheduler=none scheduler._target_=torch.optim.lr_scheduler.ReduceLROnPlateau "
            "~scheduler.total_iters scheduler.factor=0.5",
            "a schedule that depends on a metric is not supported",
        ),
    ],
)
def test_optimizers_and_schedules_that_cannot_take_a_step(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path, "strategy=local", *overrides.split())


class WithoutRate(torch.optim.Optimizer):
    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {})

    def step(self, closure=None) -> None:
        pass


class WithClosure(torch.optim.Optimizer):
    def __init__(self, params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure) -> None:
        closure()


def of_copies(params, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.Adam([each.detach().clone() for each in params], lr=lr)


def by_shape(params, lr: float = 0.1) -> torch.optim.Optimizer:
    """An optimizer with a larger rate for the last layer and none for vectors before it."""
    *body, weight, bias = params
    decayed = [each for each in body if each.dim() > 1]
    others = [each for each in body if each.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.Adam([*groups, {"params": [weight, bias], "lr": 2 * lr}], lr=lr)


def by_name(named_parameters, lr: float = 0.1) -> torch.optim.Optimizer:
    """The same groups, found by the parameters' names."""
    named = dict(named_parameters)
    head = [named.pop(name) for name in list(named) if ".head." in name]
    weights = [named.pop(name) for name, each in list(named.items()) if each.dim() > 1]
    groups = [{"params": weights, "weight_decay": 0.1}, {"params": list(named.values())}]
    return torch.optim.Adam([*groups, {"params": head, "lr": 2 * lr}], lr=lr)


class ByMomentum(torch.optim.lr_scheduler.LRScheduler):
    """A schedule that reads an option of Adam."""

    def get_lr(self) -> list[float]:
        return [group["lr"] * group["betas"][0] for group in self.optimizer.param_groups]


@pytest.mark.parametrize("function", ["by_shape", "by_name"])
def test_an_optimizer_and_a_schedule_of_ones_own_see_the_learners_parameters(tmp_path, function):
    own = ["~optimizer.fused", f"optimizer._target_={__name__}.{function}"]
    own.append(f"scheduler._target_={__name__}.ByMomentum")
    x = build(tmp_path, "strategy=local", *own, "~scheduler.factor", "~scheduler.total_iters")
    sizes = [len(group["params"]) for group in x.optimizer.param_groups]
    assert sizes == [4, 12, 2] and sum(sizes) == len(list(x.learner.parameters()))


class Lazy(nn.Module):
    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__()
        self.head = nn.LazyLinear(outputs)

    def forward(self, inputs):
        return self.head(inputs.flatten(1))


class LazyNorm(Lazy):
    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__(input_shape, outputs)
        self.head = nn.Sequential(nn.Linear(784, outputs), nn.LazyBatchNorm1d(affine=False))


class Pixels(nn.Module):
    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__()

    def forward(self, inputs):
        return inputs.flatten(1)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("Lazy", "Lazy has lazy layers"),
        ("LazyNorm", "LazyNorm has lazy layers"),
        ("Pixels", "the model Pixels has no parameters to adapt: register some"),
    ],
)
def test_models_without_parameters_to_train_are_refused(tmp_path, model, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path, f"model._target_={__name__}.{model}")


class NoSample:
    """A task distribution that lacks what samples tasks."""

    input_shape, outputs, regression = (1,), 1, True

    def __init__(self, dataset, **options) -> None: ...

    def __repr__(self) -> str:
        return "NoSample"


def no_shards(*args) -> None: ...


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            [f"task._target_={__name__}.NoSample"],
            "task distribution NoSample has no sample, prot",
        ),
        (
            [f"+partition._target_={__name__}.NoSample", "+partition.dataset=1"],
            "gives a NoSample, which cannot be called: give the class a method __call__",
        ),
        (
            ["+partition._target_=hydra.utils.get_method", f"+partition.path={__name__}.no_shards"],
            "a partitioner must return a list of Shard.* it returned None",
        ),
        (
            [f"reducer._target_={__name__}.NoSample", "+reducer.dataset=1"],
            "reducer._target_=.* gives a NoSample, which cannot be called",
        ),
        (
            [f"+callbacks._target_={__name__}.NoSample"],
            "callbacks has a _target_ of its own, and may have several nodes: give each a name",
        ),
    ],
)
def test_parts_of_the_users_own_that_do_not_fit(tmp_path, overrides, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path, *overrides)


class Expanded(MLP):
    """A model with buffers whose elements share their memory."""

    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__(input_shape, outputs, hidden=[4])
        self.register_buffer("positions", torch.arange(3).expand(2, 3))
        self.register_buffer("calls", torch.zeros(1).expand(4), persistent=False)

    def forward(self, inputs):
        self.calls = self.calls + 1
        return super().forward(inputs)


def test_expanded_buffers_are_updated_in_place(tmp_path):
    x = build(tmp_path, "strategy=local", f"model._target_={__name__}.Expanded")
    Trainer(x).run()
    model = x.learner.model
    assert model.positions.tolist() == [[0, 1, 2]] * 2
    assert model.calls.tolist() == [8] * 4 and "calls" not in model.state_dict()


class WithViews(MLP):
    """A model with parameters that are views, with gaps, with shared elements, or transposed."""

    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__(input_shape, outputs, hidden=[4])
        self.head.weight = nn.Parameter(torch.randn(outputs, 8)[:, ::2])
        self.head.bias = nn.Parameter(torch.zeros(1).expand(outputs))
        self.layers[0].weight = nn.Parameter(torch.randn(*self.layers[0].weight.shape[::-1]).T)


def test_parameters_that_are_views_train_with_a_fused_optimizer(tmp_path):
    trained = []
    for fused in ("true", "false"):
        model = f"model._target_={__name__}.WithViews"
        x = build(tmp_path / fused, "strategy=local", model, f"optimizer.fused={fused}")
        assert x.learner.model.layers[0].weight.stride() == (1, 4)  # it has no gaps
        x.logger = LoggerCollection([])
        Trainer(x).train_step(1)
        trained.append(list(x.learner.parameters()))
    torch.testing.assert_close(*trained)


class WithScalar(MLP):
    """A model with a scalar parameter before its layers."""

    def __init__(self, input_shape, outputs: int, dtype: str, **options) -> None:
        super().__init__(input_shape, outputs, hidden=[4])
        self.scale = nn.Parameter(torch.ones((), dtype=getattr(torch, dtype)))


def test_parameters_may_have_several_real_types_and_no_complex_one(tmp_path):
    model = f"model._target_={__name__}.WithScalar"
    build(tmp_path, "strategy=local", model, "+model.dtype=float64")
    with pytest.raises(UserError, match="WithScalar has complex parameters"):
        build(tmp_path, "strategy=local", model, "+model.dtype=complex64")


class Normalized(MLP):
    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__(input_shape, outputs, hidden=[4])
        torch.nn.utils.parametrizations.weight_norm(self.head)


def test_parametrizations_need_a_strategy_that_does_not_send_the_model(tmp_path):
    model = f"model._target_={__name__}.Normalized"
    with pytest.raises(UserError, match=r"weight_norm \(model\.head\): take strategy=allreduce"):
        build(tmp_path, "strategy=rpc", model)
    build(tmp_path, "strategy=local", model)


class Observed(MLP):
    """Keeps the outputs of its head by a local function."""

    def __init__(self, input_shape, outputs: int, **options) -> None:
        super().__init__(input_shape, outputs, hidden=[4])
        self.outputs: list[torch.Tensor] = []
        self.head.register_forward_hook(lambda *values: self.outputs.append(values[-1]))


def test_local_functions_need_a_strategy_that_does_not_send_the_model(tmp_path):
    model = f"model._target_={__name__}.Observed"
    expected = r"model\.head\._forward_hooks: .*<lambda>.*top level.* or take strategy=allreduce\.$"
    with pytest.raises(UserError, match=expected):
        build(tmp_path, "strategy=rpc", model)
    build(tmp_path, "strategy=local", model)


class Nearest(Learner):
    """A nearest neighbour, which has nothing to train."""

    def __init__(self, model, regression: bool = False, **options) -> None:
        super().__init__(model, regression)


def test_a_learner_without_parameters_is_refused(tmp_path):
    own = [f"model._target_={__name__}.Pixels", f"algorithm._target_={__name__}.Nearest"]
    with pytest.raises(UserError, match="Nearest and its model Pixels have no parameters"):
        build(tmp_path, *own)


def test_supervised_training_of_a_few_shot_algorithm_is_refused(tmp_path):
    with pytest.raises(UserError, match="MAML adapts to few-shot tasks, and supervised training"):
        build(tmp_path, "strategy=local", "algorithm=maml", name="ddp")


def test_an_error_in_a_module_of_the_user_names_its_line(tmp_path, monkeypatch):
    (tmp_path / "broken_module.py").write_text("class Mine:\n    value = undefined_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"broken_module\.py:2, in Mine: NameError: name"):
        build(tmp_path, "algorithm._target_=broken_module.Mine")


def test_resume_is_a_text(tmp_path):
    with pytest.raises(UserError, match="resume=True does not fit: write resume=auto or"):
        build(tmp_path, "resume=true")


@pytest.mark.parametrize(
    ("overrides", "shards"),
    [
        (["+partition=dim0"], 1),
        (["+partition=dim0", "reducer=sum"], 1),
        (["+partition=dim0", "reducer=sum", "reducer.of_items=false"], 3),
        (["+partition=dim0", "strategy=allreduce", "strategy.engine=ddp"], 3),
        (["+partition=dim0", "strategy=rpc", "strategy.gradient=dist_autograd"], 3),
        (["+partition=batch"], 1),
    ],
)
def test_tasks_are_one_shard_where_the_result_is_the_same(tmp_path, overrides, shards):
    options = ["strategy=local", "trainer.meta_batch_size=3", *overrides]
    x = build(tmp_path, *options)
    keys = task_keys(0, "train", 1, range(3))
    assert len(x.strategy.partitioner(x.learner, MetaBatch(keys))) == shards


def gradient(directory, *overrides):
    """The gradient of one meta-batch."""
    x = build(directory, "strategy=local", "trainer.meta_batch_size=5", *overrides)
    batch = MetaBatch(task_keys(0, "train", 1, range(5)))
    x.strategy.forward_backward(x.train_mapper, x.learner, batch)
    return [parameter.grad for parameter in x.learner.parameters()]


@pytest.mark.parametrize("reducer", ["mean", "sum"])
def test_shards_of_several_tasks_have_the_gradient_of_single_ones(tmp_path, reducer):
    found = gradient(tmp_path / "one", f"reducer={reducer}")
    target = f"+partition._target_={__name__}.one_by_one"
    expected = gradient(
        tmp_path / "each", f"reducer={reducer}", target, "+partition._partial_=true"
    )
    assert all(map(torch.equal, found, expected))


def one_by_one(learner, tasks: MetaBatch) -> list[Shard]:
    return [Shard(0, (learner, tasks.select(slice(i, i + 1)))) for i in range(tasks.size)]
