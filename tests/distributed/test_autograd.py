"""Derivatives through remote calls against `torch.autograd` in this process."""

import functools
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from worlds import on_rank_zero, run_world

import metadist as todist

SIZES = [1, 3]


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def make_batch() -> torch.Tensor:
    return torch.randn(7, 4, generator=torch.Generator().manual_seed(1)).double()


@todist.parallelize(partitioner=todist.batch_partitioner, reducer=todist.mean_reducer)
def remote_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return local_loss(model, batch)


def local_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def assert_all_close(gradients, expected) -> None:
    for gradient, reference in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-12, atol=1e-14)


def every_way() -> None:
    model, batch = make_model(), make_batch()
    parameters = list(model.parameters())
    expected = torch.autograd.grad(local_loss(model, batch), parameters)

    # grad and grads give the gradients and leave `.grad` alone.
    for run_backward in (todist.autograd.grad, todist.autograd.grads):
        with todist.autograd.context() as context:
            loss = remote_loss(todist.module_clone(model, by="clone"), batch)
            gradients = run_backward(context, loss, model.parameters())
        assert_all_close(gradients, expected)
        assert all(parameter.grad is None for parameter in parameters)

    # One input, several outputs.
    with todist.autograd.context() as context:
        clone = todist.module_clone(model, by="clone")
        outputs = [remote_loss(clone, batch), remote_loss(clone, batch).square()]
        (gradient,) = todist.autograd.grad(context, outputs, parameters[0])
    loss = local_loss(model, batch)
    assert_all_close([gradient], torch.autograd.grad(loss + loss.square(), parameters[:1]))

    # backward adds to `.grad`, as `torch.Tensor.backward` does, and the context shows its own.
    for times in (1, 2):
        with todist.autograd.context() as context:
            loss = remote_loss(todist.module_clone(model, by="clone"), batch)
            todist.autograd.backward(context, loss)
            in_context = todist.autograd.get_gradients(context)
        assert_all_close([in_context[parameter] for parameter in parameters], expected)
        assert_all_close([p.grad for p in parameters], [g * times for g in expected])

    # A root that never left this process.
    local = torch.tensor([2.0, 3.0], requires_grad=True)
    with todist.autograd.context() as context:
        todist.autograd.backward(context, [local.square().sum(), local.sum()])
    assert local.grad.tolist() == [5.0, 7.0]


@pytest.mark.parametrize("size", SIZES)
def test_every_way_equals_torch(size):
    on_rank_zero(every_way, size)


def twice_in_one_context() -> None:
    model, batch = make_model().float(), make_batch().float()
    parameters = list(model.parameters())
    first = torch.autograd.grad(local_loss(model, batch), parameters)

    with todist.autograd.context() as context:
        # The first gradients are large, the others small: none is lost in another's rounding.
        loss = remote_loss(todist.module_clone(model, by="clone"), batch)
        of_large = todist.autograd.grad(context, loss * 1e6, parameters, retain_graph=True)
        todist.autograd.backward(context, loss, retain_graph=True)
        again = todist.autograd.grad(context, loss, parameters)
        total = todist.autograd.get_gradients(context)
        for i, expected in enumerate(first):
            torch.testing.assert_close(of_large[i], expected * 1e6)
            torch.testing.assert_close(parameters[i].grad, expected, rtol=1e-5, atol=1e-7)
            torch.testing.assert_close(again[i], expected, rtol=1e-5, atol=1e-7)
            # The context keeps the sum over its backward passes.
            torch.testing.assert_close(total[parameters[i]], expected * (1e6 + 2))


@pytest.mark.parametrize("size", SIZES)
def test_twice_in_one_context(size):
    on_rank_zero(twice_in_one_context, size)


def unused_inputs() -> None:
    model, batch = make_model(), make_batch()
    other = torch.ones(2, requires_grad=True)
    with todist.autograd.context() as context:
        loss = remote_loss(todist.module_clone(model, by="clone"), batch)
        used, unused = todist.autograd.grad(
            context, loss, [model[0].weight, other], allow_unused=True
        )
    assert unused is None
    assert_all_close([used], torch.autograd.grad(local_loss(model, batch), [model[0].weight]))
    with todist.autograd.context() as context:
        loss = remote_loss(todist.module_clone(model, by="clone"), batch)
        with pytest.raises(RuntimeError, match=r"shape \(2,\)"):
            todist.autograd.grad(context, loss, [other])
    assert other.grad is None


@pytest.mark.parametrize("size", [1, 2])
def test_inputs_that_play_no_part(size):
    on_rank_zero(unused_inputs, size)


def passes(run_backward: Callable, remote: Callable) -> list[tuple]:
    """z plays a part in the first, no part in the second, and one of zero in the third."""
    x, y, z = (torch.tensor([value], requires_grad=True) for value in (2.0, 3.0, 5.0))
    product = remote(torch.mul, x.clone(), y.clone())
    return [
        run_backward(root, [x, y, z], retain_graph=True, allow_unused=True)
        for root in (product + z.square(), product, product + 0 * z, product)
    ]


def several_passes() -> list[tuple]:
    with todist.autograd.context() as context:
        return passes(
            functools.partial(todist.autograd.grad, context),
            lambda function, *args: todist.remote_sync_call(function, args=args, partitioner=1),
        )


def test_an_input_that_only_an_earlier_pass_reached_has_no_derivative():
    expected = passes(torch.autograd.grad, lambda function, *args: function(*args))
    assert [gradients[2] is None for gradients in expected] == [False, True, False, True]
    assert on_rank_zero(several_passes, 2) == expected


def chosen_inputs() -> None:
    x, y = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    with todist.autograd.context() as context:
        product = todist.remote_sync_call(torch.mul, args=(x.clone(), y.clone()), partitioner=0)
        todist.autograd.backward(context, product, inputs=[y])
        assert x.grad is None and y.grad.item() == 2.0
        for run_backward in (todist.autograd.grad, todist.autograd.backward):
            with pytest.raises(RuntimeError, match="requires no gradient"):
                run_backward(context, product, inputs=torch.ones(3))


def test_backward_by_some_inputs_leaves_others_alone():
    on_rank_zero(chosen_inputs, 1)


def one_after_the_other() -> float:
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    with todist.autograd.context() as context:
        value = x.clone()
        for i in range(4):
            value = todist.remote_sync_call(torch.sin, args=(value,), partitioner=i % 2)
        (gradient,) = todist.autograd.grad(context, value, x)
    return gradient.item()


def test_results_that_are_arguments_of_further_calls_play_a_part():
    x = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(x.sin().sin().sin().sin(), x)
    assert on_rank_zero(one_after_the_other, 2) == pytest.approx(expected.item(), rel=1e-12)


def double_remotely(x: torch.Tensor) -> torch.Tensor:
    """A remote function that calls another worker: the graph spans three workers."""
    neighbour = (todist.get_rank() + 1) % todist.get_world_size()
    return 2 * todist.remote_sync_call(torch.sin, args=(x,), partitioner=neighbour)


def through_two_levels() -> None:
    x = torch.linspace(-1, 1, 9, dtype=torch.float64, requires_grad=True)
    with todist.autograd.context() as context:
        total = todist.remote_sync_call(
            double_remotely,
            args=(x.clone(),),
            partitioner=todist.dim_partitioner(0, exclusive=True, keepdim=False),
            reducer=todist.sum_reducer,
        )
        (gradient,) = todist.autograd.grad(context, total, x)
    torch.testing.assert_close(gradient, 2 * x.detach().cos(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("size", SIZES)
def test_derivatives_through_two_levels_of_calls(size):
    on_rank_zero(through_two_levels, size)


def asynchronously() -> None:
    model, batch = make_model(), make_batch()
    expected = torch.autograd.grad(local_loss(model, batch), list(model.parameters()))
    with todist.autograd.context() as context:
        future = todist.remote_async_call(
            local_loss,
            args=(todist.module_clone(model, by="clone"), batch),
            reducer=todist.mean_reducer,
        )
        gradients = todist.autograd.grad(context, future.wait(), model.parameters())
    assert_all_close(gradients, expected)
    future = todist.remote_async_call(
        local_loss, args=(model, batch), reducer=todist.mean_reducer, gradient="worker"
    )
    future.wait().backward()
    assert_all_close([parameter.grad for parameter in model.parameters()], expected)


def test_derivatives_of_asynchronous_calls():
    on_rank_zero(asynchronously, 3)


def keep_gradient(x: torch.Tensor) -> torch.Tensor:
    """Uses a leaf of the worker's own beside the caller's tensor."""
    global own_leaf
    own_leaf = torch.tensor(3.0, requires_grad=True)
    return x * own_leaf


def own_gradient(context: int) -> float:
    return todist.autograd.get_gradients(context)[own_leaf].item()


def leaves_of_a_worker() -> tuple:
    x = torch.tensor(5.0, requires_grad=True)
    with todist.autograd.context() as context:
        product = todist.remote_sync_call(keep_gradient, args=(x.clone(),), partitioner=1)
        todist.autograd.backward(context, product)
        theirs = todist.remote_sync_call(own_gradient, args=(context,), partitioner=1)
        mine = todist.autograd.get_gradients(context)
        return x.grad.item(), len(mine), mine[x].item(), theirs


def test_each_worker_sees_the_gradients_of_its_own_leaves():
    assert on_rank_zero(leaves_of_a_worker, 2) == (3.0, 1, 3.0, 5.0)


def leave_a_result_out() -> None:
    model, batch = make_model(), make_batch()
    x = torch.ones(2, requires_grad=True)
    expected = torch.autograd.grad(local_loss(model, batch), list(model.parameters()))
    with todist.autograd.context() as context:
        loss = remote_loss(todist.module_clone(model, by="clone"), batch)
        remote_loss(todist.module_clone(model, by="clone"), batch)
        unused = todist.remote_sync_call(torch.sum, args=(x * 1,), partitioner=1)
        gradients = todist.autograd.grad(context, loss, model.parameters(), retain_graph=True)
        assert_all_close(gradients, expected)
        (of_unused,) = todist.autograd.grad(context, loss, x, retain_graph=True)
        assert of_unused.tolist() == [0, 0]
        todist.autograd.backward(context, [loss, unused])
        # No gradients but those of the caller's leaves.
        assert len(todist.autograd.get_gradients(context)) == len(expected) + 1
    assert_all_close([p.grad for p in model.parameters()], expected)
    assert x.grad.tolist() == [1, 1]


def test_results_that_are_not_differentiated_have_a_derivative_of_zero():
    on_rank_zero(leave_a_result_out, 2)


def fail_a_backward_pass() -> None:
    x = torch.tensor([1.0, 2.0], requires_grad=True)
    with todist.autograd.context() as context:
        loss = todist.remote_sync_call(torch.square, args=(x.clone(),), partitioner=0).sum()
        todist.autograd.backward(context, loss, retain_graph=True)
        with pytest.raises(RuntimeError):
            todist.autograd.grad(context, [loss.expand(2)], x)
        assert todist.autograd.get_gradients(context)[x].tolist() == [2.0, 4.0]


def test_a_failed_backward_pass_leaves_the_gradients_of_the_context():
    on_rank_zero(fail_a_backward_pass, 1)


def differentiate_twice() -> float:
    """Without retain_graph; the seconds that the shutdown then takes."""
    todist.init_rpc()
    if todist.get_rank() == 0:
        x = torch.ones(3, requires_grad=True)
        with todist.autograd.context() as context:
            todist.autograd.grad(context, (2 * x).sum(), x)  # through no call
            # Worker 1 would get the gradient of one result, and wait for that of the other.
            first = todist.remote_sync_call(torch.sum, args=(x,), partitioner=1)
            second = todist.remote_sync_call(torch.neg, args=(x,), partitioner=1)
            square = todist.remote_sync_call(torch.square, args=(second,), partitioner=2)
            loss = first + square.sum()
            todist.autograd.grad(context, loss, x)
            with pytest.raises(RuntimeError, match="give retain_graph=True to all passes but"):
                todist.autograd.grad(context, loss, x)
    began = time.monotonic()
    todist.shutdown_rpc()
    return time.monotonic() - began


def test_a_second_pass_without_the_graph_is_refused():
    assert max(run_world(differentiate_twice, 3)) < 15


def send_parameters() -> None:
    model, batch = make_model(), make_batch()
    with todist.autograd.context():
        with pytest.raises(todist.UserError, match=r"send module_clone\(model, by='clone'\)"):
            remote_loss(model, batch)
        for function, args in [(look_into, (Plain(model),)), (model, (batch,))]:
            with pytest.raises(todist.UserError, match=r"module_clone"):
                todist.remote_sync_call(function, args=args, partitioner=0)
        assert not remote_loss(model.requires_grad_(False), batch).requires_grad


def test_parameters_whose_gradients_would_stay_on_the_workers_are_refused():
    on_rank_zero(send_parameters, 1)


def look_and_use(x: torch.Tensor) -> torch.Tensor:
    """Calls twice and uses one result."""
    neighbour = (todist.get_rank() + 1) % todist.get_world_size()
    todist.remote_sync_call(torch.exp, args=(x,), partitioner=neighbour)
    return todist.remote_sync_call(torch.sin, args=(x,), partitioner=neighbour)


def look_only(x: torch.Tensor) -> float:
    return todist.remote_sync_call(torch.exp, args=(x,), partitioner=0).item()


def leave_a_nested_result_out() -> tuple:
    x = torch.linspace(-1, 1, 5, dtype=torch.float64, requires_grad=True)
    with todist.autograd.context() as context:
        total = todist.remote_sync_call(
            look_and_use,
            args=(x.clone(),),
            partitioner=todist.exclusive_batch_partitioner,
            reducer=todist.sum_reducer,
        )
        (gradient,) = todist.autograd.grad(context, total, x)
    with todist.autograd.context() as context:
        todist.remote_sync_call(look_only, args=(x[0].clone(),), partitioner=1)
        square = todist.remote_sync_call(torch.square, args=(x[1],), partitioner=1)
        (of_square,) = todist.autograd.grad(context, square, x)
    return gradient, of_square


def test_what_a_worker_calls_for_and_does_not_use_counts_with_a_derivative_of_zero():
    gradient, of_square = on_rank_zero(leave_a_nested_result_out, 2)
    expected = torch.linspace(-1, 1, 5, dtype=torch.float64).cos()
    torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=0)
    assert of_square.tolist() == [0, -1, 0, 0, 0]


OWN = torch.ones((), dtype=torch.float64, requires_grad=True)


def positive(x: torch.Tensor) -> torch.Tensor:
    """An accuracy: no derivative."""
    return (x > 0).double().mean()


def weigh(x: torch.Tensor) -> torch.Tensor:
    """Depends on the worker's own parameter alone."""
    return (OWN * x.detach()).sum()


def sum_of_large(x: torch.Tensor) -> torch.Tensor:
    """Depends on its argument only on some shards."""
    return x.sum() if x.max() > 1 else torch.zeros((), dtype=x.dtype)


def send_what_is_not_used() -> list[list[float]]:
    found = []
    for calls in (
        [(positive, 1), (torch.sum, 1)],
        [(weigh, 1), (torch.sum, 1)],
        [(sum_of_large, todist.batch_partitioner)],
        [(sum_of_large, todist.exclusive_batch_partitioner), (positive, todist.batch_partitioner)],
    ):
        for reducer in (None, todist.sum_reducer):
            x = torch.tensor([1.0, 0.5, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
            with todist.autograd.context() as context:
                results = [
                    todist.remote_sync_call(f, args=(x,), partitioner=where, reducer=reducer)
                    for f, where in calls
                ]
                parts = [p for r in results for p in (r if isinstance(r, list) else [r])]
                loss = torch.stack([part for part in parts if part.requires_grad]).sum()
                (gradient,) = todist.autograd.grad(context, loss, x)
            found.append(gradient.tolist())
    return found


def test_arguments_on_which_no_result_depends_have_a_derivative_of_zero():
    whole, large = [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 1.0, 1.0]
    assert on_rank_zero(send_what_is_not_used, 2) == [*[whole] * 4, *[large] * 4]


def fail(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no value")


def catch_a_nested_failure(x: torch.Tensor) -> torch.Tensor:
    with pytest.raises(todist.RemoteError):
        todist.remote_sync_call(fail, args=(x * 1,), partitioner=0)
    return x.sum()


def differentiate_after_a_failure(case: str) -> str:
    x = torch.ones(3, requires_grad=True)
    with todist.autograd.context() as context:
        y = x * 1
        if case == "failed":
            with pytest.raises(todist.RemoteError, match="no value"):
                todist.remote_sync_call(fail, args=(y,), partitioner=1)
        elif case == "not pickled":
            shards = [(1, (y,), {}), (0, (threading.Lock(),), {})]
            with pytest.raises(TypeError):
                todist.remote_sync_call(torch.exp, partitioner=lambda: shards)
        function = catch_a_nested_failure if case == "nested" else torch.sum

        def differentiate() -> None:
            loss = todist.remote_sync_call(function, args=(y,), partitioner=1)
            todist.autograd.backward(context, loss)

        with pytest.raises(todist.UserError) as caught:
            differentiate()
    return str(caught.value)


@pytest.mark.parametrize("case", ["failed", "not pickled", "nested"])
def test_a_call_that_failed_is_refused_where_torch_would_wait_for_ever(case):
    message = on_rank_zero(differentiate_after_a_failure, 2, case)
    assert "1 remote calls of this context failed or have not ended" in message


class Plain:
    """An object whose tensors are not arguments of their own."""

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


@dataclass
class Record:
    value: torch.Tensor


def put_into(kind: type, x: torch.Tensor) -> object:
    return kind(x.exp())


def look_into(box: Plain | Record) -> torch.Tensor:
    return box.value.sum()


def send_objects() -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    for kind in (Record, Plain):
        with todist.autograd.context() as context:
            box = todist.remote_sync_call(put_into, args=(kind, x * 1), partitioner=1)
            constant = todist.remote_sync_call(look_into, args=(kind(x.detach()),), partitioner=1)
            assert not constant.requires_grad
            total = todist.remote_sync_call(look_into, args=(box,), partitioner=1)
            (gradient,) = todist.autograd.grad(context, total, x)
        torch.testing.assert_close(gradient, x.detach().exp())
        # Nothing depends on the objects that are sent, here and by the worker, nor on the result.
        with todist.autograd.context() as context:
            todist.remote_sync_call(put_aside, args=(kind, kind(x * 1)), partitioner=1)
            todist.remote_sync_call(functools.partial(put_aside, kind, kind(x * 1)), partitioner=1)
            total = todist.remote_sync_call(torch.sum, args=(x * 1,), partitioner=1)
            (gradient,) = todist.autograd.grad(context, total, x)
        assert gradient.tolist() == [1, 1, 1]


def put_aside(kind: type, box: Plain | Record) -> object:
    todist.remote_sync_call(put_into, args=(kind, box.value * 1), partitioner=0)
    return kind(torch.zeros(1, requires_grad=True).exp())


def test_tensors_in_objects_of_any_class_are_differentiated():
    on_rank_zero(send_objects, 2)


def call_without_gradients() -> None:
    x = torch.ones(3, requires_grad=True)
    for disabled in (torch.no_grad(), torch.inference_mode()):
        with todist.autograd.context() as context:
            with disabled:
                value = todist.remote_sync_call(torch.sum, args=(x,), partitioner=1)
            assert value.item() == 3
            loss = todist.remote_sync_call(torch.sum, args=(x * 1,), partitioner=1)
            (gradient,) = todist.autograd.grad(context, loss, x)
        assert gradient.tolist() == [1, 1, 1]


def test_a_call_where_gradients_are_disabled_leaves_the_context_usable():
    on_rank_zero(call_without_gradients, 2)


def call_again_after_nothing_was_sent() -> torch.Tensor:
    x = torch.ones(3, requires_grad=True)
    with todist.autograd.context() as context:
        y = x * 1
        with pytest.raises(TypeError, match="cannot be pickled"):
            todist.remote_sync_call(torch.exp, args=(y, threading.Lock()), partitioner=1)
        loss = todist.remote_sync_call(torch.sum, args=(y,), partitioner=1)
        todist.autograd.backward(context, loss)
    return x.grad


def test_a_call_that_was_not_sent_leaves_the_context_usable():
    assert on_rank_zero(call_again_after_nothing_was_sent, 2).tolist() == [1, 1, 1]


def arguments_of_the_partitioners_own() -> list[float]:
    x = torch.ones(3, requires_grad=True)
    with todist.autograd.context() as context:
        total = todist.remote_sync_call(torch.sum, args=(x * 1,), partitioner=1)
        loss = todist.remote_sync_call(
            torch.exp, partitioner=lambda: [(1, (total,), {})], reducer=todist.sum_reducer
        )
        todist.autograd.backward(context, loss)
    return x.grad.tolist()


def test_a_partitioner_may_pass_on_tensors_that_are_no_arguments():
    assert on_rank_zero(arguments_of_the_partitioners_own, 2) == pytest.approx([math.e**3] * 3)


class DieInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, outer):
        os.kill(os.getpid(), signal.SIGKILL)


def die_in_backward(x: torch.Tensor) -> torch.Tensor:
    return DieInBackward.apply(x).sum()


def lose_a_worker_in_backward() -> tuple[str, int] | None:
    todist.init_rpc()
    if todist.get_rank() == 1:
        time.sleep(60)
    x = torch.ones(3, requires_grad=True)
    with todist.autograd.context() as context:
        loss = todist.remote_sync_call(die_in_backward, args=(x * 1,), partitioner=1)
        with pytest.raises(todist.WorkerLostError) as lost:
            todist.autograd.backward(context, loss)
    todist.shutdown_rpc(graceful=False)
    return str(lost.value), lost.value.rank


def test_a_worker_that_dies_in_a_backward_pass_is_named():
    message, rank = run_world(lose_a_worker_in_backward, 2, may_fail=True)[0]
    assert "worker1" in message and rank == 1
