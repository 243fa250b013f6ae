"""One task function, any strategy: the same loss and gradient however many workers there are."""

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from tiny import SMALL, build, compose, records, train, train_composed, train_world, without_times
from worlds import run_world

from metadist import distributed
from metadist.algorithms import TaskResult
from metadist.config import build_experiment
from metadist.distributed import (
    Shard,
    dim_partitioner,
    get_rank,
    get_world_size,
    mean_reducer,
    sum_reducer,
)
from metadist.distributed.reducers import SumReducer
from metadist.errors import UserError
from metadist.tasks import Episode, FewShotTasks, task_keys
from metadist.training import AllReduceStrategy, LocalStrategy, RpcStrategy, Strategy
from metadist.training.task_mapper import MetaBatch

TASKS = 7
GLOO = ("strategy=allreduce", "strategy.shared_memory=false")
TWO_ITERATIONS = ("trainer.iterations=2", "trainer.checkpoint_every=0")
ITERATIONS = {"float32": 1, "float64": 2}


def compose_cases(strategy: str, cases: list[tuple]) -> list[DictConfig]:
    """The configurations of some (experiment, overrides) with a strategy."""
    options = (*SMALL, f"strategy={strategy}", f"trainer.meta_batch_size={TASKS}")
    return [compose(*options, *overrides, name=name) for name, *overrides in cases]


def steps(
    directory: str, configurations: list[DictConfig], dtypes: tuple[str, ...] = ("float64",)
) -> list[tuple]:
    """Loss, buffers' changes and gradient of one meta-batch, and whether a driver asks to stop.

    For each configuration and type; on drivers alone. The last rank asks to stop.
    """
    experiments = [build_experiment(each, directory, "steps") for each in configurations]
    last, outcomes = get_rank() == get_world_size() - 1, []
    for x in experiments:
        x.tasks.sample = functools.partial(in_type_of, x.tasks.sample)
    one = experiments[0].strategy  # they all use one world, for which each rank has built all
    one.open()
    for x in experiments if one.is_driver else ():
        for dtype in dtypes:
            learner = copy.deepcopy(x.learner).to(getattr(torch, dtype))
            keys = task_keys(0, "train", ITERATIONS[dtype], range(TASKS))
            result, stops = x.strategy.forward_backward(
                x.train_mapper, learner, MetaBatch(keys), lambda: last
            )
            gradient = [parameter.grad for parameter in learner.parameters()]
            outcomes.append((result.loss, result.buffers, gradient, stops))
    one.close()
    return outcomes


def in_type_of(sample: Callable, key: torch.Tensor) -> Episode:
    """The episode in the type of the iteration in its key, on whichever worker."""
    episode = sample(key)
    if key[2] != ITERATIONS["float64"]:
        return episode
    return type(episode)(*(part._replace(inputs=part.inputs.double()) for part in episode))


@functools.cache
def reference(name: str, dtype: str) -> tuple:
    """The same by hand: a plain sum over tasks in this process."""
    with tempfile.TemporaryDirectory() as directory:
        x = build(directory, "strategy=local", name=name)
    x.learner.to(getattr(torch, dtype)).train()
    total = 0.0
    for key in task_keys(0, "train", ITERATIONS[dtype], range(TASKS)):
        total = total + x.learner(in_type_of(x.tasks.sample, key)).loss / TASKS
    total.backward()
    return total.detach(), [parameter.grad for parameter in x.learner.parameters()]


CASES = {
    "local": [("maml",), ("ddp",)],
    "rpc": [
        ("maml",),
        ("maml", "strategy.gradient=dist_autograd"),
        ("maml", "+partition=batch"),
        ("ddp",),
    ],
    "allreduce": [
        ("maml",),
        ("maml", "+partition=batch"),
        ("ddp",),
        ("ddp", "+partition=dim0"),
        ("ddp", "strategy.engine=sum"),
    ],
    "gloo": [("maml", GLOO[1])],
}
WORLDS = [("local", 1), ("rpc", 3), ("allreduce", 3), ("gloo", 2)]
MORE_WORLDS = [(way, size) for way in ("rpc", "allreduce") for size in (1, 2, 4)]
WORLDS += [pytest.param(*world, marks=pytest.mark.slow) for world in MORE_WORLDS]
TOLERANCE = {"float64": 1e-12, "float32": 1e-5}


@pytest.mark.parametrize(("way", "size"), WORLDS)
def test_loss_and_gradient_equal_one_process(tmp_path, way, size):
    strategy = "allreduce" if way == "gloo" else way
    configurations = compose_cases(strategy, CASES[way])
    outcomes = run_world(steps, size, str(tmp_path), configurations, tuple(TOLERANCE))
    drivers = outcomes if strategy == "allreduce" else outcomes[:1]
    cases = list(itertools.product(CASES[way], TOLERANCE.items()))
    for (case, (dtype, tolerance)), *found in zip(cases, *drivers, strict=True):
        loss, gradient = reference(case[0], dtype)
        scale = max(expected.abs().max() for expected in gradient)
        for found_loss, _, found_gradient, stops in found:
            assert stops is (strategy != "rpc" or size == 1), case
            torch.testing.assert_close(found_loss, loss, rtol=tolerance, atol=0)
            for found_part, expected in zip(found_gradient, gradient, strict=True):
                assert (found_part - expected).abs().max() <= tolerance * scale, (case, dtype)


def test_running_statistics_and_dropout_do_not_depend_on_the_workers(tmp_path):
    case = ("ddp", "model.dropout=0.3")
    (alone,) = steps(str(tmp_path), compose_cases("local", [case]))
    assert len(alone[1]) == 12  # mean, variance and count of four norms
    for strategy in ("rpc", "allreduce"):
        (found,) = run_world(steps, 2, str(tmp_path), compose_cases(strategy, [case]))[0]
        for name, change in alone[1].items():
            torch.testing.assert_close(found[1][name], change, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found[0], alone[0], rtol=1e-12, atol=0)


def test_a_parameter_without_gradient(tmp_path):
    case = ("ddp", "model._target_=broken_parts.UnusedParameter")
    configurations = compose_cases("allreduce", [(*case, "strategy.engine=sum"), case])
    for whole, buckets in run_world(steps, 2, str(tmp_path), configurations):
        assert [gradient is None for gradient in whole[2]][-2:] == [True, True]
        assert not any(gradient.any() for gradient in buckets[2][-2:])


def test_fewer_tasks_than_ranks(tmp_path):
    few = ("trainer.meta_batch_size=2", "trainer.eval_tasks=2", *TWO_ITERATIONS)
    train(str(tmp_path / "alone"), "strategy=local", *few)
    for strategy in ("rpc", "allreduce"):
        directory = tmp_path / strategy
        train_world(3, directory, f"strategy={strategy}", *few)
        assert without_times(records(directory)) == without_times(records(tmp_path / "alone"))


@pytest.mark.slow
def test_a_whole_run_is_the_same_bit_for_bit_for_every_number_of_workers(tmp_path):
    runs = [
        (("strategy=local",), 1),
        *((("strategy=rpc",), size) for size in (1, 2, 3)),
        *((("strategy=allreduce",), size) for size in (2, 3)),
        (GLOO, 2),
    ]
    found = []
    for number, (overrides, size) in enumerate(runs):
        directory = tmp_path / str(number)
        train_world(size, directory, *TWO_ITERATIONS, *overrides)
        found.append(without_times(records(directory)))
    assert len(found[0]) == 3
    for other in found:
        assert other == found[0]


MANY_TASKS = "trainer.meta_batch_size=20"
GROUPS = (*GLOO, "strategy.flat_up_to=2", MANY_TASKS)
TREE = ("strategy=rpc", MANY_TASKS)


@pytest.mark.parametrize(
    ("size", "overrides"),
    [
        (4, GROUPS),
        pytest.param(16, ("strategy=allreduce", MANY_TASKS), marks=pytest.mark.slow),
        pytest.param(32, (*GLOO, MANY_TASKS), marks=pytest.mark.slow),
        pytest.param(8, (*TREE, "strategy.fanout=2"), marks=pytest.mark.slow),
        pytest.param(16, (*TREE, "strategy.fanout=4"), marks=pytest.mark.slow),
        pytest.param(32, (*TREE, "strategy.fanout=8"), marks=pytest.mark.slow),
    ],
)
def test_many_workers_train_as_one(tmp_path, size, overrides):
    train(str(tmp_path / "one"), MANY_TASKS, *TWO_ITERATIONS, "strategy=local")
    train_world(size, tmp_path / "many", *TWO_ITERATIONS, *overrides, timeout=240.0)
    assert without_times(records(tmp_path / "many")) == without_times(records(tmp_path / "one"))


def count_collectives(directory: str, configuration: DictConfig) -> list[int]:
    """How many all-reduces runs of two and of five iterations take."""
    all_reduce, calls, counts = dist.all_reduce, [], []

    def counting(*args, **kwargs) -> None:
        calls.append(args)
        all_reduce(*args, **kwargs)

    dist.all_reduce = counting
    for iterations in (2, 5):
        calls.clear()
        configuration.trainer.iterations = iterations
        train_composed(f"{directory}/{iterations}", configuration)
        counts.append(len(calls))
    return counts


def test_a_step_is_one_collective(tmp_path):
    never = ("trainer.eval_every=0", "trainer.checkpoint_every=0")
    configuration = compose(*SMALL, *GLOO, *never)
    for two, five in run_world(count_collectives, 2, str(tmp_path), configuration):
        assert five - two == 3


def test_tensors_may_be_sent_instead_of_keys(tmp_path):
    train(str(tmp_path / "keys"), "strategy=local", *TWO_ITERATIONS)
    train_world(2, tmp_path / "tensors", "trainer.send_tasks=true", *TWO_ITERATIONS)
    assert without_times(records(tmp_path / "keys")) == without_times(records(tmp_path / "tensors"))


class UnequalTasks(FewShotTasks):
    """Tasks of which every second one has a query less."""

    def sample(self, key):
        episode = super().sample(key)
        queries = episode.query._replace(
            inputs=episode.query.inputs[int(key[3]) % 2 :],
            targets=episode.query.targets[int(key[3]) % 2 :],
        )
        return episode._replace(query=queries)


def test_tasks_of_unequal_shapes_are_not_sent(tmp_path):
    own = f"task._target_={__name__}.UnequalTasks"
    with pytest.raises(UserError, match="send_tasks=true needs tasks of equal shapes"):
        train(str(tmp_path), "strategy=local", own, "trainer.send_tasks=true")


@pytest.mark.parametrize("first_order", ["false", pytest.param("true", marks=pytest.mark.slow)])
def test_the_sum_reducer_scales_the_gradient(tmp_path, first_order):
    case = ("maml", f"algorithm.first_order={first_order}")
    configurations = compose_cases("rpc", [case, (*case, "reducer=sum")])
    mean, total = run_world(steps, 2, str(tmp_path), configurations)[0]
    torch.testing.assert_close(total[0], mean[0] * TASKS, rtol=1e-12, atol=0)
    for found, expected in zip(total[2], mean[2], strict=True):
        torch.testing.assert_close(found, expected * TASKS, rtol=1e-9, atol=1e-12)


def test_timeouts_and_the_device_are_passed_on(monkeypatch):
    given, seconds = [], {"rendezvous_timeout_seconds": 11.0, "call_timeout": 13.0}
    learner = torch.nn.Linear(1, 1)

    def call(*arguments, **options):
        given.append(options["timeout"])
        loss = learner.weight.sum()
        return Counted(loss, 1, loss) if "gradient" in options else [{"loss": loss.view(1)}]

    monkeypatch.setattr(
        "metadist.training.strategies.allreduce.init_process_group",
        lambda **options: given.append(options),
    )
    monkeypatch.setattr(distributed, "init_rpc", lambda **options: given.append(options))
    monkeypatch.setattr(distributed, "remote_sync_call", call)
    options = {"flat_up_to": 3, "device": torch.device("cpu")}
    AllReduceStrategy(plain_triples, mean_reducer, **options, **seconds).open()
    rpc = RpcStrategy(plain_triples, mean_reducer, timeout_seconds=10.0, **seconds)
    rpc.open()
    rpc.forward_backward(count, learner, None)
    rpc.map_tasks(count, learner, None)
    assert given == [
        {"timeout": 13.0, "rendezvous_timeout": 11.0, "shared_memory": True, **options},
        {"rendezvous_timeout": 11.0, "ping_timeout": 8.0},
        *(13.0, 13.0),
    ]


def on_drivers(size: int, strategy: Strategy, function: Callable, *args, **world) -> list:
    """What `function(strategy, *args)` returns on each driver of a world of `size` ranks."""
    found = run_world(with_open_strategy, size, strategy, function, args, **world)
    of_drivers = [each for each in found if each is not None]
    assert of_drivers
    return of_drivers


def with_open_strategy(strategy: Strategy, function: Callable, args: tuple):
    strategy.open()
    found = function(strategy, *args) if strategy.is_driver else None
    strategy.close()
    return found


def batch_of(tasks: int) -> MetaBatch:
    return MetaBatch(task_keys(0, "train", 0, range(tasks)))


def mapped(strategy: Strategy, mapper: Callable, tasks: int) -> dict:
    """The values of a mapper for each of some tasks."""
    return strategy.map_tasks(mapper, torch.nn.Linear(1, 1), batch_of(tasks))


def gradients(strategy: Strategy, mapper: Callable, tasks: int, *frozen: str) -> list:
    """Gradients of a linear layer, which had others before, in one step."""
    learner = torch.nn.Linear(1, 1)
    for name, parameter in learner.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.requires_grad_(name not in frozen)
    strategy.forward_backward(mapper, learner, batch_of(tasks))
    return [p.grad if p.grad is None else p.grad.item() for p in learner.parameters()]


def plain_triples(learner, batch: MetaBatch) -> list[tuple]:
    """Shards of 3, 1 and 2 items for ranks 0, 1 and 0; without their sizes."""
    parts = batch.keys.split([3, 1, 2])
    return [
        (worker, (learner, MetaBatch(keys)), {})
        for worker, keys in zip((0, 1, 0), parts, strict=True)
    ]


def key_values(learner, batch: MetaBatch) -> dict[str, torch.Tensor]:
    index = batch.keys[:, 3]
    return {"index": index.int(), "twice": index * 2.0, "odd": index % 2 == 1}


@pytest.mark.parametrize("kind", [RpcStrategy, AllReduceStrategy])
def test_shards_without_sizes_are_mapped_completely(kind):
    for values in on_drivers(3, kind(plain_triples, mean_reducer), mapped, key_values, 6):
        assert values["index"].tolist() == [0, 1, 2, 3, 4, 5]
        assert values["twice"].tolist() == [0, 2, 4, 6, 8, 10]
        assert values["odd"].tolist() == [False, True] * 3
        assert values["index"].dtype is torch.int32


def negative_zeros(learner, batch: MetaBatch) -> dict[str, torch.Tensor]:
    return {"loss": torch.full((len(batch.keys),), -0.0)}


def test_all_reduce_keeps_the_sign_of_zero():
    strategy = AllReduceStrategy(plain_triples, mean_reducer)
    for values in on_drivers(2, strategy, mapped, negative_zeros, 6):
        assert values["loss"].signbit().all()


class Counted(NamedTuple):
    loss: torch.Tensor
    items: int
    right: torch.Tensor


def count(learner, batch: MetaBatch) -> Counted:
    right = torch.tensor([1, 2])
    return Counted(learner.weight.sum() * batch.keys[..., 3].sum(), 1, right)


def result_of_two_tasks(strategy: Strategy) -> NamedTuple:
    torch.manual_seed(0)
    learner = torch.nn.Linear(2, 1, bias=False).double()
    return strategy.forward_backward(count, learner, batch_of(2))[0]


@pytest.mark.parametrize("reducer", [sum_reducer, mean_reducer, SumReducer(of_items=True)])
def test_whole_numbers_reduce_alike_where_a_rank_has_no_work(reducer):
    kinds = {LocalStrategy: 1, RpcStrategy: 3, AllReduceStrategy: 3}
    expected, *others = (
        result
        for kind, size in kinds.items()
        for result in on_drivers(
            size, kind(dim_partitioner(0, exclusive=True), reducer), result_of_two_tasks
        )
    )
    assert isinstance(expected.items, int) == (reducer == sum_reducer)
    for found in others:
        assert found.items == expected.items
        assert type(found.items) is type(expected.items)
        assert torch.equal(found.right, expected.right)
        assert found.right.dtype is expected.right.dtype
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-12, atol=0)


def test_a_parameter_that_was_frozen_keeps_no_gradient():
    strategy = LocalStrategy(dim_partitioner(0), mean_reducer)
    assert gradients(strategy, loss_of_the_first_key, 3, "bias") == [0, None]


@pytest.mark.parametrize("kind", [RpcStrategy, AllReduceStrategy])
def test_a_parameter_that_no_loss_depends_on_has_no_gradient(kind):
    strategy = kind(dim_partitioner(0, exclusive=True), mean_reducer)
    for found in on_drivers(2, strategy, gradients, count, 4):
        assert found == [1.5, None]  # the mean of 0 to 3


def count_with_a_constant(learner, batch: MetaBatch) -> Counted:
    """The same, where the first task's loss does not depend on the learner."""
    result = count(learner, batch)
    return result if batch.keys[..., 3].any() else result._replace(loss=result.loss.detach())


@pytest.mark.parametrize("kind", [RpcStrategy, AllReduceStrategy])
def test_the_losses_of_a_rank_may_not_depend_on_the_learner(kind):
    strategy = kind(dim_partitioner(0, exclusive=True), mean_reducer)
    for weight, _ in on_drivers(2, strategy, gradients, count_with_a_constant, 2):
        assert weight == 0.5


def last_shard_alone(learner, batch: MetaBatch) -> TaskResult:
    """A loss of the weight alone for the last task, of weight and bias for the others."""
    index = batch.keys[..., 3].float().sum()
    loss = index * learner.weight.sum() + (0 if index == 3 else index * learner.bias.sum())
    return TaskResult(loss, {"accuracy": torch.tensor(0.5)})


engines = pytest.mark.parametrize("engine", ["sum", "ddp"])


@engines
def test_the_last_shard_of_a_rank_may_not_depend_on_a_parameter(engine):
    strategy = AllReduceStrategy(dim_partitioner(0, exclusive=True), mean_reducer, engine=engine)
    assert on_drivers(2, strategy, gradients, last_shard_alone, 4) == [[1.5, 0.75]] * 2


def loss_of_the_first_key(learner, batch: MetaBatch) -> TaskResult:
    index = batch.keys.view(-1, 4)[0, 3]
    loss = (learner.weight * index + learner.bias * index).sum()
    return TaskResult(loss, {"accuracy": torch.tensor(0.5)})


def gradients_before_and_after_a_layer_is_unfrozen(strategy: Strategy) -> list:
    learner = torch.nn.Linear(1, 1)
    found = []
    for frozen in (True, False):
        learner.weight.requires_grad_(not frozen)
        strategy.forward_backward(loss_of_the_first_key, learner, batch_of(4))
        grads = (learner.weight.grad, learner.bias.grad)
        found.append([None if grad is None else grad.item() for grad in grads])
    return found


@engines
def test_parameters_may_be_unfrozen_during_training(engine):
    strategy = AllReduceStrategy(dim_partitioner(0, exclusive=True), mean_reducer, engine=engine)
    found = on_drivers(2, strategy, gradients_before_and_after_a_layer_is_unfrozen)
    assert found == [[[None, 1.5], [1.5, 1.5]]] * 2


def test_all_parameters_may_be_frozen_during_training():
    strategy = AllReduceStrategy(dim_partitioner(0, exclusive=True), mean_reducer)
    found = on_drivers(2, strategy, gradients, loss_of_the_first_key, 4, "weight", "bias")
    assert found == [[None, None]] * 2


def by_keyword(learner, batch: MetaBatch) -> list[Shard]:
    return [
        Shard(index % 2, (), {"learner": learner, "batch": batch.select(slice(index, index + 1))})
        for index in range(batch.size)
    ]


def test_shards_may_have_arguments_by_keyword():
    strategy = AllReduceStrategy(by_keyword, mean_reducer, engine="ddp")
    assert on_drivers(2, strategy, gradients, loss_of_the_first_key, 4) == [[1.5, 1.5]] * 2


def more_metrics_on_rank_one(learner, batch: MetaBatch) -> TaskResult:
    metrics = {"more": torch.tensor(0.5)} if get_rank() == 1 else {}
    return TaskResult(learner.weight.sum(), metrics)


def in_order_of_rank(learner, batch: MetaBatch) -> dict:
    values = {"loss": batch.keys[:, 3], "accuracy": -batch.keys[:, 3]}
    return dict(sorted(values.items(), reverse=get_rank() == 1))


def test_ranks_may_return_values_in_another_order():
    strategy = AllReduceStrategy(dim_partitioner(0), mean_reducer)
    for values in on_drivers(2, strategy, mapped, in_order_of_rank, 4):
        assert values["loss"].tolist() == [0, 1, 2, 3]
        assert values["accuracy"].tolist() == [0, -1, -2, -3]


class MoreMetricsLater:
    """Rank one has another metric from the second call on."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, learner, batch: MetaBatch) -> TaskResult:
        self.calls += 1
        metrics = {"more": torch.tensor(0.5)} if self.calls > 1 and get_rank() == 1 else {}
        return TaskResult(learner.weight.sum(), metrics)


def error_of_two_steps(strategy, mapper) -> str:
    learner = torch.nn.Linear(1, 1)
    strategy.open()
    try:
        for _ in range(2):
            keys = task_keys(0, "train", 0, range(2))
            strategy.forward_backward(mapper, learner, MetaBatch(keys))
    except UserError as error:
        return str(error)
    finally:
        strategy.close(graceful=False)
    return ""


@engines
def test_ranks_with_different_metrics_are_named(engine):
    strategy = AllReduceStrategy(dim_partitioner(0), mean_reducer, engine=engine)
    messages = run_world(error_of_two_steps, 2, strategy, more_metrics_on_rank_one)
    assert messages[0] == messages[1]
    assert messages[0].startswith("the results of ranks [1] have other metrics or shapes than")


def test_a_rank_whose_metrics_change_is_named():
    strategy = AllReduceStrategy(dim_partitioner(0), mean_reducer)
    outcomes = run_world(error_of_two_steps, 2, strategy, MoreMetricsLater(), may_fail=True)
    assert "ranks [1] have other metrics or shapes than the results before" in str(outcomes[1])


def values_of_some_tasks(learner, batch: MetaBatch) -> dict:
    index = batch.keys[:, 3]
    return {"loss": index} | ({"more": index} if index[0] == 0 else {})


@pytest.mark.parametrize(
    ("kind", "workers"), [(LocalStrategy, 1), (RpcStrategy, 2), (AllReduceStrategy, 2)]
)
def test_values_of_some_shards_only_are_refused(kind, workers):
    strategy = kind(dim_partitioner(0, exclusive=True), mean_reducer)
    outcomes = on_drivers(workers, strategy, mapped, values_of_some_tasks, 2, may_fail=True)
    message = str(outcomes[0])
    assert message.startswith("UserError: ")
    assert "metric more for some tasks" in message or "ranks [1] have other metrics" in message


class DetachedMean:
    def __call__(self, results):
        return results[0]._replace(loss=torch.stack([r.loss for r in results]).mean().detach())


@pytest.mark.parametrize("gradient", ["worker", "dist_autograd"])
def test_a_reducer_that_loses_the_gradient_is_refused(gradient):
    strategy = RpcStrategy(dim_partitioner(0), DetachedMean(), gradient=gradient)
    (found,) = on_drivers(1, strategy, gradients, last_shard_alone, 4, may_fail=True)
    assert "the loss that the reducer DetachedMean returned has no gradient" in str(found)


class Losses:
    def __call__(self, results):
        return [result.loss for result in results]


class LossPerShard:
    def __call__(self, results):
        return results[0]._replace(loss=torch.stack([result.loss for result in results]))


@pytest.mark.parametrize("reducer", [Losses(), LossPerShard()])
def test_a_reducer_without_a_scalar_loss_is_refused(reducer):
    strategy = RpcStrategy(dim_partitioner(0, exclusive=True), reducer)
    (found,) = on_drivers(1, strategy, gradients, last_shard_alone, 4, may_fail=True)
    assert f"the reducer {type(reducer).__name__} returned" in str(found)
    assert "with a scalar loss" in str(found)


def test_a_strategy_that_adds_up_refuses_a_reducer_that_is_none():
    for kind in (LocalStrategy, AllReduceStrategy):
        with pytest.raises(UserError, match="choose reducer=mean or reducer=sum"):
            kind(dim_partitioner(0), max)


def infinite(learner, batch: MetaBatch) -> TaskResult:
    return TaskResult(learner.weight.sum() * torch.inf, {"accuracy": torch.tensor(0.5)})


def constant(learner, batch: MetaBatch) -> TaskResult:
    return TaskResult(torch.tensor(2.0), {"accuracy": torch.tensor(0.5)})


def loss_and_gradients_of_one_task(strategy: Strategy, mapper: Callable) -> tuple:
    learner = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(learner.weight)
    result, _ = strategy.forward_backward(mapper, learner, batch_of(1))
    return result.loss.item(), learner.weight.grad


@pytest.mark.parametrize("kind", [RpcStrategy, AllReduceStrategy])
def test_infinity_stays_infinity_where_a_rank_has_no_work(kind):
    strategy = kind(dim_partitioner(0, exclusive=True), mean_reducer)
    for found in on_drivers(2, strategy, loss_and_gradients_of_one_task, infinite):
        assert found == (torch.inf, torch.inf)


@pytest.mark.parametrize("gradient", ["worker", "dist_autograd"])
def test_a_loss_that_depends_on_no_parameter_has_no_gradient(gradient):
    partitioner = dim_partitioner(0, exclusive=True)
    strategy = RpcStrategy(partitioner, mean_reducer, gradient=gradient)
    assert on_drivers(2, strategy, loss_and_gradients_of_one_task, constant) == [(2.0, None)]


class OwnStrategy(Strategy):
    """A strategy of the user's own, with what the documentation asks for."""

    def open(self):
        pass

    def close(self, graceful=True):
        pass

    def forward_backward(self, mapper, learner, batch, stop_requested):
        learner.zero_grad()
        result = mapper(learner, batch)
        result.loss.backward()
        return result._replace(loss=result.loss.detach()), stop_requested()

    def map_tasks(self, mapper, learner, batch):
        return mapper(learner, batch)


def test_a_strategy_of_the_users_own(tmp_path):
    local = train(str(tmp_path / "local"), "strategy=local")
    own = train(
        str(tmp_path / "own"), "strategy=local", f"strategy._target_={__name__}.OwnStrategy"
    )
    assert own["strategy"] == "OwnStrategy" and local["strategy"] == "local"
    assert own["test_accuracy"] == local["test_accuracy"]
    torch.testing.assert_close(own["test_loss"], local["test_loss"], rtol=1e-5, atol=1e-6)
