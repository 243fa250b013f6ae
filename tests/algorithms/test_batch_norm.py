"""Batch-norm statistics in transductive and non-transductive evaluation, for all algorithms."""

import pytest
import torch
import torch.nn.functional as F
from problems import images
from torch.func import functional_call

from metadist.algorithms import (
    ANIL,
    IMAML,
    MAML,
    MAMLPlusPlus,
    MetaSGD,
    Prototypical,
    Reptile,
    batch_norm_protocol,
)
from metadist.models import MLP, Conv4
from metadist.tasks import Examples

ALGORITHMS = [ANIL, IMAML, MAML, MAMLPlusPlus, MetaSGD, Prototypical, Reptile]


def predictions(learner, task, queries: slice) -> torch.Tensor:
    """Predictions of a subset of the queries, evaluated alone."""
    torch.manual_seed(0)
    some = Examples(*(each[queries] for each in task.query))
    with torch.no_grad():
        return learner.eval()(task._replace(query=some)).predictions


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("transductive", "running"), [(True, False), (False, False), (True, True)])
def test_whether_queries_affect_each_other(algorithm, transductive, running):
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=4, running_statistics=running).double()
    learner, task = algorithm(model, transductive=transductive), images(queries=3)
    joint = predictions(learner, task, slice(0, 9))
    separate = torch.cat([predictions(learner, task, slice(i, i + 3)) for i in (0, 3, 6)])
    assert torch.allclose(joint, separate, rtol=1e-9) == (running or not transductive)
    assert joint.shape == (9, 3)


def test_non_transductive_queries_are_batched_with_the_support_set():
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=4).double()
    task = images(queries=3)
    learner = MAML(model, inner_lr=0.1, inner_steps=1, transductive=False).eval()
    found = learner(task)
    adapted = {
        name: parameter.detach() - 0.1 * gradient
        for (name, parameter), gradient in zip(
            model.named_parameters(),
            torch.autograd.grad(
                F.cross_entropy(model(task.support.inputs), task.support.targets),
                list(model.parameters()),
            ),
            strict=True,
        )
    }
    for query, prediction in zip(task.query.inputs, found.predictions, strict=True):
        batch = torch.cat([task.support.inputs, query.unsqueeze(0)])
        torch.testing.assert_close(prediction, functional_call(model, adapted, (batch,))[-1])


def test_batch_norm_protocol():
    conv, plain = Conv4((1, 16, 16), 3, filters=4), MLP((4,), 3, [5], batch_norm=False)
    running = Conv4((1, 16, 16), 3, filters=4, running_statistics=True)
    assert batch_norm_protocol(plain, False) == "none"
    assert batch_norm_protocol(running, True) == "running statistics (not transductive)"
    assert batch_norm_protocol(conv, True) == "batch statistics (transductive)"
    expected = "batch statistics of one query with the support set (not transductive)"
    assert batch_norm_protocol(conv, False) == expected
    assert batch_norm_protocol(MAMLPlusPlus(conv), False) == expected
