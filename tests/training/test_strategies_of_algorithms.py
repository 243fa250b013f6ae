"""Every algorithm under every strategy: one loss and one gradient, and runs that go on exactly."""

import functools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from omegaconf import DictConfig
from tiny import CONF, SMALL, compose, records, run_results, train_world, without_times
from worlds import run_world

from metadist.config import build_experiment
from metadist.tasks import Episode, task_keys
from metadist.training import Experiment, LocalStrategy, Strategy
from metadist.training.checkpoints import read_checkpoint
from metadist.training.task_mapper import MetaBatch

ALGORITHMS = {
    "maml": [],
    "fomaml": [],
    "pretrained": [],
    "anil": ["model.dropout=0.2"],
    "meta_sgd": ["algorithm.inner_steps=2"],
    "maml_plus_plus": [
        "algorithm.inner_steps=2",
        "algorithm.multi_step_iterations=3",
        "algorithm.first_order_iterations=2",
        "model.running_statistics=true",
    ],
    "reptile": ["algorithm.eval_inner_steps=3", "task.train_shots=3"],
    "imaml": ["algorithm.inner_steps=3"],
    "prototypical": ["task.train_ways=5", "model.running_statistics=true"],
}
TASKS = 3


def built(directory: str, configurations: dict[str, DictConfig]) -> dict[str, Experiment]:
    """The experiment of each algorithm, in float64."""
    experiments = {}
    for name, configuration in configurations.items():
        x = experiments[name] = build_experiment(configuration, directory, name)
        x.learner.double()
        x.tasks.sample = functools.partial(_in_double, x.tasks.sample)
    return experiments


def outcome(x: Experiment, strategy: Strategy, chunk_size: int | str = "auto") -> tuple:
    """Loss, buffers' changes and gradient of one meta-batch."""
    mapper = replace(x.train_mapper, chunk_size=chunk_size)
    batch = MetaBatch(task_keys(0, "train", 1, range(TASKS)))
    result, _ = strategy.forward_backward(mapper, x.learner, batch)
    gradient = {name: parameter.grad for name, parameter in x.learner.named_parameters()}
    return result.loss, result.buffers, gradient


def outcomes(directory: str, configurations: dict[str, DictConfig]) -> dict[str, tuple]:
    """The outcome of each algorithm in a world of several ranks, on drivers."""
    experiments = built(directory, configurations)
    one = experiments["maml"].strategy  # they all use one world
    one.open()
    found = {name: outcome(x, x.strategy) for name, x in experiments.items() if one.is_driver}
    one.close()
    return found


def _in_double(sample: Callable, key: torch.Tensor) -> Episode:
    episode = sample(key)
    return type(episode)(*(p._replace(inputs=p.inputs.double()) for p in episode))


def test_every_algorithm_of_meta_learning_is_here():
    files = {path.stem for path in (CONF / "algorithm").glob("*.yaml")}
    assert files - {"supervised"} == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("strategy", "driver"), [pytest.param("rpc", 0, marks=pytest.mark.slow), ("allreduce", 1)]
)
def test_loss_and_gradient_do_not_depend_on_who_computes_them(tmp_path, strategy, driver):
    configurations = {
        name: compose(*SMALL, f"strategy={strategy}", f"algorithm={name}", *overrides)
        for name, overrides in ALGORITHMS.items()
    }
    found = run_world(outcomes, 2, str(tmp_path), configurations)[driver]
    for name, x in built(str(tmp_path), configurations).items():
        local = LocalStrategy(x.strategy.partitioner, x.strategy.reducer)
        expected = outcome(x, local)
        assert_equal(outcome(x, local, 1), expected, f"{name}, one task at a time")
        assert_equal(found[name], expected, name)


def assert_equal(found: tuple, expected: tuple, case: str) -> None:
    """Losses, buffers' changes and gradients are equal but for rounding in float64."""
    (found_loss, found_buffers, found_gradient), (loss, buffers, gradient) = found, expected
    assert abs(found_loss - loss) <= 1e-12 * abs(loss), case
    assert found_buffers.keys() == buffers.keys(), case
    for buffer, change in buffers.items():
        assert torch.allclose(found_buffers[buffer], change, rtol=1e-12, atol=1e-15), case
    scale = max(each.abs().max() for each in gradient.values() if each is not None)
    assert scale > 0 and found_gradient.keys() == gradient.keys(), case
    for parameter, each in gradient.items():
        other = found_gradient[parameter]
        assert (other is None) == (each is None), (case, parameter)
        assert each is None or (other - each).abs().max() <= 1e-11 * scale, (case, parameter)


def test_the_count_of_iterations_goes_on_exactly_after_a_resume(tmp_path):
    overrides = ("algorithm=maml_plus_plus", *ALGORITHMS["maml_plus_plus"], "trainer.eval_every=0")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    train_world(2, whole, *overrides)  # 4 iterations
    train_world(2, parts, "trainer.iterations=2", *overrides)
    train_world(2, parts, "resume=auto", *overrides)
    assert without_times(records(parts)) == without_times(records(whole))
    last = "checkpoints/iteration-00000004.pt"
    left, right = (read_checkpoint(each / last) for each in (whole, parts))
    for part in ("learner", "buffers"):
        for key, tensor in left[part].items():
            assert torch.equal(tensor, right[part][key]), key
    assert left["buffers"]["iteration"] == 4
    results = run_results(whole)
    assert results["protocol"].keys() >= {"inner_steps", "eval_inner_steps", "batch_norm"}
    assert results["method"]["algorithm"] == "MAML++"
