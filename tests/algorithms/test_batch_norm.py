"""Batch-norm statistics in transductive and non-transductive evaluation, for all algorithms."""

import copy

import pytest
import torch
import torch.nn.functional as F
from problems import images
from torch import nn
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
from metadist.algorithms.batch_norm import uses_batch_statistics
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


def test_inner_steps_of_an_evaluation_normalize_instances_as_in_training():
    torch.manual_seed(0)
    norm = nn.InstanceNorm2d(1, affine=True, track_running_stats=True)
    norm.running_var.fill_(100.0)
    learner = MAML(nn.Sequential(norm, nn.Flatten(), nn.Linear(256, 3)).double(), inner_lr=0.1)
    support = images().support
    trained = learner.train().adapt(learner.initial(), support, 2)
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    evaluated = learner.eval().adapt(learner.initial(), support, 2)
    assert all(torch.equal(trained[name], evaluated[name]) for name in trained)
    assert not norm.training and norm.track_running_stats
    after = dict(norm.named_buffers())
    assert before.keys() == after.keys()
    assert all(torch.equal(buffer, after[name]) for name, buffer in before.items())


def test_which_modules_use_the_statistics_of_the_batch():
    def norm(track):
        return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=track))

    assert uses_batch_statistics(norm(track=False).eval())
    assert uses_batch_statistics(norm(track=True).train())
    assert not uses_batch_statistics(norm(track=True).eval())
    assert not uses_batch_statistics(nn.Linear(2, 2).train())


def test_batch_norm_protocol():
    conv, plain = Conv4((1, 16, 16), 3, filters=4), MLP((4,), 3, [5], batch_norm=False)
    running = Conv4((1, 16, 16), 3, filters=4, running_statistics=True)
    assert batch_norm_protocol(plain, False) == "none"
    assert batch_norm_protocol(running, True) == "running statistics (not transductive)"
    assert batch_norm_protocol(conv, True) == "batch statistics (transductive)"
    expected = "batch statistics of one query with the support set (not transductive)"
    assert batch_norm_protocol(conv, False) == expected
    assert batch_norm_protocol(MAMLPlusPlus(conv), False) == expected


def test_one_norm_without_running_statistics_makes_the_protocol_transductive():
    mixed = Conv4((1, 16, 16), 3, filters=4, running_statistics=True)
    norms = [module for module in mixed.modules() if isinstance(module, torch.nn.BatchNorm2d)]
    norms[-1].track_running_stats = False
    assert batch_norm_protocol(mixed, True) == "batch statistics (transductive)"


ADAPTIVE = [ANIL, IMAML, MAML, MAMLPlusPlus, MetaSGD, Reptile]


def with_momentum_zero(learner: nn.Module) -> nn.Module:
    """The learner with batch norms whose running statistics stay as they are."""
    for module in learner.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 0.0
    return learner


@pytest.mark.parametrize("algorithm", ADAPTIVE, ids=lambda each: each.__name__)
def test_inner_steps_use_batch_statistics_in_evaluation_too(algorithm):
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=4, running_statistics=True).double()
    for norm in model.norms:
        norm.running_mean += 3.0  # far from those of the support set
    batch = Conv4((1, 16, 16), 3, filters=4).double()
    batch.load_state_dict(dict(model.named_parameters()))
    task, found = images(queries=3), {}
    for name, network in (("running", model), ("batch", batch)):
        learner = with_momentum_zero(algorithm(network, inner_steps=2)).eval()
        before = {key: tensor.clone() for key, tensor in learner.state_dict().items()}
        features: list[torch.Tensor] = []
        hook = network.head.register_forward_pre_hook(
            lambda _, given, into=features: into.append(given[0])
        )
        torch.manual_seed(0)
        learner(task)
        hook.remove()
        found[name] = [each for each in features if len(each) != len(task.query.targets)]
        assert all(torch.equal(each, before[key]) for key, each in learner.state_dict().items())
    assert found["running"] and len(found["running"]) == len(found["batch"])
    for running, of_batch in zip(found["running"], found["batch"], strict=True):
        torch.testing.assert_close(running, of_batch)


def test_queries_use_running_statistics_of_the_adapted_network():
    torch.manual_seed(0)
    model = Conv4((1, 16, 16), 3, filters=4, running_statistics=True).double()
    task = images(queries=3)
    model.train()(task.query.inputs)
    found = MAML(model, inner_lr=0.1, inner_steps=1).eval()(task)
    training = copy.deepcopy(model).train()
    loss = F.cross_entropy(training(task.support.inputs), task.support.targets)
    gradients = torch.autograd.grad(loss, list(training.parameters()))
    adapted = {
        name: parameter.detach() - 0.1 * gradient
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True)
    }
    expected = functional_call(model.eval(), adapted, (task.query.inputs,))
    torch.testing.assert_close(found.predictions, expected)


class FrozenNorms(Conv4):
    """Keeps its batch norms in evaluation mode, as fine-tuning of pretrained networks does."""

    def train(self, mode: bool = True) -> "FrozenNorms":
        super().train(mode)
        for norm in self.norms:
            norm.eval()
        return self


def test_norms_that_training_keeps_in_evaluation_mode_stay_so():
    torch.manual_seed(0)
    model = FrozenNorms((1, 16, 16), 3, filters=4, running_statistics=True).double()
    task, learner = images(queries=3), MAML(model, inner_lr=0.1, inner_steps=1)
    trained = learner.train()(task).loss
    torch.testing.assert_close(learner.eval()(task).loss, trained)
    assert not learner.training and not any(module.training for module in learner.modules())
