"""The outer step: a pure function of tensors."""

import pytest
import torch
from tiny_learners import glyphs, sinusoid
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from metadist.algorithms import ANIL, MAML, TaskResult
from metadist.kernels import pytorch_operations
from metadist.models import MLP
from metadist.tasks import stack_episodes, task_keys
from metadist.training.outer_step import StepArguments, outer_step, weighted_step_sum


def test_sums_over_tasks_have_the_layout_of_the_parameters():
    weights = torch.tensor([1.0, 2.0, 0.0], dtype=torch.float64)
    leaf = torch.randn(3, 5, 4, 2, 3)
    layouts = [leaf, leaf.permute(0, 3, 4, 2, 1), leaf[:, :1].expand(3, 5, 4, 2, 3)]
    layouts += [leaf[:, ::2], leaf.permute(0, 4, 3, 2, 1).contiguous().permute(0, 4, 3, 2, 1)]
    for each in layouts:
        found = weighted_step_sum(TaskResult(leaf[:, 0, 0, 0, 0], {}), [each], weights)
        expected = (each.double() * weights.view(3, 1, 1, 1, 1)).sum(0)
        torch.testing.assert_close(found.gradients[0], expected, rtol=1e-14, atol=0)


class Operations(TorchDispatchMode):
    """Records the operations of a block."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function.name())
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("make", "ceiling"), [(sinusoid, 600), (glyphs, 4000), (lambda: glyphs(ANIL), 1600)]
)
def test_a_step_reads_no_value_and_its_operations_do_not_grow_with_the_tasks(make, ceiling):
    learner, tasks = make()
    parameters = dict(learner.named_parameters())
    counts = []
    for number in (2, 32):
        keys = task_keys(0, "train", 1, range(number))
        episodes = stack_episodes([tasks.sample(key) for key in keys])
        weights = torch.ones(number, dtype=torch.float64)
        with pytorch_operations(), Operations() as seen:
            outer_step(StepArguments(learner, parameters, episodes, weights))
        names = set(seen.names)
        assert not {name for name in names if "_local_scalar_dense" in name or "nonzero" in name}
        counts.append(len(seen.names))
    assert counts[0] == counts[1]
    assert counts[1] <= ceiling


class SpareParameter(MAML):
    """Has a parameter on which no loss depends."""

    def __init__(self, *args):
        super().__init__(*args)
        self.spare = nn.Parameter(torch.ones(2))


class Detached(MAML):
    """Returns losses without a graph."""

    batches_tasks = True

    def train_task(self, episode):
        result = super().train_task(episode)
        return result._replace(loss=result.loss.detach())


@pytest.mark.parametrize(("algorithm", "unused"), [(SpareParameter, 1), (Detached, 4)])
def test_parameters_on_which_no_loss_depends_have_no_gradient(algorithm, unused):
    learner, tasks = algorithm(MLP((1,), 1, [8], batch_norm=False), True, 0.01), sinusoid()[1]
    episodes = stack_episodes([tasks.sample(key) for key in task_keys(0, "train", 1, range(3))])
    parameters = dict(learner.named_parameters())
    weights = torch.ones(3, dtype=torch.float64)
    step = outer_step(StepArguments(learner, parameters, episodes, weights))
    assert [gradient is None for gradient in step.gradients].count(True) == unused
