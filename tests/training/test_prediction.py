"""Predictions of unlabeled inputs: one per call as many, by the statistics of the support set."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from metadist.algorithms import (
    ANIL,
    IMAML,
    MAML,
    Learner,
    MAMLPlusPlus,
    MetaSGD,
    Prototypical,
    Reptile,
    Supervised,
    TaskResult,
)
from metadist.errors import UserError
from metadist.models import MLP, Conv4
from metadist.tasks import Episode, Examples, FewShotTasks, Glyphs, Sinusoid, task_keys
from metadist.training import predict_unlabeled


class Plain(Learner):
    """A user's algorithm that passes the queries to the model by itself."""

    def forward(self, episode):
        loss = self.loss(self.model(episode.support.inputs), episode.support.targets)
        predictions = self.model(episode.query.inputs)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets), predictions)


ALGORITHMS = [ANIL, IMAML, MAML, MAMLPlusPlus, MetaSGD, Plain, Prototypical, Reptile, Supervised]


@pytest.fixture(scope="module")
def tasks() -> FewShotTasks:
    dataset = Glyphs(train_classes=5, validation_classes=5, test_classes=20, examples=6)
    return FewShotTasks(dataset, ways=5, shots=1, queries=5)


def sample(tasks, index: int) -> Episode:
    return tasks.sample(task_keys(0, "test", 0, range(index + 1))[index])


def model_for(tasks, **options) -> Conv4:
    torch.manual_seed(0)
    return Conv4(tasks.input_shape, tasks.outputs, filters=8, pooling="max", **options)


def one_by_one(learner, episode, batch_statistics, count: int | None = None) -> torch.Tensor:
    return torch.cat(
        [
            predict_unlabeled(learner, episode.support, image.unsqueeze(0), batch_statistics)
            for image in episode.query.inputs[:count]
        ]
    )


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda each: each.__name__)
@pytest.mark.parametrize("running", [False, True], ids=["batch statistics", "running statistics"])
def test_one_query_per_call_gives_what_all_together_give(tasks, algorithm, running):
    options = {"eval_inner_steps": 10} if algorithm is Reptile else {}
    learner = algorithm(model_for(tasks, running_statistics=running), **options).train()
    before = {name: tensor.clone() for name, tensor in learner.state_dict().items()}
    episode, state = sample(tasks, 0), torch.get_rng_state()
    together = predict_unlabeled(learner, episode.support, episode.query.inputs)
    assert torch.equal(torch.get_rng_state(), state)
    assert together.shape == (25, 5) and not together.requires_grad
    torch.testing.assert_close(
        one_by_one(learner, episode, "support", 3), together[:3], rtol=1e-3, atol=1e-4
    )
    transductive = predict_unlabeled(learner, episode.support, episode.query.inputs, "transductive")
    torch.manual_seed(0)
    with torch.no_grad():
        evaluated = learner.eval()(episode).predictions
    torch.testing.assert_close(transductive, evaluated)
    # Running statistics are those of no call; prototypes are always in the batch.
    assert torch.allclose(together, transductive, rtol=1e-3, atol=1e-4) == running
    assert all(torch.equal(each, before[n]) for n, each in learner.state_dict().items())


def test_the_statistics_are_those_of_the_adapted_network_on_the_support_set(tasks):
    model = model_for(tasks).double()
    episode = Episode(*(Examples(part.inputs.double(), part.targets) for part in sample(tasks, 1)))
    reference = model_for(tasks, running_statistics=True).double()
    for norm in (*model.norms, *reference.norms):
        norm.eps = 0.1
    learner = MAML(model, inner_lr=0.2, inner_steps=2)
    found = predict_unlabeled(learner, episode.support, episode.query.inputs)
    adapted = learner.adapt(learner.initial(), episode.support, 2)
    buffers = dict(reference.named_buffers())
    values: list[int] = []
    for norm in reference.norms:
        norm.momentum = None  # the running statistics are the mean over batches
        norm.register_forward_pre_hook(lambda _, given: values.append(given[0][:, 0].numel()))
    with torch.no_grad():
        functional_call(reference.train(), adapted | buffers, (episode.support.inputs,))
        for norm, count in zip(reference.norms, values, strict=True):
            norm.running_var *= (count - 1) / count  # without Bessel's correction
        expected = functional_call(reference.eval(), adapted, (episode.query.inputs,))
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_accuracy_on_glyphs_of_one_image_per_call():
    dataset = Glyphs(train_classes=40, validation_classes=5, test_classes=20, examples=6)
    tasks = FewShotTasks(dataset, ways=5, shots=1, queries=5)
    torch.manual_seed(0)
    learner = MAML(Conv4(tasks.input_shape, 5, filters=16), inner_lr=0.4, eval_inner_steps=3)
    optimizer = torch.optim.Adam(learner.parameters(), 0.005)
    for iteration in range(30):
        optimizer.zero_grad()
        for key in task_keys(0, "train", iteration, range(4)):
            learner.train()(tasks.sample(key)).loss.backward()
        optimizer.step()
    correct = dict.fromkeys(["together", "one", "transductive", "transductive one"], 0.0)
    for index in range(5):
        episode = sample(tasks, index)
        support, queries = episode.support, episode.query.inputs
        found = {
            "together": predict_unlabeled(learner, support, queries),
            "one": one_by_one(learner, episode, "support"),
            "transductive": predict_unlabeled(learner, support, queries, "transductive"),
            "transductive one": one_by_one(learner, episode, "transductive"),
        }
        for name, predictions in found.items():
            right = (predictions.argmax(1) == episode.query.targets).double().mean().item()
            correct[name] += right / 5
    assert correct["one"] == correct["together"] > 0.4
    assert abs(correct["together"] - correct["transductive"]) < 0.1
    assert correct["transductive one"] < 0.3 < correct["transductive"]


def test_queries_are_one_batch_also_of_a_learner_that_is_evaluated_one_by_one(tasks):
    episode = sample(tasks, 0)
    found = [
        predict_unlabeled(
            MAML(model_for(tasks), inner_steps=1, transductive=transductive),
            *(episode.support, episode.query.inputs, statistics),
        )
        for statistics in ("support", "transductive")
        for transductive in (True, False)
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found[3], found[2], rtol=1e-3, atol=1e-4)


class OneNorm(nn.Sequential):
    """Uses one batch norm twice."""

    def __init__(self) -> None:
        norm = nn.BatchNorm1d(8, track_running_stats=False)
        first, second = nn.Linear(784, 8), nn.Linear(8, 8)
        super().__init__(nn.Flatten(), first, norm, nn.ReLU(), second, norm, nn.Linear(8, 5))


def test_a_norm_that_is_used_twice_is_replaced_twice(tasks):
    torch.manual_seed(0)
    learner, episode = MAML(OneNorm(), inner_lr=0.1), sample(tasks, 0)
    together = predict_unlabeled(learner, episode.support, episode.query.inputs)
    alone = one_by_one(learner, episode, "support", 3)
    torch.testing.assert_close(alone, together[:3], rtol=1e-4, atol=1e-5)


def test_a_regression(tasks):
    curves = FewShotTasks(Sinusoid(), shots=5, queries=4)
    learner = MAML(MLP((1,), 1, [8]), regression=True, inner_lr=0.01, inner_steps=2)
    episode = curves.sample(task_keys(0, "test", 0, range(1))[0])
    together = predict_unlabeled(learner, episode.support, episode.query.inputs)
    assert together.shape == (4, 1)
    torch.testing.assert_close(one_by_one(learner, episode, "support"), together)


def test_inference_mode_changes_nothing(tasks):
    episode, learner = sample(tasks, 0), MAML(model_for(tasks))
    expected = predict_unlabeled(learner, episode.support, episode.query.inputs)
    with torch.inference_mode():
        support = Examples(*(tensor.clone() for tensor in episode.support))
        found = predict_unlabeled(learner, support, episode.query.inputs.clone())
    assert torch.equal(found, expected)


def test_random_numbers_are_the_same_in_each_call_and_none_of_the_callers(tasks):
    class Draws(Plain):
        def forward(self, episode):
            drawn = torch.tensor([torch.rand(()), np.random.rand(), random.random()])
            return super().forward(episode)._replace(predictions=drawn)

    episode, learner = sample(tasks, 0), Draws(model_for(tasks))
    expected = [], []
    for numbers in expected:
        torch.manual_seed(3), np.random.seed(3), random.seed(3)
        if numbers is expected[1]:
            first, second = (
                predict_unlabeled(learner, episode.support, episode.query.inputs, "transductive")
                for _ in range(2)
            )
            assert torch.equal(first, second)
        numbers += [torch.rand(()).item(), np.random.rand(), random.random()]
    assert expected[0] == expected[1]


def test_unknown_batch_statistics_are_no_transductive_ones(tasks):
    episode, learner = sample(tasks, 0), MAML(model_for(tasks))
    with pytest.raises(UserError, match=r"batch_statistics='query' is unknown: choose \"support\""):
        predict_unlabeled(learner, episode.support, episode.query.inputs, "query")


def test_a_learner_without_predictions_is_refused(tasks):
    class Silent(Plain):
        def forward(self, episode):
            return super().forward(episode)._replace(predictions=None)

    episode = sample(tasks, 0)
    with pytest.raises(UserError, match=r"Silent\.forward returned no predictions"):
        predict_unlabeled(Silent(model_for(tasks)), episode.support, episode.query.inputs)
