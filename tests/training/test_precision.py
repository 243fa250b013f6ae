"""Precision of the tasks' computation: bfloat16, and TensorFloat-32 where there is none."""

import logging
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig
from tiny import SMALL, build, compose, records, without_times
from worlds import run_world

from metadist.algorithms import MAML, Reptile
from metadist.config import build_experiment
from metadist.distributed.worker_local import WorkerLocal
from metadist.errors import UserError
from metadist.models import MLP, Conv4
from metadist.tasks import FewShotTasks, Glyphs, Sinusoid, task_keys
from metadist.training import (
    EvaluateMapper,
    MetaBatch,
    Trainer,
    TrainMapper,
    supported_precision,
)
from metadist.training.compiled_steps import CompiledSteps
from metadist.training.environment import environment_of
from metadist.training.precision import tensor_float32

BF16 = "trainer.precision=bf16"
CPU = torch.device("cpu")


def glyphs() -> FewShotTasks:
    sizes = {"train_classes": 6, "validation_classes": 5, "test_classes": 5, "examples": 6}
    return FewShotTasks(Glyphs(**sizes), 3, 2, 3)


def small_mlp() -> tuple[MAML, FewShotTasks]:
    torch.manual_seed(0)
    model = MLP((1,), 1, hidden=[8], batch_norm=False)
    return MAML(model, True, 0.01), FewShotTasks(Sinusoid(), 1, 5, 5)


def conv4(**options) -> tuple[MAML, FewShotTasks]:
    torch.manual_seed(0)
    return MAML(Conv4((1, 28, 28), 3, filters=16, **options), inner_lr=0.01), glyphs()


def mlp() -> tuple[MAML, FewShotTasks]:
    torch.manual_seed(0)
    model = MLP((1,), 1, hidden=[8, 8], batch_norm=False)
    return MAML(model, True, 0.01, 2), FewShotTasks(Sinusoid(), 1, 5, 5)


def response(made, precision, tasks=5, first=0, **options):
    learner, distribution = made
    keys = task_keys(0, "train", 1, range(first, first + tasks))
    local = WorkerLocal("tasks of a precision", distribution)
    mapper = TrainMapper(local, "cpu", precision=precision, **options)
    calls = [((learner.train(), MetaBatch(keys)), {})]
    return mapper.weighted_sum(calls, [float(tasks)], list(learner.parameters()))


def gradient(found) -> torch.Tensor:
    return torch.cat([each.flatten() for each in found.gradients.by_input])


def assert_close_as_bf16(found, expected):
    torch.testing.assert_close(found.value.loss, expected.value.loss, rtol=0.01, atol=0)
    assert found.dtypes == expected.dtypes and found.dtypes[0] is torch.float32
    error = (gradient(found) - gradient(expected)).norm() / gradient(expected).norm()
    assert 0 < error < 0.15


@pytest.mark.parametrize(
    "make",
    [
        mlp,
        conv4,
        lambda: conv4(pooling="max"),
        lambda: conv4(running_statistics=True),  # one task at a time
    ],
    ids=["mlp", "stride", "max", "running statistics"],
)
def test_bf16_is_close_to_float32_and_the_same_for_any_split(make):
    expected, found = response(make(), "float32"), response(make(), "bf16")
    assert_close_as_bf16(found, expected)
    parts = [response(make(), "bf16", count, first) for first, count in ((0, 1), (1, 4))]
    assert torch.equal(gradient(found), sum(map(gradient, parts)))
    assert torch.equal(found.value.loss, sum(part.value.loss for part in parts))


def test_bf16_multiplies_in_bfloat16_and_float32_does_not():
    for precision, expected in (("float32", torch.float32), ("bf16", torch.bfloat16)):
        made, seen = conv4(), set()
        made[0].model.head.register_forward_hook(lambda *a, seen=seen: seen.add(a[2].dtype))
        response(made, precision)
        assert seen == {expected}


@pytest.mark.slow
@pytest.mark.parametrize("make", [small_mlp, conv4], ids=["mlp", "conv4"])
def test_compiled_bf16_is_close_to_float32_and_the_same_for_any_split(make, caplog):
    compiled = WorkerLocal("compiled steps of a test", CompiledSteps(4))
    with caplog.at_level(logging.WARNING, "metadist"):
        found = response(make(), "bf16", compiled=compiled)
    assert not [each for each in caplog.records if each.name.startswith("metadist")]
    assert_close_as_bf16(found, response(make(), "float32"))
    parts = [response(make(), "bf16", n, i, compiled=compiled) for i, n in ((0, 1), (1, 4))]
    assert torch.equal(gradient(found), sum(map(gradient, parts)))


@pytest.mark.slow
def test_what_is_compiled_for_bf16_multiplies_in_bfloat16(monkeypatch):
    graphs = []

    def record(graph, *_, **__):
        graphs.append(graph)
        return graph

    monkeypatch.setattr("torch._inductor.compile", record)
    compiled = WorkerLocal("compiled steps of a test", CompiledSteps(4))
    eager, traced = response(conv4(), "bf16", 4), response(conv4(), "bf16", 4, compiled=compiled)
    assert_close_as_bf16(traced, response(conv4(), "float32", 4))
    torch.testing.assert_close(traced.value.loss, eager.value.loss, rtol=0.01, atol=0)
    products = [n for n in graphs[0].graph.nodes if "bmm" in str(n.target)]
    assert products and {n.meta["val"].dtype for n in products} == {torch.bfloat16}


def test_evaluation_in_bf16_returns_float32():
    learner, tasks = conv4()
    batch = MetaBatch(task_keys(0, "test", 0, range(4)))
    found = {}
    for precision in ("float32", "bf16"):
        mapper = EvaluateMapper(WorkerLocal("evaluated", tasks), "cpu", precision=precision)
        found[precision] = mapper(learner, batch)
    for name, values in found["bf16"].items():
        assert values.dtype is found["float32"][name].dtype
        torch.testing.assert_close(values, found["float32"][name], rtol=0.02, atol=0.25)
    assert not torch.equal(found["bf16"]["loss"], found["float32"]["loss"])
    accuracy = 9 * found["bf16"]["accuracy"]  # of nine queries
    torch.testing.assert_close(accuracy, accuracy.round(), rtol=0, atol=1e-5)


def test_an_algorithm_with_buffers_and_random_numbers():
    torch.manual_seed(0)
    learner = Reptile(Conv4((1, 28, 28), 3, filters=16), inner_steps=2, inner_batch_size=3)
    expected, found = (response((learner, glyphs()), each) for each in ("float32", "bf16"))
    torch.testing.assert_close(found.value.loss, expected.value.loss, rtol=0.05, atol=0)
    assert {each.dtype for each in found.value.buffers.values()} == {torch.float64}


def in_bf16(strategy: str) -> DictConfig:
    return compose(*SMALL, *strategy.split(), BF16, "trainer.iterations=2")


def trained(directory: Path, configuration: DictConfig) -> tuple[str | None, set[torch.dtype]]:
    """Train; the precision in the results, and the types of parameters and gradients."""
    x = build_experiment(configuration, directory, "maml")
    results = Trainer(x).run()
    kept = {t.dtype for p in x.learner.parameters() for t in (p, p.grad) if t is not None}
    return results["environment"]["precision"] if results else None, kept


@pytest.fixture(scope="module")
def one_worker(tmp_path_factory):
    directory = tmp_path_factory.mktemp("one")
    assert trained(directory, in_bf16("strategy=local")) == ("bf16", {torch.float32})
    return without_times(records(directory))


@pytest.mark.parametrize(
    ("strategy", "same_bits"),
    [
        ("strategy=rpc", True),
        ("strategy=allreduce", True),
        # These sum in float32.
        pytest.param("strategy=rpc strategy.gradient=dist_autograd", False, marks=pytest.mark.slow),
        pytest.param("strategy=allreduce strategy.engine=ddp", False, marks=pytest.mark.slow),
    ],
)
def test_a_run_in_bf16_on_two_workers(tmp_path, one_worker, strategy, same_bits):
    first, other = run_world(trained, 2, tmp_path, in_bf16(strategy))
    assert first == ("bf16", {torch.float32}) and other[1] == {torch.float32}
    found = without_times(records(tmp_path))
    assert found[0]["train_loss"] == pytest.approx(one_worker[0]["train_loss"], rel=0.01)
    assert found == one_worker or not same_bits


def test_the_environment_names_another_precision_than_float32(tmp_path):
    assert "precision" not in environment_of(build(tmp_path, "strategy=local"))
    assert environment_of(build(tmp_path, "strategy=local", BF16))["precision"] == "bf16"


def test_tf32_without_cuda_is_float32_with_one_line(tmp_path, caplog):
    with caplog.at_level(logging.INFO, "metadist"):
        x = build(tmp_path, "strategy=local", "trainer.precision=tf32")
    (line,) = [r.getMessage() for r in caplog.records if "tf32" in r.getMessage()]
    assert "cpu has no TensorFloat-32, using float32" in line
    assert x.train_mapper.precision == x.evaluate_mapper.precision == "float32"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("trainer.precision=bf17", "trainer.precision=bf17 does not fit: .*'tf32' or 'bf16'"),
        ("+trainer.precison=bf16", r"trainer.precison .*did you mean precision\?"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, override, message):
    with pytest.raises(UserError, match=message):
        build(tmp_path, "strategy=local", override)


def test_gpus_without_bfloat16_are_refused(monkeypatch):
    """A simulated GPU: its compute capability is what the choice depends on."""
    cuda, major = torch.device("cuda", 0), 7
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (major, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "T4")
    with pytest.raises(UserError, match=r"bf16 needs a GPU with bfloat16 .* which T4 lacks: take"):
        supported_precision("bf16", cuda)
    assert supported_precision("tf32", cuda) == supported_precision("float32", cuda) == "float32"
    major = 8
    assert [supported_precision(each, cuda) for each in ("bf16", "tf32")] == ["bf16", "tf32"]
    assert supported_precision("bf16", CPU) == "bf16"


@pytest.mark.parametrize("operations", [torch.backends.cuda.matmul, torch.backends.cudnn.conv])
def test_a_precision_that_the_caller_set_by_its_new_name_is_restored(operations):
    """Settings of GPUs, which exist without one. PyTorch refuses to read them by both names."""

    def use_tf32() -> list[bool]:
        each = torch.backends.cuda.matmul, torch.backends.cudnn.conv
        return [operations.fp32_precision == "tf32" for operations in each]

    default = operations.fp32_precision
    try:
        for value in ("ieee", "tf32"):
            operations.fp32_precision = value
            before = use_tf32()
            for precision in ("float32", "tf32"):
                with tensor_float32(precision, torch.device("cuda")):
                    assert use_tf32() == 2 * [precision == "tf32"]
                assert use_tf32() == before and operations.fp32_precision == value
    finally:
        operations.fp32_precision = default
    assert torch.get_float32_matmul_precision() == "highest" and torch.backends.cudnn.allow_tf32
