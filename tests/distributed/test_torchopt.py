"""TorchOpt beside metadist: the same numbers on what it can do, and where it hangs or biases.

TorchOpt is no dependency: `pip install -e '.[baselines]'` brings it.
"""

import importlib
from typing import Any

import pytest
import torch
from torch import nn
from worlds import run_world

from metadist.algorithms import MAML
from metadist.models import Conv4
from metadist.tasks import Episode, Examples

torchopt_missing = importlib.util.find_spec("torchopt") is None
pytestmark = [
    pytest.mark.slow,  # `make test-slow` installs it
    pytest.mark.skipif(
        torchopt_missing, reason="torchopt is not installed: pip install -e '.[baselines]'"
    ),
]


def run_recipe(function: str, *args: Any) -> Any:
    """In a rank, whose world TorchOpt reads when it is imported."""
    return getattr(importlib.import_module("torchopt_recipes"), function)(*args)


def assert_same(found, expected, rtol: float = 1e-12) -> None:
    assert len(found) == len(expected) > 0
    for mine, reference in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, reference, rtol=rtol, atol=1e-15)


def in_one_process(tasks: int) -> tuple[float, list[torch.Tensor]]:
    """MAML's loss and gradient over all tasks with torch alone."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def loss_of(parameters: dict, inputs: torch.Tensor) -> torch.Tensor:
        predictions = torch.func.functional_call(model, parameters, (inputs,))
        return (predictions - inputs.sum(-1, keepdim=True).sin()).square().mean()

    total = 0.0
    both = torch.randn(2, tasks, 6, 4, generator=torch.Generator().manual_seed(1)).double()
    for support, query in zip(*both, strict=True):
        parameters = dict(model.named_parameters())
        for _ in range(2):
            steps = torch.autograd.grad(
                loss_of(parameters, support), list(parameters.values()), create_graph=True
            )
            parameters = {
                name: value - 0.4 * step
                for (name, value), step in zip(parameters.items(), steps, strict=True)
            }
        total = total + loss_of(parameters, query) / tasks
    total.backward()
    return total.item(), [parameter.grad for parameter in model.parameters()]


def their_inner_loop(model: nn.Module, episode: Episode, steps: int) -> torch.Tensor:
    """MAML as TorchOpt's tutorial has it: steps on the module itself, then its state put back."""
    import torchopt

    inner = torchopt.MetaSGD(model, lr=0.1)
    before = torchopt.extract_state_dict(model, by="reference")
    for _ in range(steps):
        inner.step(
            nn.functional.cross_entropy(model(episode.support.inputs), episode.support.targets)
        )
    loss = nn.functional.cross_entropy(model(episode.query.inputs), episode.query.targets)
    torchopt.recover_state_dict(model, before)
    return loss


@pytest.mark.parametrize("steps", [1, 3])
def test_a_task_of_maml_has_the_same_loss_and_second_order_gradient(steps):
    torch.manual_seed(0)
    learner = MAML(Conv4((1, 28, 28), 3, filters=4).double(), inner_lr=0.1, inner_steps=steps)
    parts = [
        Examples(torch.rand(n, 1, 28, 28, dtype=torch.float64), torch.arange(n) % 3) for n in (6, 9)
    ]
    episode = Episode(*parts)
    loss = learner.train()(episode).loss
    gradient = torch.autograd.grad(loss, list(learner.model.parameters()))
    their_loss = their_inner_loop(learner.model, episode, steps)
    assert_same([loss], [their_loss])
    theirs = torch.autograd.grad(their_loss, list(learner.model.parameters()))
    scale = max(each.abs().max() for each in theirs)
    for mine, expected in zip(gradient, theirs, strict=True):
        assert (mine - expected).abs().max() <= 1e-10 * scale


def test_partitioned_calls_and_reducers_give_the_same_results():
    theirs, ours = run_world(run_recipe, 2, "run", "rows")[0]
    assert_same(ours[0], theirs[0], rtol=0)
    assert_same(ours[1:3], theirs[1:3])
    # One worker's result: there a list that holds it, here the result.
    assert_same([ours[3]], theirs[3], rtol=0)


@pytest.mark.parametrize("size", [1, 2])
def test_distributed_maml_has_the_same_loss_and_gradient(size):
    theirs, ours = run_world(run_recipe, size, "run", "maml", 8)[0]
    loss, gradient = in_one_process(8)
    for found_loss, found in (theirs, ours):
        assert found_loss == pytest.approx(loss, rel=1e-12)
        assert_same(found, gradient, rtol=1e-10)


def test_data_parallelism_has_the_same_loss_and_gradient_where_shards_are_equal():
    theirs, ours = run_world(run_recipe, 2, "run", "data parallelism", 16)[0]
    assert ours[0] == pytest.approx(theirs[0], rel=1e-12)
    assert_same(ours[1], theirs[1], rtol=1e-10)


def test_fifteen_items_on_two_workers_average_like_fifteen_items_here_alone():
    """TorchOpt's mean weighs shards of 7 and 8 items alike."""
    theirs, ours = run_world(run_recipe, 2, "run", "data parallelism", 15)[0]
    alone = run_world(run_recipe, 1, "run", "data parallelism", 15)[0][1]
    assert ours[0] == pytest.approx(alone[0], rel=1e-12)
    assert_same(ours[1], alone[1], rtol=1e-10)
    bias = abs(theirs[0] / alone[0] - 1)
    print(f"15 items on 2 workers: TorchOpt's mean is off by {bias:.2%}")
    assert bias > 1e-3


@pytest.mark.slow
def test_thirty_two_tasks_by_reference_take_no_time_here():
    """TorchOpt's MAML example: each task fetches the model from rank zero, whose sixteen threads
    may all wait for the model too: then it hangs, which depends on how the threads meet.
    """
    assert run_world(run_recipe, 2, "run_by_reference", 8)[0] < 20
    theirs = run_world(run_recipe, 2, "run_by_reference", 32, timeout=30.0, may_fail=True)
    print(f"32 tasks on 2 workers by TorchOpt's recipe: {theirs[0]!r}")
    loss, gradient, seconds = run_world(run_recipe, 2, "run_ours", 32)[0]
    expected_loss, expected = in_one_process(32)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert_same(gradient, expected, rtol=1e-10)
    assert seconds < 20
