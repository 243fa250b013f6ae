"""The evaluations of the supervised baseline against reference implementations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from problems import images

from metadist.algorithms import Supervised
from metadist.errors import UserError
from metadist.models import MLP, Conv4
from metadist.tasks import Episode, Examples

WAYS = 3


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Conv4((1, 16, 16), 7, filters=4).double()  # seven training classes


def normalize(features):
    """Features of norm √d."""
    return features / features.norm(dim=1, keepdim=True) * features.shape[1] ** 0.5


def fitted(parameters, predict, task, steps, rate):
    """Train with torch's SGD on the support set, then predict the queries."""
    optimizer = torch.optim.SGD(parameters, lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(predict(task.support.inputs), task.support.targets).backward()
        optimizer.step()
    with torch.no_grad():
        return predict(task.query.inputs)


def new_head(features):
    head = torch.nn.Linear(features, WAYS).double()
    for parameter in head.parameters():
        torch.nn.init.zeros_(parameter)
    return head


def check(learner, task, expected):
    before = copy.deepcopy(learner.state_dict())
    result = learner.eval()(task)
    torch.testing.assert_close(result.predictions, expected, rtol=1e-10, atol=1e-10)
    loss = F.cross_entropy(expected, task.query.targets)
    torch.testing.assert_close(result.loss, loss, rtol=1e-10, atol=0)
    accuracy = (expected.argmax(1) == task.query.targets).double().mean()
    assert result.metrics["accuracy"] == accuracy
    after = learner.state_dict()
    assert all(torch.equal(after[name], each) for name, each in before.items())


def test_training_is_ordinary_classification(network):
    task = images(ways=7, shots=1)
    task = task._replace(support=type(task.support)(torch.zeros(0, 1, 16, 16), torch.zeros(0)))
    learner = Supervised(network).train()
    result = learner(task)
    expected = F.cross_entropy(network(task.query.inputs), task.query.targets)
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=0)
    with pytest.raises(UserError, match="not on few-shot tasks"):
        learner(images())


def test_nearest_centroid(network):
    task = images(WAYS, shots=2)
    support = network.features(task.support.inputs)
    queries = network.features(task.query.inputs)
    centroids = [support[task.support.targets == label].mean(0) for label in range(WAYS)]
    expected = torch.stack([-((queries - each) ** 2).sum(1) for each in centroids], 1).detach()
    check(Supervised(network, evaluation="nearest_centroid"), task, expected)


class Identity(torch.nn.Module):
    """A model whose features are its inputs."""

    head = torch.nn.Linear(4, WAYS)

    def features(self, inputs):
        return inputs


def test_centroids_of_features_with_a_large_mean():
    torch.manual_seed(0)
    centers = 50 + torch.randn(WAYS, 1, 4) / 20
    support, query = ((centers + torch.randn(WAYS, n, 4) / 200).flatten(0, 1) for n in (5, 30))
    labels = [torch.arange(WAYS).repeat_interleave(n) for n in (5, 30)]
    task = Episode(Examples(support, labels[0]), Examples(query, labels[1]))
    learner = Supervised(Identity(), evaluation="nearest_centroid").eval()
    assert learner(task).metrics["accuracy"] == 1


def test_linear_probe(network):
    task, head = images(WAYS), new_head(4)

    def predict(inputs):
        return head(normalize(network.features(inputs).detach()))

    expected = fitted(head.parameters(), predict, task, 6, 0.3)
    learner = Supervised(network, evaluation="linear_probe", eval_inner_steps=6, inner_lr=0.3)
    check(learner, task, expected)


def test_fine_tune(network):
    task, head, body = images(WAYS), new_head(4), copy.deepcopy(network)

    def predict(inputs):
        return head(normalize(body.features(inputs)))

    expected = fitted([*head.parameters(), *body.parameters()], predict, task, 4, 0.2)
    learner = Supervised(network, evaluation="fine_tune", eval_inner_steps=4, inner_lr=0.2)
    check(learner, task, expected)


def test_fine_tune_leaves_frozen_layers_as_they_are(network):
    task, head, body = images(WAYS), new_head(4), copy.deepcopy(network)
    for model in (network, body):
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".0." not in name)
    trainable = [parameter for parameter in body.parameters() if parameter.requires_grad]
    assert 0 < len(trainable) < len(list(body.parameters()))

    def predict(inputs):
        return head(normalize(body.features(inputs)))

    expected = fitted([*head.parameters(), *trainable], predict, task, 4, 0.2)
    learner = Supervised(network, evaluation="fine_tune", eval_inner_steps=4, inner_lr=0.2)
    check(learner, task, expected)


@pytest.mark.parametrize("evaluation", ["nearest_centroid", "linear_probe", "fine_tune"])
def test_queries_affect_each_other_only_if_transductive(network, evaluation):
    task = images(WAYS)
    fewer = task._replace(query=type(task.query)(task.query.inputs[:2], task.query.targets[:2]))

    def predict(each, transductive):
        learner = Supervised(network, evaluation=evaluation, transductive=transductive)
        return learner.eval()(each).predictions[:2]

    assert not torch.allclose(predict(task, True), predict(fewer, True))
    torch.testing.assert_close(predict(task, False), predict(fewer, False), rtol=1e-10, atol=0)


def test_regression_is_refused():
    with pytest.raises(UserError, match="choose a dataset with classes"):
        Supervised(MLP((1,), 1, [8]), regression=True)
