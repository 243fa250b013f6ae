"""Transductive evaluation and the other ones, for every algorithm."""

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
    statistics_name,
)
from metadist.models import MLP, Conv4
from metadist.tasks import Examples

ALGORITHMS = [ANIL, IMAML, MAML, MAMLPlusPlus, MetaSGD, Prototypical, Reptile]


def predictions(learner, task, queries: slice) -> torch.Tensor:
    """The predictions of some of the queries when there are no others."""
    torch.manual_seed(0)
    some = Examples(*(each[queries] for each in task.query))
    with torch.no_grad():
        return learner.eval()(task._replace(query=some)).predictions


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize(("transductive", "running"), [(True, False), (False, False), (True, True)])
def test_whether_queries_see_each_other(algorithm, transductive, running):
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=4, running_statistics=running).double()
    learner, task = algorithm(model, transductive=transductive), images(queries=3)
    together = predictions(learner, task, slice(0, 9))
    apart = torch.cat([predictions(learner, task, slice(i, i + 3)) for i in (0, 3, 6)])
    assert torch.allclose(together, apart, rtol=1e-9) == (running or not transductive)
    assert together.shape == (9, 3)


def test_not_transductive_is_each_query_with_the_support_set():
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=4).double()
    task = images(queries=3)
    learner = MAML(model, inner_lr=0.1, inner_steps=1, transductive=False).eval()
    found = learner(task)
    adapted = {
        name: parameter.detach() - 0.1 * slope
        for (name, parameter), slope in zip(
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


def test_names_for_the_protocol():
    conv, plain = Conv4((1, 16, 16), 3, filters=4), MLP((4,), 3, [5], batch_norm=False)
    running = Conv4((1, 16, 16), 3, filters=4, running_statistics=True)
    assert statistics_name(plain, False) == "none"
    assert statistics_name(running, True) == "running statistics of training (not transductive)"
    assert statistics_name(conv, True) == "statistics of the batch at hand (transductive)"
    words = "statistics of the support set with one query (not transductive)"
    assert statistics_name(conv, False) == words
    assert statistics_name(MAMLPlusPlus(conv), False) == words
