"""Compiled and captured forms of the outer step give the results of the eager step."""

import logging
import random

import pytest
import torch
from tiny_learners import sinusoid
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from metadist.algorithms import IMAML, MAML
from metadist.distributed.worker_local import WorkerLocal
from metadist.kernels import pytorch_operations
from metadist.models import MLP
from metadist.tasks import (
    Episode,
    Examples,
    FewShotTasks,
    Sinusoid,
    stack_episodes,
    task_keys,
)
from metadist.training import (
    EvaluateMapper,
    Interrupted,
    MetaBatch,
    TrainMapper,
)
from metadist.training.compiled_steps import CompiledSteps
from metadist.training.outer_step import StepArguments, outer_step


def response(learner, tasks, count, compiled=None, first=0):
    keys = task_keys(0, "train", 1, range(first, first + count))
    local_steps = compiled and WorkerLocal("compiled steps of a test", compiled)
    mapper = TrainMapper(WorkerLocal("tasks of a test", tasks), "cpu", compiled=local_steps)
    calls = [((learner, MetaBatch(keys)), {})]
    return mapper.weighted_sum(calls, [float(count)], list(learner.parameters()))


@pytest.fixture(params=["traced", pytest.param("compiled", marks=pytest.mark.slow)])
def form(request, monkeypatch):
    """Whether what is traced is translated to C++, too: "compiled"."""
    if request.param == "traced":
        monkeypatch.setattr("torch._inductor.compile", lambda graph, *_, **__: graph)
    return request.param


@pytest.fixture(params=["kept", pytest.param("compiled", marks=pytest.mark.slow)])
def kept_form(request, monkeypatch):
    """The step is kept as it is, untraced, or "compiled": for what does not depend on it."""
    if request.param == "kept":
        monkeypatch.setattr(
            "metadist.training.compiled_steps.compile_outer_step", lambda step, *_: step
        )
    return request.param


def test_compiled_and_eager_steps_agree_and_padded_tasks_do_not_count(form):
    learner, tasks = sinusoid()
    steps = CompiledSteps(4)
    for count in (4, 3, 6):  # a full chunk, a padded one, two of them
        eager = response(learner, tasks, count)
        compiled = response(learner, tasks, count, steps)
        torch.testing.assert_close(compiled.value, eager.value, rtol=1e-6, atol=1e-6)
        assert compiled.dtypes == eager.dtypes
        for found, expected in zip(
            compiled.gradients.by_input, eager.gradients.by_input, strict=True
        ):
            assert found.dtype is torch.float64
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class InfiniteMetric(MAML):
    """Has a metric that is infinite in every task."""

    def train_task(self, episode):
        result = super().train_task(episode)
        return result._replace(metrics={"odd": torch.full_like(result.loss.detach(), torch.inf)})


def test_an_infinite_metric_of_a_padding_task_does_not_count(form):
    learner, tasks = sinusoid()
    learner = InfiniteMetric(learner.model, True, 0.01).train()
    learner.batches_tasks = True
    compiled = response(learner, tasks, 3, CompiledSteps(4))
    assert compiled.value.metrics["odd"].item() == torch.inf


def test_a_step_whose_loop_depends_on_values_is_compiled(form, caplog):
    tasks = FewShotTasks(Sinusoid(), 1, 5, 5)
    learner = IMAML(MLP((1,), 1, [8], batch_norm=False), True, 0.01, inner_steps=1, cg_steps=2)
    eager = response(learner.train(), tasks, 4)
    compiled = response(learner, tasks, 4, CompiledSteps(4))
    assert "runs eagerly" not in caplog.text
    for found, expected in zip(compiled.gradients.by_input, eager.gradients.by_input, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_chunks_of_any_number_of_tasks_are_compiled_once(monkeypatch):
    graphs = []

    def record(graph, *_, **__):
        graphs.append(graph)
        return graph

    monkeypatch.setattr("torch._inductor.compile", record)
    (learner, tasks), steps = sinusoid(), CompiledSteps(4)
    for count in (4, 3, 6, 1):
        response(learner, tasks, count, steps)
    assert len(graphs) == 1


def test_parameters_of_another_layout_are_not_mistaken(form, caplog):
    tasks = FewShotTasks(Sinusoid(), 1, 5, 5)
    learner = MAML(MLP((1,), 1, hidden=[8, 8], batch_norm=False), True, 0.01).train()
    steps = CompiledSteps(4)
    before = response(learner, tasks, 4, steps)
    weight = learner.model.layers[1].weight
    weight.data = weight.data.t().contiguous().t()
    after = response(learner, tasks, 4, steps)
    for found, expected in zip(after.gradients.by_input, before.gradients.by_input, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    learner.double()
    sample = tasks.sample_batch
    tasks.sample_batch = lambda keys, device: in_float64(sample(keys, device))
    eager, compiled = response(learner, tasks, 4), response(learner, tasks, 4, steps)
    torch.testing.assert_close(compiled.value.loss, eager.value.loss, rtol=1e-12, atol=0)
    assert "runs eagerly" not in caplog.text


def in_float64(episode):
    return Episode(*(Examples(x.double(), y.double()) for x, y in episode))


def test_chunks_of_one_compiled_size_give_the_same_bits_in_any_split(form):
    learner, tasks = sinusoid()
    steps = CompiledSteps(4)
    whole = response(learner, tasks, 5, steps)
    parts = [
        response(learner, tasks, count, steps, first) for first, count in ((0, 1), (1, 3), (4, 1))
    ]
    assert torch.equal(whole.value.loss, sum(part.value.loss for part in parts))
    gradients = [part.gradients.by_input for part in parts]
    for found, *pieces in zip(whole.gradients.by_input, *gradients, strict=True):
        assert torch.equal(found, sum(pieces))


@pytest.fixture
def captured(monkeypatch):
    """The number of tasks of each captured step; a stand-in for CUDA graphs.

    Like a graph, it runs Python once, and each replay overwrites the results.
    """
    sizes = []

    def capture(function, arguments):
        graph = make_fx(function, tracing_mode="fake")(*arguments)
        memory = [output.clone() for output in graph(*arguments)]
        sizes.append(len(arguments[-1]))

        def replay(*arguments):
            for place, output in zip(memory, graph(*arguments), strict=True):
                place.copy_(output)
            return memory

        return replay

    monkeypatch.setattr("metadist.training.compiled_steps.capture", capture)
    with pytorch_operations():
        yield sizes


def test_a_captured_step_has_the_bits_of_the_eager_one(captured):
    learner, tasks = sinusoid()
    halves = [response(learner, tasks, 4, first=first) for first in (0, 4)]
    found = response(learner, tasks, 8, CompiledSteps(4, captures=True))
    assert captured == [4]
    assert torch.equal(found.value.loss, sum(half.value.loss for half in halves))
    parts = [half.gradients.by_input for half in halves]
    for mine, *others in zip(found.gradients.by_input, *parts, strict=True):
        assert torch.equal(mine, sum(others))


def test_tasks_of_many_shapes_are_captured_a_few_times_only(captured, caplog, monkeypatch):
    monkeypatch.setattr("metadist.training.compiled_steps._RECOMPILE_LIMIT", 2)
    caplog.set_level(logging.INFO, "metadist")
    learner, steps = sinusoid(1)[0], CompiledSteps(2, captures=True)
    for queries in range(1, 4):
        response(learner, FewShotTasks(Sinusoid(), 1, 5, queries), 2, steps)
    assert captured == [2] * 2
    (line,) = caplog.messages
    assert "it cannot be captured as a CUDA graph (more than 2 combinations of" in line


class Counts(MAML):
    """A learner that changes itself in each task."""

    batches_tasks = True
    calls = 0

    def train_task(self, episode):
        self.calls += 1
        result = super().train_task(episode)
        return result._replace(loss=result.loss + self.calls)


class Draws(MAML):
    """A learner that draws random numbers, and does not say so."""

    batches_tasks = True

    def train_task(self, episode):
        result = super().train_task(episode)
        return result._replace(loss=result.loss * (1 + 0.001 * random.random()))


@pytest.mark.parametrize(
    ("algorithm", "reason"),
    [(Counts, "changes the learner's calls"), (Draws, "draws random numbers")],
)
def test_what_a_replay_would_not_do_is_not_captured(algorithm, reason, captured, caplog):
    caplog.set_level(logging.INFO, "metadist")
    (model, tasks), steps = sinusoid(), CompiledSteps(4, captures=True)
    learner = algorithm(model.model, True, 0.01).train()
    losses = {response(learner, tasks, 4, steps).value.loss.item() for _ in range(3)}
    assert len(losses) == 3
    (line,) = caplog.messages
    assert reason in line


def test_a_hook_that_was_added_is_called(captured):
    (learner, tasks), steps = sinusoid(1), CompiledSteps(4, captures=True)
    before = response(learner, tasks, 4, steps).value.loss
    with learner.model.register_forward_hook(lambda module, inputs, outputs: outputs + 100):
        assert response(learner, tasks, 4, steps).value.loss > 100 * before


class Scaled(MLP):
    """A model with a constant of its own."""

    supports_batched_tasks = True
    scale = 1.0

    def forward(self, inputs):
        return self.scale * super().forward(inputs)


@pytest.mark.parametrize("name", ["inner_lr", "model.scale"])
def test_an_attribute_that_changes_is_not_ignored(form, caplog, name):
    _, tasks = sinusoid()
    learner = MAML(Scaled((1,), 1, [8]), regression=True).train()
    learner.model.scale = 1.0
    steps = CompiledSteps(4)
    response(learner, tasks, 4, steps)
    module, _, attribute = name.rpartition(".")
    setattr(learner.get_submodule(module), attribute, 0.1)
    for _ in range(2):
        found = response(learner, tasks, 4, steps)
    assert torch.equal(found.value.loss, response(learner, tasks, 4).value.loss)
    assert caplog.text.count(f"the learner's {name} changed during training") == 1


@pytest.mark.parametrize("kind", ["list", "nested", "dict", "tensor", "inference"])
def test_what_an_attribute_holds_is_not_ignored(kept_form, caplog, kind):
    learner, tasks = sinusoid()
    values = {"list": [1.0], "nested": [[1.0]], "dict": {"scale": 1.0}}.get(kind)
    if values is None:
        with torch.inference_mode(kind == "inference"):
            values = torch.ones(1)
    learner.model.values = values
    steps = CompiledSteps(4)
    for _ in range(2):
        response(learner, tasks, 4, steps)
    assert "runs eagerly" not in caplog.text
    if kind == "tensor":
        values.fill_(2.0)
    elif kind == "inference":
        learner.model.values = torch.zeros(1)
    else:
        (values[0] if kind == "nested" else values)["scale" if kind == "dict" else 0] = 2.0
    response(learner, tasks, 4, steps)
    assert "the learner's model.values changed during training" in caplog.text


def test_an_attribute_that_appears_is_not_ignored(kept_form, caplog):
    learner, tasks = sinusoid()
    steps = CompiledSteps(4)
    response(learner, tasks, 4, steps)
    learner.model.scale = 2.0
    response(learner, tasks, 4, steps)
    assert "the learner's model.scale changed during training" in caplog.text


def test_a_module_that_disappears_is_not_ignored(kept_form, caplog):
    learner, tasks = sinusoid()
    steps = CompiledSteps(4)
    learner.model.other = nn.Identity()
    response(learner, tasks, 4, steps)
    del learner.model.other
    response(learner, tasks, 4, steps)
    assert "the learner's modules changed during training" in caplog.text


def test_a_test_between_steps_leaves_the_step_compiled(form, caplog):
    learner, tasks = sinusoid()
    steps = CompiledSteps(4)
    before = response(learner, tasks, 4, steps)
    evaluate = EvaluateMapper(WorkerLocal("tasks of a test", tasks), "cpu", evaluate_each_step=True)
    evaluate(learner, MetaBatch(task_keys(0, "test", 0, range(3))))
    assert torch.equal(response(learner, tasks, 4, steps).value.loss, before.value.loss)
    assert "runs eagerly" not in caplog.text


def test_a_signal_during_compilation_is_not_a_failed_compilation(monkeypatch):
    def compile_until_stopped(step, inputs, captures):
        raise Interrupted(15, "stopped outside of training")

    monkeypatch.setattr(
        "metadist.training.compiled_steps.compile_outer_step", compile_until_stopped
    )
    learner, tasks = sinusoid()
    with pytest.raises(Interrupted, match="stopped outside of training"):
        response(learner, tasks, 4, CompiledSteps(4))


def test_each_shape_and_set_of_parameters_is_compiled_once(monkeypatch):
    compiled = []
    monkeypatch.setattr(
        "metadist.training.compiled_steps.compile_outer_step",
        lambda step, *_: compiled.append(step) or step,
    )
    learner, _ = sinusoid()
    parameters, steps = dict(learner.named_parameters()), CompiledSteps(2)
    for shots, trained, count in (
        (5, len(parameters), 1),
        (5, len(parameters), 1),
        (4, len(parameters), 2),
        (5, 2, 3),
    ):
        for number, parameter in enumerate(parameters.values()):
            parameter.requires_grad_(number < trained)
        tasks = FewShotTasks(Sinusoid(), 1, shots, 5)
        episodes = stack_episodes([tasks.sample(key) for key in task_keys(0, "train", 1, range(1))])
        weights = torch.ones(1, dtype=torch.float64)
        arguments = StepArguments(learner, parameters, episodes, weights)
        found = steps(arguments)
        expected = outer_step(arguments)
        torch.testing.assert_close(found.result.loss, expected.result.loss)
        assert len(found.gradients) == trained and len(compiled) == count


class DependsOnValues(MAML):
    """Control flow that cannot be traced."""

    batches_tasks = True

    def train_task(self, episode):
        result = super().train_task(episode)
        if result.loss.sum().item() > 0:
            return result
        return result._replace(loss=-result.loss)


def test_a_step_that_cannot_be_compiled_runs_eagerly_with_one_line(caplog):
    learner, tasks = sinusoid()
    learner = DependsOnValues(learner.model, True, 0.01).train()
    steps = CompiledSteps(4)
    with caplog.at_level(logging.WARNING, "metadist"):
        first = response(learner, tasks, 4, steps)
        second = response(learner, tasks, 4, steps)
    (record,) = caplog.records
    assert "the outer step runs eagerly" in record.getMessage()
    expected = response(learner, tasks, 4)
    for found in (first, second):
        assert torch.equal(found.value.loss, expected.value.loss)
