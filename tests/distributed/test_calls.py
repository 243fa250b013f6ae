"""Remote calls between processes: the same result for any number of workers and gradient mode."""

import copy
import ctypes
import pickle
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import rpc
from torch.futures import Future
from transports import InProcess, completed
from worlds import on_rank_zero, run_world

import metadist as todist
from metadist.distributed import requests
from metadist.distributed.calls import remote_async_call, to_cpu
from metadist.distributed.rendezvous import wait_for_keys
from metadist.distributed.responses import WorkerResponse
from metadist.distributed.transport import current_transport, open_transport, shutdown_rpc
from metadist.distributed.worker_request import WorkerRequest


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()


def make_batch(items: int) -> torch.Tensor:
    return torch.randn(items, 4, generator=torch.Generator().manual_seed(1)).double()


def mean_loss(model: nn.Module, batch: torch.Tensor) -> dict:
    loss = model(batch).square().mean()
    return {"loss": loss, "first": batch.flatten()[0], "items": float(batch.shape[0])}


def item_loss(model: nn.Module, item: torch.Tensor) -> dict:
    return mean_loss(model, item.unsqueeze(0))


def reference(items: int) -> tuple[float, list[torch.Tensor]]:
    model = make_model()
    loss = model(make_batch(items)).square().mean()
    return loss.item(), list(torch.autograd.grad(loss, list(model.parameters())))


PARTITIONERS = [
    (mean_loss, todist.batch_partitioner),
    (item_loss, todist.dim_partitioner(0, exclusive=True, keepdim=False)),
]


def gradients_in_context(items: int, function: Callable, partitioner: Callable) -> tuple:
    model = make_model()
    with todist.autograd.context() as context:
        result = todist.remote_sync_call(
            function,
            args=(todist.module_clone(model, by="clone"), make_batch(items)),
            partitioner=partitioner,
            reducer=todist.mean_reducer,
        )
        todist.autograd.backward(context, result["loss"])
    return result["loss"].item(), [p.grad for p in model.parameters()]


def gradients_by_worker(items: int, function: Callable, partitioner: Callable) -> tuple:
    model = make_model()
    result = todist.remote_sync_call(
        function,
        args=(model, make_batch(items)),
        partitioner=partitioner,
        reducer=todist.mean_reducer,
        gradient="worker",
    )
    (3 * result["loss"]).backward()
    return result["loss"].item(), [p.grad / 3 for p in model.parameters()]


def gradients_of_all_modes(items: int) -> list[tuple]:
    modes = (gradients_in_context, gradients_by_worker)
    return [mode(items, *partition) for mode in modes for partition in PARTITIONERS]


@pytest.mark.parametrize(("items", "size"), [(15, 1), (15, 3), (2, 3)])
def test_loss_and_gradient_equal_one_process(items, size):
    expected_loss, expected_gradients = reference(items)
    found = on_rank_zero(gradients_of_all_modes, size, items)
    assert len(found) == 4
    for loss, gradients in found:
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        for gradient, expected in zip(gradients, expected_gradients, strict=True):
            torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-14)


def loss_of_a_model_of_the_worker(batch: torch.Tensor) -> torch.Tensor:
    return make_model()(batch).square().mean()


def call_without_inputs_that_require_grad() -> torch.Tensor:
    return todist.remote_sync_call(
        loss_of_a_model_of_the_worker, args=(make_batch(2),), partitioner=0, gradient="worker"
    )


def test_a_result_of_the_workers_own_model_has_no_gradient():
    loss = on_rank_zero(call_without_inputs_that_require_grad, 1)
    assert not loss.requires_grad
    assert loss == loss_of_a_model_of_the_worker(make_batch(2))


def loss_in_either_place(weight: torch.Tensor, item: torch.Tensor) -> tuple:
    loss = (weight * item).sum()
    zero = torch.zeros_like(loss)
    return (loss, zero) if item[0] > 0 else (zero, loss)


def sum_losses_in_different_places(workers: tuple[int, int]) -> str:
    weight, items = torch.ones(2, requires_grad=True), torch.tensor([[1.0, 2.0], [-3.0, -5.0]])
    shards = [(worker, (weight, x), {}) for worker, x in zip(workers, items, strict=True)]
    with pytest.raises((ValueError, todist.RemoteError)) as caught:
        todist.remote_sync_call(
            loss_in_either_place,
            partitioner=lambda: shards,
            reducer=todist.sum_reducer,
            gradient="worker",
        )
    same = todist.remote_sync_call(
        loss_in_either_place,
        partitioner=lambda: [(worker, (weight, items[1]), {}) for worker in workers],
        reducer=todist.sum_reducer,
        gradient="worker",
    )
    assert torch.autograd.grad(same[1], weight)[0].tolist() == [-6.0, -10.0]
    return str(caught.value)


@pytest.mark.parametrize("workers", [(1, 1), (0, 1)])
def test_losses_in_different_places_of_the_results_are_not_summed(workers):
    message = on_rank_zero(sum_losses_in_different_places, 2, workers)
    assert "one scalar per result" in message
    assert "leaf 0 of one result and leaf 1 of another" in message


@dataclass
class Weighted:
    """A user's class around tensors."""

    model: nn.Module
    factors: dict[str, torch.Tensor]


def weighted_loss(weighted: Weighted, batch: torch.Tensor) -> torch.Tensor:
    return mean_loss(weighted.model, batch)["loss"] * weighted.factors["of loss"]


def gradients_of_a_dataclass(mode: str) -> list[torch.Tensor]:
    model, factor = make_model(), torch.tensor(3.0, dtype=torch.float64, requires_grad=True)
    inputs = [factor, *model.parameters()]
    in_context = mode == "dist_autograd"
    with todist.autograd.context() if in_context else nullcontext() as context:
        sent = todist.module_clone(model, by="clone")
        loss = todist.remote_sync_call(
            weighted_loss,
            args=(Weighted(sent, {"of loss": factor.clone()}), make_batch(4)),
            reducer=todist.mean_reducer,
            gradient=mode,
        )
        if in_context:
            return list(todist.autograd.grad(context, loss, inputs))
    return list(torch.autograd.grad(loss, inputs))


@pytest.mark.parametrize("mode", ["worker", "dist_autograd"])
def test_gradients_of_tensors_in_a_dataclass(mode):
    gradients = on_rank_zero(gradients_of_a_dataclass, 2, mode)
    loss, expected = reference(4)
    for gradient, value in zip(gradients, [loss, *(3 * each for each in expected)], strict=True):
        torch.testing.assert_close(gradient, torch.as_tensor(value, dtype=torch.float64))


def adapted_loss(model: nn.Module, item: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(item.mean())
    model.register_buffer("adapted", 1 + getattr(model, "adapted", torch.zeros(())))
    return mean_loss(model, item.unsqueeze(0))["loss"] * model.adapted


def losses_of_models_changed_in_place() -> tuple:
    model, items = make_model(), make_batch(5)
    losses = [adapted_loss(copy.deepcopy(model), item) for item in items]
    options = {
        "args": (model, items),
        "partitioner": todist.dim_partitioner(0, exclusive=True, keepdim=False),
    }
    torch.testing.assert_close(todist.remote_sync_call(adapted_loss, **options), losses)
    expected = None
    for item in items:
        adapted = copy.deepcopy(model)
        gradients = torch.autograd.grad(adapted_loss(adapted, item), list(adapted.parameters()))
        expected = gradients if expected is None else list(map(torch.add, expected, gradients))
    for reducer in (todist.sum_reducer, sum):
        loss = todist.remote_sync_call(adapted_loss, **options, reducer=reducer, gradient="worker")
        torch.testing.assert_close(loss, sum(losses))
        actual = torch.autograd.grad(loss, list(model.parameters()))
        torch.testing.assert_close(list(actual), list(expected))
    with todist.autograd.context() as context:
        options["args"] = todist.module_clone(model, by="clone"), items
        loss = todist.remote_sync_call(adapted_loss, **options, reducer=todist.sum_reducer)
        actual = todist.autograd.grad(context, loss, list(model.parameters()))
    torch.testing.assert_close(list(actual), list(expected))
    model.reference = torch.distributed.rpc.RRef(1)  # it cannot be copied
    options["args"] = model, items
    assert len(todist.remote_sync_call(adapted_loss, **options)) == 5


@dataclass
class Adapted:
    model: nn.Module


def loss_of_a_dataclass(adapted: Adapted, item: torch.Tensor) -> torch.Tensor:
    return adapted_loss(adapted.model, item)


def loss_of_parameters(model: nn.Module, item: torch.Tensor, weight: nn.Parameter) -> torch.Tensor:
    assert any(weight is each for each in model.parameters())
    return (weight * item.mean()).sum()


def losses_of_shared_parameters() -> None:
    model, items = make_model(), make_batch(5)
    weight = next(model.parameters())
    options = {
        "partitioner": todist.dim_partitioner(0, exclusive=True, keepdim=False),
        "gradient": "worker",
    }
    losses = [adapted_loss(copy.deepcopy(model), item) for item in items]
    args = Adapted(model), items
    torch.testing.assert_close(
        todist.remote_sync_call(loss_of_a_dataclass, args=args, **options), losses
    )
    models = [nn.Sequential(model), nn.Sequential(model)]  # with shared parameters
    losses = [adapted_loss(copy.deepcopy(each), items[0]) for each in models]
    partitioner = options.pop("partitioner")
    calls = [(0, (each, items[0]), {}) for each in models]
    torch.testing.assert_close(
        todist.remote_sync_call(adapted_loss, partitioner=lambda: calls, **options), losses
    )

    def with_weight(model, items, weight):
        for worker, args, kwargs in partitioner(model, items):
            yield worker, (*args, weight), kwargs

    loss = todist.remote_sync_call(
        loss_of_parameters,
        args=(model, items, weight),
        partitioner=with_weight,
        reducer=sum,
        **options,
    )
    (gradient,) = torch.autograd.grad(loss, weight)
    expected = sum(item.mean() for item in items).expand_as(weight)
    torch.testing.assert_close(gradient, expected)


def test_shared_dataclasses_and_parameters_of_a_shared_module():
    on_rank_zero(losses_of_shared_parameters, 1)


@pytest.mark.parametrize("size", [1, 2])
def test_what_a_call_changes_in_its_model_does_not_affect_the_next_one(size):
    on_rank_zero(losses_of_models_changed_in_place, size)


@dataclass
class Loss:
    loss: torch.Tensor


def loss_in_a_dataclass(model: nn.Module, batch: torch.Tensor) -> Loss:
    return Loss(model(batch).square().mean())


def results_in_a_dataclass() -> None:
    arguments = make_model(), make_batch(4)
    for worker in range(2):
        result = todist.remote_sync_call(loss_in_a_dataclass, args=arguments, partitioner=worker)
        assert result.loss.item() == pytest.approx(reference(4)[0])
        with pytest.raises(todist.RemoteError, match="return it in a tuple or dict"):
            todist.remote_sync_call(
                loss_in_a_dataclass, args=arguments, partitioner=worker, gradient="worker"
            )


def test_a_loss_in_a_dataclass_is_not_silently_without_gradient():
    on_rank_zero(results_in_a_dataclass, 2)


def worker_gradients_inside_a_context() -> None:
    x = torch.tensor(3.0, requires_grad=True)
    with todist.autograd.context(), pytest.raises(todist.UserError, match="call outside of auto"):
        todist.remote_sync_call(torch.square, args=(x,), partitioner=0, gradient="worker")


def test_worker_gradients_inside_a_context_are_refused():
    on_rank_zero(worker_gradients_inside_a_context, 1)


def a_tensor_as_args() -> None:
    with pytest.raises(TypeError, match=r"args must be a tuple .*, got a Tensor: write args=\(val"):
        todist.remote_sync_call(torch.square, args=torch.ones(2), partitioner=0)


def test_arguments_that_are_no_tuple_are_refused():
    on_rank_zero(a_tensor_as_args, 1)


def nested_task(item: torch.Tensor) -> torch.Tensor:
    return todist.remote_sync_call(
        torch.square, args=(item,), partitioner=todist.batch_partitioner, reducer=todist.sum_reducer
    ).sum()


def call_nested(tasks: int) -> float:
    batch = torch.arange(tasks * 2, dtype=torch.float64).reshape(tasks, 2)
    return todist.remote_sync_call(
        nested_task,
        args=(batch,),
        partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
        reducer=todist.sum_reducer,
    ).item()


def test_two_levels_on_two_workers_do_not_deadlock():
    expected = float((torch.arange(400, dtype=torch.float64) ** 2).sum())
    assert on_rank_zero(call_nested, 2, 200) == expected


def bounce(depth: int) -> int:
    other = 1 - todist.get_rank()
    return 1 + (
        todist.remote_sync_call(bounce, args=(depth - 1,), partitioner=other) if depth else 0
    )


def test_two_workers_may_nest_many_calls():
    assert on_rank_zero(bounce, 2, 160) == 161


def call_by_number_name_and_function() -> list:
    by_function = todist.remote_sync_call(
        todist.get_rank,
        partitioner=lambda: [("worker1", (), {}), (0, (), {}), (1, (), {})],
    )
    return [
        todist.remote_sync_call(todist.get_rank, partitioner=1),
        todist.remote_sync_call(todist.get_rank, partitioner="worker0"),
        by_function,
        todist.remote_sync_call(
            todist.get_rank, partitioner=lambda: [(1, (), {})] * 3, reducer=len
        ),
    ]


def test_partitioner_by_number_name_and_function():
    assert on_rank_zero(call_by_number_name_and_function, 2) == [1, 0, [1, 0, 1], 3]


def call_unknown_worker() -> list[str]:
    messages = []
    for worker in (2, -1, "worker7"):
        with pytest.raises(todist.UserError) as caught:
            todist.remote_sync_call(todist.get_rank, partitioner=worker)
        messages.append(str(caught.value))
        # Nothing is sent, so there is no future to wait for.
        with pytest.raises(todist.UserError):
            todist.remote_async_call(todist.get_rank, partitioner=worker)
    return messages


def test_a_worker_that_is_not_there_is_named():
    messages = on_rank_zero(call_unknown_worker, 2)
    assert "worker 2" in messages[0] and "worker7" in messages[2]


def wait_until_told() -> None:
    assert not wait_for_keys(current_transport().store, ["timed out"], timeout=50.0)


@todist.auto_init_rpc(rpc_backend_options=rpc.TensorPipeRpcBackendOptions(rpc_timeout=0.5))
def call_patiently() -> str | None:
    if todist.get_rank() == 0:
        patient = todist.remote_async_call(wait_until_told, partitioner=1, timeout=0)
        with pytest.raises(TimeoutError, match="worker1"):
            todist.remote_sync_call(wait_until_told, partitioner=1)
        current_transport().store.set("timed out", "yes")
        patient.wait()
        return "answered"
    return None


def test_a_call_with_timeout_zero_outlasts_the_default_timeout():
    assert run_world(call_patiently, 2)[0] == "answered"


def call_with_limits() -> list[str]:
    found = [
        str(todist.remote_sync_call(todist.get_rank, partitioner=1, timeout=timeout))
        for timeout in (1e7, float("inf"))
    ]
    with pytest.raises(TimeoutError):
        todist.remote_sync_call(wait_until_told, partitioner=1, timeout=1e-9)
    current_transport().store.set("timed out", "yes")
    for timeout in (float("nan"), -1):
        with pytest.raises(todist.UserError, match="timeout must not be negative or NaN"):
            todist.remote_sync_call(todist.get_rank, partitioner=1, timeout=timeout)
    return found


def test_any_limit_of_seconds():
    assert on_rank_zero(call_with_limits, 2) == ["1", "1"]


def exit_in_the_reducer(results: list) -> None:
    raise SystemExit(3)


def grad_mode_of_the_reducer(results: list) -> bool:
    return torch.is_grad_enabled()


@todist.auto_init_rpc()
def reduce_later() -> list[bool]:
    with pytest.raises(RuntimeError, match=r"the call raised SystemExit\(3\)"):
        call_and_wait(max, args=(1, 2), partitioner=twice, reducer=exit_in_the_reducer)
    seen = []
    for enabled in (True, False):
        with torch.set_grad_enabled(enabled):
            options = {"partitioner": twice, "reducer": grad_mode_of_the_reducer}
            seen.append(call_and_wait(max, args=(1, 2), **options))
    return seen


def test_the_reducer_of_an_asynchronous_call_may_exit_and_has_the_callers_grad_mode():
    assert run_world(reduce_later, 2) == [[True, False]] * 2


def call_without_gradient() -> bool:
    model = make_model()
    result = todist.remote_sync_call(mean_loss, args=(model, make_batch(4)), reducer=list)
    return result[0]["loss"].requires_grad


def test_outside_of_a_context_results_have_no_graph():
    assert on_rank_zero(call_without_gradient, 1) is False


def send_a_lambda() -> str:
    with pytest.raises(TypeError) as caught:
        todist.remote_sync_call(lambda: 1, partitioner=1)
    return str(caught.value)


def test_a_function_that_cannot_be_sent_is_refused_with_a_sentence():
    assert "top level" in on_rank_zero(send_a_lambda, 2)


class NestedTooDeeply:
    def __reduce__(self) -> tuple:
        raise RecursionError


def send_what_fails_in_various_ways() -> list[str]:
    x, arguments = torch.ones(2, requires_grad=True), (ctypes.c_char_p(b"x"), NestedTooDeeply())
    messages = []
    with todist.autograd.context() as context:
        y = x * 1
        for worker in (0, 1):
            for argument in arguments:
                with pytest.raises(TypeError, match="cannot be pickled") as caught:
                    todist.remote_sync_call(max, args=(y, argument), partitioner=worker)
                assert isinstance(caught.value.__cause__, pickle.PicklingError)
                messages.append(str(caught.value))
        loss = todist.remote_sync_call(torch.sum, args=(y,), partitioner=1)
        todist.autograd.backward(context, loss)  # the calls above were not sent
    assert x.grad.tolist() == [1, 1]
    for argument in arguments:  # outside of a context, requests to this process are not sent
        with pytest.raises(TypeError, match="cannot be pickled"):
            todist.remote_sync_call(max, args=(1, argument), partitioner=0)
    return messages


def test_every_error_of_pickling_arguments_is_one_sentence():
    messages = on_rank_zero(send_what_fails_in_various_ways, 2)
    assert "(ctypes objects containing pointers cannot be pickled)" in messages[0]
    assert "(RecursionError)" in messages[1] and messages[2:] == messages[:2]


def never_sent(*_: Any, **__: Any) -> Future:
    raise RuntimeError("the agent is not running")


def send_without_the_agent() -> list[float]:
    x = torch.ones(2, requires_grad=True)
    with todist.autograd.context() as context:
        y = x * 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rpc, "rpc_async", never_sent)
            with pytest.raises(RuntimeError, match=r"^the agent is not running$"):
                todist.remote_sync_call(torch.sum, args=(y,), partitioner=0)
        todist.autograd.backward(
            context, todist.remote_sync_call(torch.sum, args=(y,), partitioner=0)
        )
    return x.grad.tolist()


def test_an_error_of_the_transport_is_raised_as_it_is():
    assert on_rank_zero(send_without_the_agent, 1) == [1, 1]


def send_a_model_with_a_local_hook() -> str:
    model = make_model()
    list(model.children())[-1].register_forward_pre_hook(lambda *_: None)
    with pytest.raises(TypeError) as caught:
        todist.remote_sync_call(mean_loss, args=(model, make_batch(4)))
    return str(caught.value)


def test_the_part_of_a_model_that_cannot_be_sent_is_named():
    message = on_rank_zero(send_a_model_with_a_local_hook, 1)
    assert message.startswith("'mean_loss' or its arguments cannot be pickled (")
    assert "._forward_pre_hooks: Can't" in message or "._forward_pre_hooks: can't" in message


def exit_in_a_call(status: object) -> None:
    raise SystemExit(status)


class Unpicklable:
    def __reduce__(self) -> tuple:
        raise ValueError("this does not pickle")


class Unloadable:
    def __reduce__(self) -> tuple:
        return int, ("x",)


class OnlyThere:
    """An object whose class is missing in the process that receives it."""

    def __reduce__(self) -> tuple:
        return getattr, (max, "only_there")


def call_what_fails(gradient: str) -> list[str]:
    messages = []
    for function, args in ((exit_in_a_call, (3,)), (Unpicklable, ()), (Unloadable, ())):
        with pytest.raises(todist.RemoteError) as caught:
            todist.remote_sync_call(function, args=args, partitioner=1, gradient=gradient)
        messages.append(str(caught.value))
    for function, args in ((OnlyThere, ()), (type, (OnlyThere(),))):
        with pytest.raises(todist.RemoteError, match=r"be transferred: .*has no attribute 'only"):
            todist.remote_sync_call(function, args=args, partitioner=1, gradient=gradient)
    with pytest.raises(todist.RemoteError, match="SystemExit"):
        todist.remote_sync_call(
            exit_in_a_call,
            args=(None,),
            reducer=todist.sum_reducer,
            partitioner=lambda status: [(1, (status,), {})],
        )
    assert todist.remote_sync_call(max, args=(1, 2), partitioner=1) == 2
    return messages


@pytest.mark.parametrize("gradient", ["dist_autograd", "worker"])
def test_an_exit_and_a_result_that_cannot_be_transferred_are_errors_of_the_call(gradient):
    exited, unpicklable, unloadable = on_rank_zero(call_what_fails, 2, gradient)
    assert "worker1 (rank 1" in exited and "raised SystemExit: 3" in exited
    assert unpicklable.startswith("worker1 (rank 1")
    assert "cannot be transferred" in unpicklable and "this does not pickle" in unpicklable
    assert "cannot be transferred" in unloadable and "invalid literal" in unloadable


def doubled(numbers: torch.Tensor) -> torch.Tensor:
    return 2 * numbers


def doubled_on_all_workers(numbers: torch.Tensor) -> list[torch.Tensor]:
    return todist.remote_sync_call(doubled, args=(numbers,))


def total(parts: list[torch.Tensor]) -> float:
    return sum(part.sum().item() for part in parts)


def pass_results_on() -> tuple:
    numbers = torch.arange(8.0)
    results = todist.remote_sync_call(doubled, args=(numbers,))
    totals = todist.remote_sync_call(total, args=(results,))
    nested = todist.remote_sync_call(
        doubled_on_all_workers, args=(numbers,), reducer=todist.sum_reducer
    )
    return results.sizes, totals, [part.tolist() for part in nested]


def test_results_of_a_call_are_arguments_and_results_of_others():
    assert on_rank_zero(pass_results_on, 2) == (
        [4.0, 4.0],
        [20.0, 36.0],
        [[8.0, 12.0], [16.0, 20.0]],
    )


class FrozenWorkers(InProcess):
    """Its workers neither answer a call nor, if `alive` is False, a ping."""

    def __init__(self, alive: bool) -> None:
        super().__init__("worker0", "worker1", "worker2")
        self.alive = alive
        self.unanswered: list[Future] = []

    def send(self, worker: str, request: WorkerRequest, timeout: float | None) -> Future:
        if worker == "worker0":
            return super().send(worker, request, timeout)
        self.unanswered.append(Future())
        return self.unanswered[-1]

    def ping(self, worker: str) -> Future:
        answer = super().ping(worker)
        if not self.alive and worker != "worker0":
            return completed(RuntimeError("no answer"))
        if len(self.pinged) == 5:  # busy for five pings, then it answers
            for response in self.unanswered:
                response.set_result([WorkerResponse(7, None)])
        return answer


def call_frozen_workers(alive: bool, call: Callable) -> tuple:
    """What a call says whose workers do not answer it; and which of them it pinged."""
    requests.PING_INTERVAL = 0.01
    transport = FrozenWorkers(alive)
    open_transport(transport)
    # Without pings the call would wait for ever: it then ends with a result.
    end = threading.Timer(20.0, lambda: [call.set_result([]) for call in transport.unanswered])
    end.daemon = True
    end.start()
    try:
        message = str(call(max, args=(1, 2), partitioner=twice))
    except todist.WorkerLostError as error:
        message = str(error)
    shutdown_rpc(graceful=False)
    return message, transport.pinged


def call_and_wait(*args: Any, **options: Any) -> Any:
    return remote_async_call(*args, **options).wait()


def twice(*args: int) -> list[tuple]:
    return [("worker0", args, {}), ("worker1", args, {})]


both_forms = pytest.mark.parametrize("call", [todist.remote_sync_call, call_and_wait])


@both_forms
def test_a_worker_that_freezes_in_a_call_is_found_by_pings(call):
    world = {"WORLD_SIZE": 3}
    message, pinged = run_world(call_frozen_workers, 1, False, call, environment=world)[0]
    assert "worker1 (rank 1) does not answer (no answer)" in message
    assert pinged == ["worker1"]


@both_forms
def test_a_worker_that_answers_pings_is_waited_for(call):
    world = {"WORLD_SIZE": 3}
    message, pinged = run_world(call_frozen_workers, 1, True, call, environment=world)[0]
    assert message == "[2, 7]" and pinged == ["worker1"] * 5


def call_with_wrong_functions() -> list[str]:
    messages = []
    for func, options in (
        (print, {"reducer": "mean"}),
        (print, {"partitioner": 1.5}),
        (print, {"partitioner": lambda x: None}),
        ("print", {}),
    ):
        with pytest.raises(TypeError) as caught:
            todist.remote_sync_call(func, args=(torch.ones(1),), **options)
        messages.append(str(caught.value))
    return messages


def test_wrong_functions_are_refused_before_the_call():
    reducer, partitioner, shards, func = on_rank_zero(call_with_wrong_functions, 1)
    assert reducer.startswith("reducer must be a function of the list of results")
    assert partitioner.startswith("partitioner must be a function, or the rank or name of a worker")
    assert shards.endswith("it returned None.")
    assert func.startswith("func must be a function, which the workers run, got 'print'")


def test_a_module_is_sent_without_gpu_tensors():
    """RPC refuses them. Fake tensors, which need no GPU."""
    with FakeTensorMode():
        module = nn.Module()
        module.register_buffer("mean", torch.zeros(2, device="cuda"))
        (sent,) = to_cpu((module,))
        assert sent.mean.is_cpu and module.mean.is_cuda
