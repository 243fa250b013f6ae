"""Each algorithm with inner steps learns to adapt to two lines."""

import pytest
import torch
from problems import Scale, TwoScales, line

from metadist.algorithms import ANIL, IMAML, MAML, MAMLPlusPlus, MetaSGD, Reptile
from metadist.tasks import Episode

TASKS = [Episode(line(slope, [1.0, 0.5]), line(slope, [0.5, -1.0])) for slope in (2.0, 4.0)]

LEARNERS = {
    "maml": lambda: MAML(Scale(0.0), True, inner_lr=0.1),
    "fomaml": lambda: MAML(Scale(0.0), True, inner_lr=0.1, first_order=True),
    "anil": lambda: ANIL(TwoScales(0.5, 0.0), True, inner_lr=0.1, inner_steps=2),
    "meta_sgd": lambda: MetaSGD(Scale(0.0), True, inner_lr=0.1),
    "maml_plus_plus": lambda: MAMLPlusPlus(
        Scale(0.0), True, inner_steps=2, multi_step_iterations=20, first_order_iterations=10
    ),
    "imaml": lambda: IMAML(Scale(0.0), True, inner_lr=0.1, inner_steps=5),
    "reptile_sgd": lambda: Reptile(
        Scale(0.0), True, "sgd", 0.1, inner_batch_size=1, eval_inner_steps=2
    ),
    "reptile_adam": lambda: Reptile(Scale(0.0), True, "adam", 0.1, eval_inner_steps=2),
}


def evaluate(learner) -> tuple[float, float]:
    """Mean squared error after and before adaptation."""
    torch.manual_seed(0)
    results = [learner.eval()(task).metrics for task in TASKS]
    return tuple(
        sum(result[name].item() for result in results) / 2 for name in ("mse", "mse_before")
    )


@pytest.mark.parametrize("name", LEARNERS)
def test_meta_training_improves_adaptation(name):
    learner = LEARNERS[name]()
    optimizer = torch.optim.SGD(learner.parameters(), lr=0.5 if "reptile" in name else 0.1)
    start, _ = evaluate(learner)
    torch.manual_seed(0)
    for _ in range(60):
        optimizer.zero_grad()
        for task in TASKS:
            (learner.train()(task).loss / 2).backward()
        optimizer.step()
    after, before = evaluate(learner)
    assert after < min(before, 0.5 * start)
    # Without learned rates the optimum is the mean slope, 3, with an initial error of 0.625.
    if name in ("maml", "fomaml", "imaml", "reptile_sgd", "reptile_adam"):
        assert learner.model.weight.item() == pytest.approx(3, abs=0.3)
