"""Batching over tasks: the same results as one task at a time, whatever the chunk."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metadist.algorithms import IMAML, MAML, Ensemble, MAMLPlusPlus, MetaSGD, Prototypical, Reptile
from metadist.distributed.worker_local import WorkerLocal
from metadist.errors import UserError
from metadist.models import MLP, Conv4
from metadist.models.batched_layers import Linear
from metadist.tasks import (
    Episode,
    Examples,
    FewShotTasks,
    Glyphs,
    Sinusoid,
    stack_episodes,
    task_keys,
)
from metadist.training.batching import (
    forward_batched,
    input_elements,
    max_chunk_size,
    split_into_chunks,
    split_stacked,
    to_device,
)
from metadist.training.task_mapper import EvaluateMapper, MetaBatch, TrainMapper

CPU = torch.device("cpu")
SIZES = {"train_classes": 12, "validation_classes": 6, "test_classes": 6, "examples": 6}


def glyph_tasks():
    return FewShotTasks(Glyphs(**SIZES), ways=3, shots=1, queries=2)


def learner_of(kind: str) -> tuple[MAML, object]:
    torch.manual_seed(0)
    if kind == "sinusoid":
        return MAML(MLP((1,), 1, hidden=[8], batch_norm=False), True, 0.01, 2), FewShotTasks(
            Sinusoid(), 1, 5, 5
        )
    model = {
        "stride": lambda: Conv4((1, 28, 28), 3, filters=4),
        "max": lambda: Conv4((1, 28, 28), 3, filters=4, pooling="max"),
        "mlp": lambda: MLP((1, 28, 28), 3, hidden=[8]),
    }.get(kind, lambda: Conv4((1, 28, 28), 3, filters=4))()
    if kind.startswith("maml_plus_plus"):
        steps = 5 if kind.endswith("5_steps") else 2
        learner = MAMLPlusPlus(model, inner_steps=steps, multi_step_iterations=9)
        learner.iteration.fill_(3)
        learner.rates.data.uniform_(0.05, 0.5)
        for norm in model.norms:
            norm.weight.data.uniform_(0.5, 1.5)
        return learner, glyph_tasks()
    if kind in ("reptile", "reptile_sgd"):
        inner = "adam" if kind == "reptile" else "sgd"
        learner = Reptile(model, False, inner, 0.01, 3, inner_batch_size=2, eval_inner_steps=2)
        if inner == "adam":
            learner.exp_avg_sq.uniform_(), learner.step.fill_(7)
        return learner, glyph_tasks()
    if kind == "imaml":
        return IMAML(model, inner_steps=3, eval_inner_steps=2), glyph_tasks()
    if kind == "meta_sgd":
        return MetaSGD(model), glyph_tasks()
    if kind == "prototypical":
        return Prototypical(model), glyph_tasks()
    return MAML(model, inner_steps=2, first_order=kind == "max"), glyph_tasks()


ALL_KINDS = [
    "stride",
    "max",
    "mlp",
    "sinusoid",
    "maml_plus_plus",
    "reptile",
    "reptile_sgd",
    "imaml",
]


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_sum_and_gradient_equal_those_one_by_one(kind):
    learner, tasks = learner_of(kind)
    learner.double()
    keys = task_keys(0, "train", 3, range(7))
    parameters = list(learner.parameters())
    # Three shards of 4, 1 and 2 tasks, with weights of their own.
    shards = [MetaBatch(keys[:4]), MetaBatch(keys[4]), MetaBatch(keys[5:])]
    calls = [((learner, shard), {}) for shard in shards]

    class Double:
        """The same tasks in float64, to compare closely."""

        def sample(self, key):
            episode = tasks.sample(key)
            return Episode(*(Examples(*map(to_double, part)) for part in episode))

    def run(at_once):
        mapper = TrainMapper(WorkerLocal(f"{kind}{at_once}", Double()), "cpu", at_once)
        return mapper.weighted_sum(calls, [0.5, 0.3, 0.2], parameters)

    alone = run(1)  # each task by itself
    mapper = TrainMapper(WorkerLocal(f"{kind} plain", Double()), "cpu", 1)
    plain = [mapper(learner, shard).loss for shard in shards]
    expected = 0.5 * plain[0] + 0.3 * plain[1] + 0.2 * plain[2]
    torch.testing.assert_close(alone.value.loss, expected.detach(), rtol=1e-12, atol=0)
    derivative = torch.autograd.grad(expected, parameters)
    for response in (alone, run(3), run("auto")):
        torch.testing.assert_close(response.value, alone.value, rtol=1e-10, atol=1e-12)
        for got, wanted in zip(response.gradients.by_input, derivative, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-11)


class Attention(nn.Module):
    """A network with an attention between four parts of an input."""

    supports_batched_tasks = True

    def __init__(self):
        super().__init__()
        self.encode, self.head = Linear(8, 8), Linear(32, 2)

    def forward(self, inputs):
        encoded = self.encode(inputs.flatten(-3, -2)).view(inputs.shape)
        return self.head(F.scaled_dot_product_attention(encoded, encoded, inputs).flatten(-2))


def test_attention_has_second_derivatives():
    learner = MAML(Attention()).train()
    part = Examples(torch.randn(3, 6, 4, 8), torch.randint(2, (3, 6)))
    parameters = dict(learner.named_parameters())
    result, inputs = forward_batched(learner, parameters, Episode(part, part))
    assert all(grad.any() for grad in torch.autograd.grad(result.loss.sum(), [*inputs.values()]))


def to_double(tensor):
    return tensor.double() if tensor.is_floating_point() else tensor


DETERMINISTIC_KINDS = [
    *("stride", "max", "mlp", "sinusoid"),
    *("maml_plus_plus_5_steps", "imaml", "meta_sgd", "prototypical"),
]


@pytest.mark.parametrize("kind", DETERMINISTIC_KINDS)
def test_a_tasks_results_are_the_same_bits_in_chunks_of_any_size(kind):
    learner, tasks = learner_of(kind)
    learner.train()
    episodes = [tasks.sample(key) for key in task_keys(0, "train", 1, range(12))]

    def results(first, last):
        whole = stack_episodes(episodes[first:last])
        result, parameters = forward_batched(learner, dict(learner.named_parameters()), whole)
        trained = [each for each in parameters.values() if each.requires_grad]
        gradients = torch.autograd.grad(result.loss.sum(), trained)
        return [result.loss, *result.metrics.values(), *gradients]

    whole = results(0, 12)
    parts = zip(results(0, 1), results(1, 5), results(5, 12), strict=True)
    for all_twelve, pieces in zip(whole, parts, strict=True):
        assert torch.equal(all_twelve, torch.cat(pieces))


@pytest.mark.parametrize("kind", ["stride", "sinusoid"])
def test_an_ensembles_results_are_the_same_bits_in_chunks_of_any_size(kind):
    learner, tasks = learner_of(kind)
    members = []
    for scale in (0.8, 0.9, 1.0, 1.1, 1.2):
        members.append(deepcopy(learner))
        for parameter in members[-1].parameters():
            parameter.data *= scale
    local = WorkerLocal(f"ensemble of {kind}", tasks)
    calls = [((Ensemble(members).eval(), MetaBatch(task_keys(0, "test", 0, range(8)))), {})]
    whole = EvaluateMapper(local, "cpu", 8).map_batched(calls)
    for size in (4, 3):
        torch.testing.assert_close(
            EvaluateMapper(local, "cpu", size).map_batched(calls), whole, rtol=0, atol=0
        )


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_evaluation_returns_the_values_of_every_task(kind):
    learner, tasks = learner_of(kind)
    keys = task_keys(0, "test", 0, range(5))
    calls = [((learner, MetaBatch(keys[:3])), {}), ((learner, MetaBatch(keys[3:])), {})]
    local = WorkerLocal(f"evaluation of {kind}", tasks)
    alone = EvaluateMapper(local, "cpu", 1).map_batched(calls)
    beside = EvaluateMapper(local, "cpu", 4).map_batched(calls)
    assert [len(part["loss"]) for part in beside] == [3, 2]
    for part, expected in zip(beside, alone, strict=True):
        assert set(part) == set(expected)
        torch.testing.assert_close(part, expected, rtol=1e-4, atol=1e-5)
    again = EvaluateMapper(local, "cpu", 4)(learner, MetaBatch(keys[3:]))
    torch.testing.assert_close(again, beside[1], rtol=0, atol=0)
    name = "mse" if kind == "sinusoid" else "accuracy"
    stepwise = EvaluateMapper(local, "cpu", 4, evaluate_each_step=True).map_batched(calls)
    one_at_a_time = EvaluateMapper(local, "cpu", 1, evaluate_each_step=True).map_batched(calls)
    for part, alike, plain in zip(stepwise, one_at_a_time, beside, strict=True):
        assert set(part) == set(alike) == {*plain, f"{name}_after_1", f"{name}_after_2"}
        torch.testing.assert_close(part, alike, rtol=1e-4, atol=1e-5)
        assert all(torch.equal(part[each], plain[each]) for each in plain)


@pytest.mark.parametrize("differing", [("support",), ("query",), ("support", "query")])
def test_chunks_keep_the_order_and_hold_tasks_of_one_shape(differing):
    learner = MAML(MLP((1,), 1, hidden=[4], batch_norm=False), regression=True)

    def task(size):
        counts = [size if part in differing else 3 for part in Episode._fields]
        return Episode(*(Examples(torch.zeros(n, 1), torch.zeros(n, 1)) for n in counts))

    sizes = [3, 3, 3, 5, 3, 3, 3, 3]
    tasks = [(torch.tensor([i]), task(size)) for i, size in enumerate(sizes)]
    found = list(split_into_chunks(learner, tasks, len(tasks), CPU, 3))
    assert [chunk.batched for chunk in found] == [True] * 4
    assert [chunk.keys.flatten().tolist() for chunk in found] == [[0, 1, 2], [3], [4, 5], [6, 7]]
    assert [len(chunk.episodes.query.inputs) for chunk in found] == [3, 1, 2, 2]
    alone = list(split_into_chunks(learner, tasks, len(tasks), CPU, 1))
    assert [(chunk.batched, len(chunk.keys)) for chunk in alone] == [(True, 1)] * 8
    assert list(split_into_chunks(learner, [], 0, CPU, "auto")) == []


@pytest.mark.parametrize(("size", "chunks"), [(3, [3, 2, 2]), (6, [4, 3]), (7, [7]), (1, [1] * 7)])
def test_tasks_sampled_together_are_split_evenly(size, chunks):
    learner = MAML(MLP((1,), 1, hidden=[4], batch_norm=False), regression=True)
    part = Examples(torch.arange(35.0).view(7, 5, 1), torch.zeros(7, 5, 1))
    keys = task_keys(0, "train", 1, range(7))
    found = list(split_stacked(learner, keys, Episode(part, part), CPU, size))
    assert [len(chunk.keys) for chunk in found] == chunks and all(each.batched for each in found)
    assert torch.equal(torch.cat([chunk.keys for chunk in found]), keys)
    whole = torch.cat([chunk.episodes.support.inputs for chunk in found])
    assert torch.equal(whole, part.inputs)


def test_a_chunk_is_copied_to_its_device_as_a_whole(monkeypatch):
    copied = []
    monkeypatch.setattr(
        "metadist.training.batching.to_device",
        lambda episodes, device: copied.append(episodes) or to_device(episodes, device),
    )
    learner = MAML(MLP((1,), 1, hidden=[4], batch_norm=False), regression=True)
    part = Examples(torch.zeros(5, 1), torch.zeros(5, 1))
    keys, meta = task_keys(0, "train", 1, range(4)), torch.device("meta")
    found = list(split_into_chunks(learner, ((k, Episode(part, part)) for k in keys), 4, meta, 2))
    assert {t.device for chunk in found for part in chunk.episodes for t in part} == {meta}
    assert [episodes.query.inputs.shape for episodes in copied] == [(2, 5, 1)] * 2


def test_how_many_tasks_run_at_once():
    def elements(*shape):
        part = Examples(torch.zeros(5, *shape), torch.zeros(5, dtype=torch.int64))
        return input_elements(Episode(part, part))

    assert elements(1, 28, 28) == 2 * 5 * 28 * 28
    small = MAML(Conv4((1, 28, 28), 5, filters=2))
    assert max_chunk_size(small, elements(1, 28, 28), CPU, "auto") == 33
    assert max_chunk_size(small, elements(1, 100, 100), CPU, "auto") == 0  # two would fit
    assert max_chunk_size(small, elements(3, 28, 28), CPU, "auto") == 11
    assert max_chunk_size(MAML(MLP((1,), 1, hidden=[4])), elements(1), CPU, "auto") == 64
    pooled = Conv4((1, 28, 28), 5, filters=2, pooling="max")
    assert max_chunk_size(MAML(pooled), elements(1, 28, 28), CPU, "auto") == 33
    pooled.native = False
    assert max_chunk_size(MAML(pooled), elements(1, 28, 28), CPU, "auto") == 8
    assert max_chunk_size(MAML(pooled), elements(3, 28, 28), CPU, "auto") == 0  # two would fit
    assert max_chunk_size(small, elements(1, 28, 28), CPU, 5) == 5
    assert max_chunk_size(small, elements(1, 28, 28), CPU, 1) == 1
    keeps = MAML(Conv4((1, 28, 28), 5, filters=2, running_statistics=True))
    assert max_chunk_size(keeps, elements(1, 28, 28), CPU, 5) == 0
    counts = MAML(Conv4((1, 28, 28), 5, filters=2))
    counts.register_buffer("tasks_seen", torch.zeros(()))
    assert max_chunk_size(counts, elements(1, 28, 28), CPU, 5) == 0
    foreign = MAML(nn.Sequential(nn.Flatten(), nn.Linear(784, 5)))
    assert max_chunk_size(foreign, elements(1, 28, 28), CPU, "auto") == 0


class Counting(MAML):
    """Counts in a buffer of a shape in which memory of one task can be that of the learner."""

    batches_tasks = batches_buffers = True

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.register_buffer("seen", torch.zeros(1, 3, 1, 1))

    def forward(self, episode):
        self.seen.add_(1)
        return super().forward(episode)


@pytest.mark.parametrize("chunk_size", [1, 2, 3])
def test_buffers_change_by_the_tasks_alone(chunk_size):
    tasks = FewShotTasks(Sinusoid(), 1, 5, 5)
    learner = Counting(MLP((1,), 1, [8], batch_norm=False), True, 0.01).train()
    mapper = TrainMapper(WorkerLocal("tasks", tasks), "cpu", chunk_size)
    batch = MetaBatch(task_keys(0, "train", 1, range(3)))
    found = mapper.weighted_sum([((learner, batch), {})], [3.0], list(learner.parameters()))
    assert found.value.buffers["seen"].unique().tolist() == [3.0]  # a sum of three tasks
    assert not learner.seen.any()


class WithEncoder(MAML):
    """Has the layers of the model under a second name."""

    batches_tasks = True

    def __init__(self, model):
        super().__init__(model, regression=True, inner_lr=0.01)
        self.encoder = model.layers


def test_layers_with_two_names_are_the_learners_after_a_batch():
    learner = WithEncoder(MLP((1,), 1, [4], batch_norm=False)).train()
    before = dict(learner.named_parameters())
    tasks = FewShotTasks(Sinusoid(), 1, 3, 3)
    episodes = stack_episodes([tasks.sample(key) for key in task_keys(0, "train", 1, range(2))])
    forward_batched(learner, before, episodes)
    after = dict(learner.named_parameters())
    assert list(after) == list(before) and all(after[name] is before[name] for name in before)


class SomeWays:
    """Tasks of twelve support examples, of two, three or four classes."""

    def sample(self, key):
        ways, generator = int(key[3]) % 3 + 2, torch.Generator().manual_seed(int(key[3]))
        targets = torch.arange(ways).repeat_interleave(12 // ways)
        parts = [Examples(torch.randn(12, 4, generator=generator), targets) for _ in range(2)]
        return Episode(*parts)


@pytest.mark.parametrize("sent", [False, True])
def test_prototypes_are_of_the_classes_of_a_task_alone(sent):
    learner = Prototypical(MLP((4,), 4, [8]))
    keys = task_keys(0, "test", 0, range(7))
    episodes = stack_episodes([SomeWays().sample(key) for key in keys]) if sent else None

    def evaluate(chunk_size):
        handle = WorkerLocal(f"ways {sent} {chunk_size}", SomeWays())
        return EvaluateMapper(handle, "cpu", chunk_size)(learner, MetaBatch(keys, episodes))

    alone = evaluate(1)
    assert alone["loss"].isfinite().all()
    for chunk_size in (3, 64):
        assert all(map(torch.equal, evaluate(chunk_size).values(), alone.values()))


class Masked(MLP):
    """A model with a mask, which it may change."""

    def __init__(self, changes: bool) -> None:
        super().__init__((1,), 1, hidden=[4], batch_norm=False)
        self.register_buffer("mask", torch.ones(4, dtype=torch.bool))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.changes = changes

    def forward(self, inputs):
        self.calls += 1
        if self.changes:
            self.mask.logical_not_()
        return super().forward(inputs)


def test_masks_are_constant_buffers():
    mapper = TrainMapper(WorkerLocal("masked", FewShotTasks(Sinusoid(), 1, 3, 3)), "cpu")
    batch = MetaBatch(task_keys(0, "train", 1, range(2)))
    (result, _) = mapper.run_each(MAML(Masked(False), True).train(), batch)
    assert list(result.buffers) == ["model.calls"] and result.buffers["model.calls"] == 2
    with pytest.raises(UserError, match=r"the buffer model\.mask of type torch\.bool changes"):
        mapper.run_each(MAML(Masked(True), True, inner_steps=2).train(), batch)


class Counts(MLP):
    """A model with a large count, and constants of types without arithmetic."""

    def __init__(self) -> None:
        super().__init__((1,), 1, hidden=[4], batch_norm=False)
        self.register_buffer("count", torch.tensor(2**60))
        self.register_buffer("codes", torch.ones(3, dtype=torch.uint16))
        self.register_buffer("scales", torch.ones(3).to(torch.float8_e4m3fn))

    def forward(self, inputs):
        self.count += 1
        return super().forward(inputs)


def test_changes_of_large_counts_are_exact():
    mapper = TrainMapper(WorkerLocal("counts", FewShotTasks(Sinusoid(), 1, 3, 3)), "cpu")
    batch = MetaBatch(task_keys(0, "train", 1, range(2)))
    (result, _) = mapper.run_each(MAML(Counts(), True).train(), batch)
    assert result.buffers == {"model.count": torch.tensor(2.0, dtype=torch.float64)}


class Remembers(nn.Module):
    """Keeps the inputs of each call in a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.zeros(0, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, inputs):
        self.memory = torch.cat([self.memory, inputs[:1]])
        return self.head(inputs)


def test_buffers_of_a_changing_size_are_refused():
    learner = MAML(Remembers()).train()
    part = Examples(torch.rand(3, 4), torch.arange(3))
    handle = WorkerLocal("remembered", SimpleNamespace(sample=lambda key: Episode(part, part)))
    batch = MetaBatch(task_keys(0, "train", 1, range(1)))
    with pytest.raises(UserError, match=r"memory of shape \(0, 4\) has the shape \(2, 4\) after"):
        TrainMapper(handle).run_each(learner, batch)
