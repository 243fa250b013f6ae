"""`evaluate_each_step`: metrics after each inner step."""

import pytest
import torch
from problems import LINES, POWER, QUERY_POWER, SLOPE, Scale, images

from metadist.algorithms import ANIL, IMAML, MAML, MAMLPlusPlus, MetaSGD, Prototypical, Reptile
from metadist.errors import UserError
from metadist.models import Conv4

STEPS = 3
LEARNERS = {
    "maml": (MAML, {}),
    "anil": (ANIL, {}),
    "meta_sgd": (MetaSGD, {}),
    "maml_plus_plus": (MAMLPlusPlus, {"inner_steps": 2}),
    "imaml": (IMAML, {}),
    "reptile": (Reptile, {"inner_lr": 0.05, "eval_inner_batch_size": 4}),
}


def evaluate(name: str, steps: int, evaluate_each_step: bool, transductive: bool = True) -> dict:
    """Metrics in float64 of a task of random images after `steps` steps."""
    kind, options = LEARNERS[name]
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=3)
    learner = kind(model, eval_inner_steps=steps, transductive=transductive, **options)
    learner.double().eval()
    learner.evaluate_each_step = evaluate_each_step
    torch.manual_seed(1)
    result = learner(images(queries=5))
    return {**result.metrics, "loss": result.loss}


@pytest.mark.parametrize("transductive", [True, False])
@pytest.mark.parametrize("name", LEARNERS)
def test_metrics_equal_those_of_shorter_adaptation(name, transductive):
    found = evaluate(name, STEPS, True, transductive)
    after = {f"accuracy_after_{step}" for step in range(1, STEPS + 1)}
    assert after == {each for each in found if "_after_" in each}
    for step in range(1, STEPS + 1):
        shorter = evaluate(name, step, False, transductive)
        assert found[f"accuracy_after_{step}"] == shorter["accuracy"]
        assert found["accuracy_before"] == shorter["accuracy_before"]
    # The final metrics are bit-identical with and without evaluation of each step.
    assert {each: found[each] for each in shorter} == shorter and "accuracy_after_1" not in shorter


@pytest.mark.parametrize("kind", [MAML, MetaSGD])
def test_closed_form_metrics_after_each_step(kind):
    # A step multiplies w - s by 1 - 2 α mean(x²).
    learner = kind(Scale(-1.0), True, inner_lr=0.1, eval_inner_steps=4).eval()
    learner.evaluate_each_step = True
    found = learner(LINES).metrics
    for step in range(1, 5):
        error = (1 - 0.2 * POWER) ** step * (-1.0 - SLOPE)
        wanted = QUERY_POWER * error**2
        assert found[f"mse_after_{step}"].item() == pytest.approx(wanted, rel=1e-12)
    assert found["mse_after_4"] == found["mse"] and found["mse_before"].item() == QUERY_POWER * 16


def test_without_inner_steps_there_are_no_step_metrics():
    learner = Prototypical(Conv4((1, 16, 16), 3, filters=3)).double().eval()
    learner.evaluate_each_step = True
    assert set(learner(images()).metrics) == {"accuracy"}


@pytest.mark.parametrize("chosen", [slice(-1, None), slice(0)], ids=["the last", "none"])
def test_a_trajectory_yields_once_for_each_step(chosen):
    class Trajectory(MAML):
        def trajectory(self, *arguments):
            yield from [*super().trajectory(*arguments)][chosen]

    learner = Trajectory(Scale(-1.0), True, inner_lr=0.1, eval_inner_steps=2).eval()
    with pytest.raises(UserError, match=r"Trajectory\.trajectory yielded \d times for 2 steps"):
        learner(LINES)
