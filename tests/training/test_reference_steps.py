"""One outer step of the trainer, of every strategy, against the algorithm's formula by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from omegaconf import DictConfig
from tiny import SMALL, compose
from torch.func import grad
from worlds import run_world

from metadist.config import build_experiment
from metadist.loggers import LoggerCollection
from metadist.tasks import task_keys
from metadist.training import Experiment, Trainer

INNER, OUTER, TASKS = 0.02, 0.3, 5
OPTIONS = (
    *("dataset=sinusoid", "model=mlp", "model.hidden=[7]", "model.batch_norm=false"),
    *("task.shots=6", f"algorithm.inner_lr={INNER}", f"trainer.meta_batch_size={TASKS}"),
    *("optimizer=sgd", "optimizer.momentum=0", f"optimizer.lr={OUTER}", "seed=2"),
)
OMIT = ("++dataset.", "model.", "task.", "trainer.meta")
REPTILE = ("algorithm=reptile", "algorithm.inner_optimizer=sgd", "algorithm.inner_batch_size=null")


def configuration(*overrides: str) -> DictConfig:
    small = [override for override in SMALL if not override.startswith(OMIT)]
    return compose(*small, *overrides, *OPTIONS)


def experiment(directory: Path, composed: DictConfig) -> Experiment:
    x = build_experiment(composed, directory, "maml")
    x.learner.double()
    sample = x.tasks.sample

    def sample_double(key):
        episode = sample(key)
        return type(episode)(
            *(part._replace(inputs=part.inputs.double(), targets=part.targets.double())
              for part in episode)
        )  # fmt: skip

    x.tasks.sample = sample_double
    x.tasks.sample_batch = lambda keys, device: None
    x.logger = LoggerCollection([])
    return x


def step(directory: Path, composed: DictConfig) -> tuple | None:
    """Loss, gradient norm and parameters after one outer step."""
    x = experiment(directory, composed)
    x.strategy.open()
    found = None
    if x.strategy.is_driver:
        output = Trainer(x).train_step(1)
        after = [parameter.detach() for parameter in x.learner.model.parameters()]
        found = output.loss, output.gradient_norm, after
    x.strategy.close()
    return found


def forward(weights: tuple, inputs: torch.Tensor) -> torch.Tensor:
    first, first_bias, second, second_bias = weights
    return torch.relu(inputs @ first.T + first_bias) @ second.T + second_bias


def loss_of(weights: tuple, examples) -> torch.Tensor:
    return (forward(weights, examples.inputs) - examples.targets).square().mean()


def adapted(weights: tuple, support, steps: int, first_order: bool = False) -> tuple:
    for _ in range(steps):
        gradients = grad(loss_of)(weights, support)
        if first_order:
            gradients = tuple(gradient.detach() for gradient in gradients)
        weights = tuple(w - INNER * s for w, s in zip(weights, gradients, strict=True))
    return weights


def by_hand(x, kind: str, steps: int) -> tuple[float, float, list[torch.Tensor]]:
    """The same by the definition: mean over tasks, then one step of gradient descent."""
    start = tuple(parameter.detach() for parameter in x.learner.model.parameters())
    losses, total = [], [torch.zeros_like(weight) for weight in start]
    for key in task_keys(2, "train", 1, range(TASKS)):
        support, query = x.tasks.sample(key)
        if kind == "reptile":
            after = adapted(start, support, steps)
            losses.append(loss_of(after, query).item())
            gradients = tuple(before - now for before, now in zip(start, after, strict=True))
        else:
            first_order = kind == "fomaml"

            def outer(weights, support=support, query=query, first_order=first_order):
                return loss_of(adapted(weights, support, steps, first_order), query)

            losses.append(outer(start).item())
            gradients = grad(outer)(start)
        total = [t + g / TASKS for t, g in zip(total, gradients, strict=True)]
    norm = float(np.sqrt(sum(float((gradient**2).sum()) for gradient in total)))
    return float(np.mean(losses)), norm, [w - OUTER * g for w, g in zip(start, total, strict=True)]


ALGORITHMS = {
    "maml": ("algorithm=maml",),
    "fomaml": ("algorithm=maml", "algorithm.first_order=true"),
    "reptile": REPTILE,
}
WORLDS = [("local", 1), ("rpc", 2), ("allreduce", 3)]
QUICK = {("fomaml", "local"), ("reptile", "rpc"), *(("maml", strategy) for strategy, _ in WORLDS)}


@pytest.mark.parametrize(
    ("kind", "strategy", "size"),
    [
        pytest.param(kind, *world, marks=[] if (kind, world[0]) in QUICK else pytest.mark.slow)
        for kind in ALGORITHMS
        for world in WORLDS
    ],
)
def test_an_outer_step(tmp_path, kind, strategy, size):
    overrides = (*ALGORITHMS[kind], "algorithm.inner_steps=3")
    here = experiment(tmp_path / "here", configuration(*overrides, "strategy=local"))
    loss, norm, weights = by_hand(here, kind, 3)
    composed = configuration(*overrides, f"strategy={strategy}")
    for found in run_world(step, size, tmp_path / "world", composed):
        if found is None:
            continue
        assert found[0] == pytest.approx(loss, rel=1e-10)
        assert found[1] == pytest.approx(norm, rel=1e-10)
        for weight, expected in zip(found[2], weights, strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-9, atol=1e-12)
