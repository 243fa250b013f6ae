"""Every algorithm under every strategy: one loss and one gradient, and runs that go on exactly."""

from dataclasses import replace

import pytest
import torch
from tiny import CONF, build, records, run_results, train, without_times
from worlds import run_world

from metadist.tasks import task_keys
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
TASKS = 5


def outcomes(directory: str, strategy: str) -> dict[tuple[str, int | str], tuple]:
    """Of each algorithm: loss, buffers' changes and gradient of one meta-batch in float64.

    By its name and `task_chunk_size`.
    """
    experiments = {
        name: build(directory, f"strategy={strategy}", f"algorithm={name}", *overrides)
        for name, overrides in ALGORITHMS.items()
    }
    one = next(iter(experiments.values())).strategy  # they all use one world
    one.open()
    found = {}
    for name, x in experiments.items():
        x.learner.double()
        x.tasks.sample = _in_double(x.tasks.sample)
        batch = MetaBatch(task_keys(0, "train", 1, range(TASKS)))
        for at_once in ("auto", 1) if strategy == "local" else ("auto",):
            if one.is_driver:
                mapper = replace(x.train_mapper, chunk_size=at_once)
                result, _ = x.strategy.forward_backward(mapper, x.learner, batch)
                gradient = {n: p.grad for n, p in x.learner.named_parameters()}
                found[name, at_once] = (result.loss, result.buffers, gradient)
    one.close()
    return found


def _in_double(sample):
    def sampled(key):
        episode = sample(key)
        return type(episode)(*(p._replace(inputs=p.inputs.double()) for p in episode))

    return sampled


def test_every_algorithm_of_meta_learning_is_here():
    files = {path.stem for path in (CONF / "algorithm").glob("*.yaml")}
    assert files - {"supervised"} == set(ALGORITHMS)


@pytest.mark.parametrize(
    ("strategy", "driver"), [pytest.param("rpc", 0, marks=pytest.mark.slow), ("allreduce", 1)]
)
def test_loss_and_gradient_do_not_depend_on_who_computes_them(tmp_path, strategy, driver):
    local = outcomes(str(tmp_path), "local")
    found = run_world(outcomes, 2, str(tmp_path), strategy)[driver]
    for name in ALGORITHMS:
        assert_equal(local[name, 1], local[name, "auto"], f"{name}, one task at a time")
        assert_equal(found[name, "auto"], local[name, "auto"], name)


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
    run_world(train, 2, str(whole), *overrides)  # 4 iterations
    run_world(train, 2, str(parts), "trainer.iterations=2", *overrides)
    run_world(train, 2, str(parts), "resume=auto", *overrides)
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
