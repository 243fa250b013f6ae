"""Mappers: random numbers of a task, its buffers, and devices."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from metadist import module_clone
from metadist.algorithms import MAML, Learner, TaskResult
from metadist.distributed.partitioners import dim_partitioner
from metadist.distributed.reducers import MeanReducer
from metadist.distributed.worker_local import WorkerLocal
from metadist.errors import UserError
from metadist.tasks import Episode, Examples, seed_generators, task_keys
from metadist.training import (
    EvaluateMapper,
    LocalStrategy,
    MetaBatch,
    TaskMapper,
    TrainMapper,
    resolve_device,
)
from metadist.training.task_mapper import order_of_tasks


class Numbers:
    """Tasks whose only number is their index."""

    def sample(self, key):
        part = Examples(key[3:].float(), key[3:])
        return Episode(part, part)


class Dice(Learner):
    """Its metrics are numbers of every generator; its loss is the task's index times a weight."""

    def __init__(self):
        super().__init__(nn.Linear(1, 1, bias=False))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)
        nn.init.constant_(self.model.weight, 2.0)

    def forward(self, episode):
        index = episode.query.inputs.squeeze()
        self.seen += index + 1
        self.count += 1
        drawn = {
            "torch": torch.rand(()),
            "numpy": torch.tensor(np.random.rand()),
            "python": torch.tensor(random.random()),
        }
        predictions = torch.ones(1, 2)
        return TaskResult(self.model.weight.sum() * index, drawn, predictions)


KEYS = task_keys(0, "train", 1, range(6))


@pytest.mark.parametrize("indices", [[0, 0, 2, 3, 4, 5], [0, 1, 2, 3, 4]])
def test_lost_and_repeated_tasks_are_found(indices):
    order = order_of_tasks(torch.tensor([2, 0, 1, 5, 4, 3]), KEYS)
    assert order.tolist() == [1, 2, 0, 5, 4, 3]
    with pytest.raises(UserError, match=f"{len(indices)} tasks, 5 of them different, of a batch"):
        order_of_tasks(torch.tensor(indices), KEYS)


def mapper_of(kind, **options):
    return kind(WorkerLocal("numbers of the mappers' test", Numbers()), "cpu", **options)


def drawn(keys: torch.Tensor) -> list[tuple[float, ...]]:
    results = mapper_of(TaskMapper).run_each(Dice(), MetaBatch(keys))
    return [tuple(value.item() for value in result.metrics.values()) for result in results]


def test_every_task_has_random_numbers_of_its_own_from_every_generator():
    rows = drawn(KEYS)
    for column in zip(*rows, strict=True):
        assert len(set(column)) == len(KEYS)
    assert drawn(KEYS.flip(0)) == rows[::-1]  # they depend on the key alone
    assert drawn(KEYS[4]) == rows[4:5]


@pytest.mark.parametrize(
    "other", [(1, "train", 1, 0), (0, "validation", 1, 0), (0, "train", 2, 0), (0, "train", 1, 1)]
)
def test_random_numbers_depend_on_seed_split_iteration_and_index(other):
    seed, split, iteration, index = other
    key = task_keys(seed, split, iteration, range(index, index + 1))
    assert not set(drawn(key)[0]) & set(drawn(KEYS[:1])[0])


def test_numpys_numbers_are_not_those_of_torch():
    for seed in (0, 1, 2**63 + 5):
        seed_generators(seed)
        numbers = torch.randint(0, 2**16, (8,)).tolist()
        assert not set(numbers) & set(np.random.randint(0, 2**16, 8).tolist())


class ByFunction(nn.Module):
    """A model that calls its layers by a function of its own."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(1, 3), nn.BatchNorm1d(3)
        self.layers = lambda inputs: self.norm(self.linear(inputs)).tanh().sum(-1, keepdim=True)

    def forward(self, inputs):
        return self.layers(inputs)


class ByMethod(ByFunction):
    """The same model, which calls its layers in `forward`."""

    def forward(self, inputs):
        return self.norm(self.linear(inputs)).tanh().sum(-1, keepdim=True)


class Points:
    """Regression tasks of four points."""

    def sample(self, key):
        inputs = torch.arange(4.0).view(4, 1) + key[3]
        return Episode(Examples(inputs, inputs.sin()), Examples(inputs + 0.5, inputs.cos()))


def test_a_model_that_calls_its_layers_by_a_function_is_adapted_and_keeps_its_buffers():
    points = WorkerLocal("points of the mappers' test", Points())
    losses = []
    for kind in (ByMethod, ByFunction):
        torch.manual_seed(0)
        learner = MAML(kind(), inner_lr=0.1, inner_steps=2, regression=True).train()
        results = TaskMapper(points, "cpu").run_each(learner, MetaBatch(KEYS))
        losses.append([result.loss for result in results])
        assert all(result.buffers["model.norm.running_mean"].any() for result in results)
        assert not learner.model.norm.running_mean.any()
    torch.testing.assert_close(*losses, rtol=0, atol=0)


def test_the_generators_of_the_process_are_left_as_they_were():
    learner, numpy_state, state = Dice(), np.random.get_state()[1].copy(), random.getstate()
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    mapper_of(TaskMapper).run_each(learner, MetaBatch(KEYS))
    assert torch.equal(torch.rand(2), expected)
    assert np.array_equal(np.random.get_state()[1], numpy_state) and random.getstate() == state


@pytest.mark.parametrize("device", ["cpu", "cpu:0"])  # cpu:0 is copied to, as a GPU is
def test_tasks_start_from_the_same_buffers_and_report_their_changes(device):
    learner = Dice().train()
    learner.seen.fill_(10.0)
    mapper = replace(mapper_of(TaskMapper), device=device)
    results = mapper.run_each(learner, MetaBatch(KEYS))
    assert [result.buffers["seen"].item() for result in results] == [1, 2, 3, 4, 5, 6]
    assert all(result.buffers["count"].item() == 1 for result in results)
    assert results[0].buffers["seen"].dtype is torch.float64
    assert (learner.seen.item(), learner.count.item()) == (10.0, 0)
    evaluated = mapper.run_each(learner.eval(), MetaBatch(KEYS))
    assert all(result.buffers == {} for result in evaluated)


def test_a_shards_result_is_the_mean_of_its_tasks():
    learner = Dice()
    one_by_one = mapper_of(TaskMapper).run_each(learner.train(), MetaBatch(KEYS))
    result = mapper_of(TrainMapper)(learner, MetaBatch(KEYS))
    assert result.loss.item() == pytest.approx(2.0 * np.mean(range(6)))
    assert torch.autograd.grad(result.loss, learner.model.weight)[0].item() == 2.5
    assert result.buffers["seen"].item() == 3.5 and result.predictions is None
    for name, value in result.metrics.items():
        values = [each.metrics[name].item() for each in one_by_one]
        assert value.item() == pytest.approx(np.mean(values), rel=1e-6)
    single = mapper_of(TrainMapper)(learner, MetaBatch(KEYS[3]))
    assert single.loss.item() == 6.0 and single.predictions is None


@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [3.0, 1.0, 2.0], [0.5, 0.0, 0.25]])
def test_a_weighted_sum_by_hand(weights):
    learner = Dice()
    shards = [MetaBatch(KEYS[:3]), MetaBatch(KEYS[3]), MetaBatch(KEYS[4:])]
    calls = [((learner,), {"batch": shard}) for shard in shards]
    response = mapper_of(TrainMapper).weighted_sum(calls, weights, list(learner.parameters()))
    means = np.array([1.0, 3.0, 4.5])  # of the indices in each shard
    assert response.value.loss.item() == pytest.approx(2.0 * means @ weights, abs=1e-15)
    assert response.gradients.by_input[0].item() == pytest.approx(means @ weights, abs=1e-15)
    assert response.value.buffers["seen"].item() == pytest.approx((means + 1) @ weights, abs=1e-15)
    assert response.value.loss.dtype is response.gradients.by_input[0].dtype is torch.float64
    assert response.dtypes[0] is torch.float32


def test_weights_of_a_sum_are_not_rounded_to_float32():
    learner = Dice()
    calls = [((learner, MetaBatch(KEYS[1])), {}), ((learner, MetaBatch(KEYS[2])), {})]
    weights = [2.0**24 + 1, 1 / 3]
    response = mapper_of(TrainMapper).weighted_sum(calls, weights, list(learner.parameters()))
    assert response.value.loss.item() == 2 * weights[0] + 4 * weights[1]
    assert response.gradients.by_input[0].item() == weights[0] + 2 * weights[1]


def test_evaluation_keeps_tasks_apart_and_in_order():
    learner = Dice()
    calls = [((learner, MetaBatch(KEYS[:4])), {}), ((learner, MetaBatch(KEYS[4])), {})]
    first, second = mapper_of(EvaluateMapper).map_batched(calls)
    assert first["loss"].tolist() == [0, 2, 4, 6] and second["loss"].tolist() == [8]
    assert first["torch"].shape == (4,) and not first["loss"].requires_grad
    assert not learner.training


def test_tasks_that_were_sent_are_not_sampled():
    class Forbidden:
        def sample(self, key):
            raise AssertionError("sampled")

        sample_batch = sample

    part = Examples(torch.tensor([[5.0], [7.0]]), torch.zeros(2, 1))
    mapper = TrainMapper(WorkerLocal("nothing to sample", Forbidden()), "cpu")
    result = mapper(Dice(), MetaBatch(KEYS[:2], Episode(part, part)))
    assert result.loss.item() == 12.0
    learner = Dice()
    calls = [((learner, MetaBatch(KEYS[:2], Episode(part, part))), {})]
    summed = mapper.weighted_sum(calls, [1.0], list(learner.parameters()))
    assert summed.value.loss.item() == 12.0
    alone = Examples(torch.tensor([5.0]), torch.zeros(1))
    assert mapper(Dice(), MetaBatch(KEYS[0], Episode(alone, alone))).loss.item() == 10.0


def test_tasks_that_are_sampled_together_are_those_of_the_keys():
    class Together(Numbers):
        def sample_batch(self, keys, device):
            sizes.append(len(keys))
            part = Examples(keys[:, 3:].float(), keys[:, 3:])
            return Episode(part, part)

    sizes, mapper = [], EvaluateMapper(WorkerLocal("numbers sampled together", Together()), "cpu")
    keys = task_keys(0, "train", 1, range(150))
    calls = [((Dice(), MetaBatch(some)), {}) for some in keys.split([100, 50])]
    first, second = mapper.map_batched(calls)
    assert torch.cat([first["loss"], second["loss"]]).tolist() == [2.0 * n for n in range(150)]
    assert sizes == [64, 64, 22]
    for chunk_size, expected in ((100, [100, 50]), (50, [50] * 3), (4, [64, 64, 22])):
        sizes.clear()
        found = replace(mapper, chunk_size=chunk_size).map_batched(calls)
        assert all(map(torch.equal, [first["loss"], second["loss"]], [f["loss"] for f in found]))
        assert sizes == expected, "whole chunks are sampled"


def test_tasks_that_are_not_sampled_together_are_sampled_one_by_one():
    class FirstTogether(Numbers):
        def sample_batch(self, keys, device):
            part = Examples(keys[:, 3:].float(), keys[:, 3:])
            return Episode(part, part) if keys[0, 3] == 0 else None

    mapper = EvaluateMapper(WorkerLocal("numbers partly together", FirstTogether()), "cpu")
    calls = [((Dice(), MetaBatch(task_keys(0, "train", 1, range(100)))), {})]
    assert mapper.map_batched(calls)[0]["loss"].tolist() == [2.0 * n for n in range(100)]


class Offsets(Learner):
    """Its metric is where in its memory a task's tensor begins."""

    def forward(self, episode):
        offset = torch.tensor(float(episode.query.inputs.storage_offset()))
        return TaskResult(self.model(episode.query.inputs).sum(), {"offset": offset})


def test_the_place_of_a_task_in_a_batch_does_not_decide_its_alignment():
    part = Examples(torch.ones(6, 2, 1), torch.zeros(6, 2, 1))
    batch = MetaBatch(KEYS, Episode(part, part))
    mapper = mapper_of(TaskMapper)
    one = MetaBatch(KEYS[2], Episode(*(Examples(x[2], y[2]) for x, y in batch.episodes)))
    for some in (batch, one):
        results = mapper.run_each(Offsets(nn.Linear(1, 1)), some)
        assert {result.metrics["offset"].item() for result in results} == {0.0}


class SometimesMore(Offsets):
    def forward(self, episode):
        result = super().forward(episode)
        more = {"some": result.loss.detach()} if episode.query.targets.any() else {}
        return result._replace(metrics=more)


def test_metrics_of_some_tasks_only_are_one_sentence():
    part = Examples(torch.ones(6, 1, 1), torch.arange(6.0).view(6, 1, 1))
    batch, learner = MetaBatch(KEYS, Episode(part, part)), SometimesMore(nn.Linear(1, 1))
    mapper = mapper_of(TrainMapper)
    with pytest.raises(UserError, match="SometimesMore returned the metric some for some tasks"):
        mapper(learner, batch)
    with pytest.raises(UserError, match="SometimesMore returned the metric some for some tasks"):
        mapper.weighted_sum([((learner, batch), {})], [1.0], list(learner.parameters()))
    with pytest.raises(UserError, match="SometimesMore returned the metric some for some tasks"):
        mapper_of(EvaluateMapper)(learner, batch)


class Predictions(Learner):
    def forward(self, episode):
        predictions = self.model(episode.query.inputs)
        return TaskResult(predictions.square().mean(), {}, predictions)


class UnequalTasks:
    def sample(self, key):
        part = Examples(torch.ones(int(key[3]) + 1, 1), torch.zeros(int(key[3]) + 1, 1))
        return Episode(part, part)


def test_predictions_are_not_part_of_a_sum_in_training():
    mapper = TrainMapper(WorkerLocal("tasks of unequal sizes", UnequalTasks()), "cpu")
    learner = Predictions(nn.Linear(1, 1))
    calls = [((learner, MetaBatch(KEYS)), {})]
    response = mapper.weighted_sum(calls, [6.0], list(learner.parameters()))
    assert response.value.predictions is None
    assert response.value.loss.item() == pytest.approx(6 * learner.model(torch.ones(1)).item() ** 2)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, 2)

    def forward(self, inputs):
        return self.head(self.encode(inputs).flatten(1))


def test_attention_has_second_derivatives():
    part = Examples(torch.randn(1, 2, 3, 4), torch.tensor([[0, 1]]))
    batch, learner = MetaBatch(KEYS[:1], Episode(part, part)), MAML(Attention())
    response = mapper_of(TrainMapper).weighted_sum(
        [((learner, batch), {})], [1.0], list(learner.parameters())
    )
    assert all(each is not None for each in response.gradients.by_input)


def test_sizes_of_batches():
    assert MetaBatch(KEYS).size == 6 and MetaBatch(KEYS[0]).size == 1


def test_devices(monkeypatch):
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(
        UserError, match=r"device=abacus cannot be used here .* choose cpu, cuda, cuda:N or auto"
    ):
        resolve_device("abacus")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for rank, index in ((0, 0), (1, 1), (2, 0), (3, 1)):
        for name, value in (("RANK", rank), ("LOCAL_RANK", rank)):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        for name in ("auto", "cuda"):
            assert resolve_device(name) == torch.device("cuda", index)


@pytest.mark.parametrize(
    ("batched", "advice"),
    [(True, r"trainer\.task_chunk_size=7\): set a smaller number"), (False, "one task: take a .*")],
)
def test_a_gpu_without_enough_memory_is_one_sentence(batched, advice):
    class TooLarge(Dice):
        supports_batched_tasks = batched

        def forward(self, episode):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore")

    learner = TooLarge()
    calls = [((learner, MetaBatch(KEYS)), {})]
    expected = rf"{advice}\. .*allocate 2\.00 GiB\.$"
    with pytest.raises(UserError, match=expected):
        mapper_of(TrainMapper, chunk_size=7).weighted_sum(calls, [1.0], [*learner.parameters()])
    with pytest.raises(UserError, match=expected):
        mapper_of(EvaluateMapper, chunk_size=7).map_batched(calls)


@pytest.mark.filterwarnings("error")
def test_a_shard_without_tasks_counts_nothing():
    learner = Dice()
    calls = [((learner, MetaBatch(KEYS[:0])), {}), ((learner, MetaBatch(KEYS[:3])), {})]
    inputs = list(learner.parameters())
    response = mapper_of(TrainMapper).weighted_sum(calls, [0.0, 3.0], inputs)
    assert response.value.loss.item() == 0 + 2 + 4


def test_a_learner_on_another_device_has_plain_tensors_for_parameters():
    """`module_clone` moves a learner that is not batched to a GPU so."""
    learner = Dice()
    moved = module_clone(learner, by="clone")
    assert not any(isinstance(tensor, nn.Parameter) for tensor in moved.parameters())
    responses = [
        mapper_of(TrainMapper).weighted_sum(
            [((each, MetaBatch(KEYS)), {})], [1.0], list(each.parameters())
        )
        for each in (learner, moved)
    ]
    expected, found = (response.gradients.by_input[0] for response in responses)
    assert torch.equal(expected, found)


class CallsBackward(Dice):
    """Its metric and its loss depend on the gradient that `backward` has accumulated."""

    def forward(self, episode):
        index = episode.query.inputs.squeeze()
        with torch.enable_grad():
            (self.model.weight.sum() * (index + 1)).backward()
        gradient = self.model.weight.grad.sum().clone()
        loss = self.model.weight.sum() * gradient
        return TaskResult(loss, {"gradient": gradient}, torch.ones(1, 2))


def test_a_task_finds_no_gradients_of_others():
    learner = CallsBackward()
    before = learner.model.weight.grad = torch.full((1, 1), 9.0)
    values = mapper_of(EvaluateMapper)(learner, MetaBatch(KEYS))
    assert values["gradient"].tolist() == [1, 2, 3, 4, 5, 6]
    assert learner.model.weight.grad is before and before.item() == 9
    assert mapper_of(TrainMapper)(learner, MetaBatch(KEYS)).metrics["gradient"].item() == 3.5
    strategy = LocalStrategy(dim_partitioner(0), MeanReducer())
    result, _ = strategy.forward_backward(mapper_of(TrainMapper), learner, MetaBatch(KEYS))
    assert result.metrics["gradient"].item() == 3.5
    assert learner.model.weight.grad.item() == 3.5
