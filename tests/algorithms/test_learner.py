"""What all algorithms share: losses, metrics, batch norm, and predictions of queries."""

import copy
import inspect

import numpy as np
import pytest
import torch
from problems import images
from torch import nn

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
)
from metadist.algorithms.inner_loop import (
    detach_parameters,
    flatten_tensors,
    unflatten_tensors,
)
from metadist.algorithms.learner import (
    predict_queries_separately,
    require_features,
)
from metadist.errors import UserError
from metadist.models import MLP, Conv4
from metadist.tasks import Episode, Examples, select_episodes
from metadist.training.batching import forward_batched


def random(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("tasks", [(), (3,)])
def test_cross_entropy_and_accuracy_against_numpy(tasks):
    logits = random(*tasks, 6, 4)
    targets = (torch.arange(logits[..., 0].numel()) % 4).view(*tasks, 6)
    learner = Learner(nn.Identity())
    rows, classes = logits.numpy().reshape(-1, 4), targets.numpy().ravel()
    shifted = rows - np.log(np.exp(rows).sum(1, keepdims=True))
    losses = -shifted[np.arange(len(rows)), classes].reshape(*tasks, 6).mean(-1)
    right = (rows.argmax(1) == classes).reshape(*tasks, 6).mean(-1)
    np.testing.assert_allclose(learner.loss(logits, targets).numpy(), losses, rtol=1e-12)
    (name, accuracy), *more = learner.metrics(logits, targets, "_before").items()
    assert name == "accuracy_before" and not more
    np.testing.assert_allclose(accuracy.numpy(), right, rtol=1e-12)


def test_no_target_is_left_out_of_the_loss():
    for target in (-100, -1, 4):
        with pytest.raises(IndexError, match=f"Target {target} is out of bounds"):
            Learner(nn.Identity()).loss(torch.zeros(2, 4), torch.tensor([0, target]))


@pytest.mark.parametrize("tasks", [(), (3,)])
def test_squared_error_against_numpy(tasks):
    predictions, targets = random(*tasks, 6, 2).requires_grad_(), random(*tasks, 6, 2) + 1
    learner = Learner(nn.Identity(), regression=True)
    expected = ((predictions.detach().numpy() - targets.numpy()) ** 2).mean((-2, -1))
    np.testing.assert_allclose(learner.loss(predictions, targets).detach(), expected, rtol=1e-12)
    metrics = learner.metrics(predictions, targets)
    assert list(metrics) == ["mse"] and not metrics["mse"].requires_grad
    np.testing.assert_allclose(metrics["mse"], expected, rtol=1e-12)


class AbsoluteError(Learner):
    def loss(self, predictions, targets):
        return (predictions - targets).abs().mean((-2, -1))


def test_the_mse_is_the_squared_error_whatever_the_loss():
    learner = AbsoluteError(nn.Identity(), regression=True)
    zeros, values = torch.zeros(2, 1), torch.tensor([[3.0], [1.0]])
    assert learner.loss(zeros, values) == 2 and learner.metrics(zeros, values)["mse"] == 5
    with pytest.raises(UserError, match="has its own loss and metrics"):
        learner.metrics(torch.zeros(2, 2), values)


class FrozenNorm(nn.Module):
    """A model whose norm stays in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def train(self, mode: bool = True):
        super().train(mode)
        self.norm.eval()
        return self


def test_training_mode_is_set_by_the_modules_own_methods():
    learner = Learner(nn.Sequential(FrozenNorm(), nn.Dropout()))
    assert learner.train() is learner
    modes = [(module.training, type(module).__name__) for module in learner.model.modules()][1:]
    assert modes == [(True, "FrozenNorm"), (False, "BatchNorm1d"), (True, "Dropout")]
    learner.model[1].eval()
    assert learner.train().model[1].training
    assert not any(module.training for module in learner.eval().modules())


def test_queries_that_are_predicted_separately_do_not_see_each_other():
    def centred(inputs):
        return inputs - inputs.mean(0)

    support, queries = random(4, 2), random(3, 2)
    found = predict_queries_separately(centred, support, queries)
    for query, prediction in zip(queries, found, strict=True):
        mean = (support.sum(0) + query) / 5
        torch.testing.assert_close(prediction, query - mean)


@pytest.mark.parametrize(
    ("transductive", "training", "separately"),
    [(True, True, False), (True, False, False), (False, True, False), (False, False, True)],
)
def test_when_queries_are_predicted_separately(transductive, training, separately):
    sizes = []

    def predict(inputs):
        sizes.append(len(inputs))
        return inputs

    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    learner = Learner(model, transductive=transductive).train(training)
    task = images(ways=2, shots=1, queries=2)
    learner.predict_queries(predict, task)
    assert sizes == ([3] * 4 if separately else [4])
    sizes.clear()
    found = learner.predict_queries(predict, task, jointly=True)
    assert sizes == ([3] * 4 if separately else [6])
    assert torch.equal(found, task.query.inputs)
    without_norm = Learner(nn.Linear(2, 2), transductive=False).eval()
    sizes.clear()
    without_norm.predict_queries(predict, task)
    assert sizes == [4]


def test_when_tasks_can_be_batched():
    small = Conv4((1, 16, 16), 3, filters=2)
    learner = MAML(small, transductive=False)
    assert learner.train().supports_batched_tasks and not learner.eval().supports_batched_tasks
    assert MAML(small).eval().supports_batched_tasks
    assert not Learner(small).supports_batched_tasks
    assert not MAML(nn.Linear(2, 2)).supports_batched_tasks


class OverAllImages(Conv4):
    """Features that depend on all images: with a dimension of tasks, on all tasks."""

    def features(self, images):
        features = super().features(images)
        return features - features.mean(0)


class OverImagesOfATask(OverAllImages):
    supports_batched_tasks = True

    def features(self, images):
        features = Conv4.features(self, images)
        return features - features.mean(-2, keepdim=True)


class OtherName(Conv4):
    def describe(self):
        return "a method that no base class has"


def test_a_model_that_overrides_methods_says_anew_whether_tasks_can_be_batched():
    size = ((1, 16, 16), 3)
    assert not MAML(OverAllImages(*size, filters=2)).supports_batched_tasks
    assert MAML(OverImagesOfATask(*size, filters=2)).supports_batched_tasks
    assert MAML(OtherName(*size, filters=2)).supports_batched_tasks


def test_models_without_features_are_refused():
    require_features(Conv4((1, 16, 16), 3, filters=2), "anil")
    require_features(MLP((2,), 3), "anil")
    with pytest.raises(UserError, match=r"algorithm=anil needs .* Linear lacks"):
        require_features(nn.Linear(2, 2), "anil")


class Scaled(nn.Module):
    """A network with an integer parameter, a scalar one, and one of another type."""

    supports_batched_tasks = True

    def __init__(self) -> None:
        super().__init__()
        self.order = nn.Parameter(torch.tensor([1, 0]), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.shift = nn.Parameter(torch.ones(2, dtype=torch.float64))

    def forward(self, inputs):
        scale, shift = self.scale[..., None, None], self.shift.unsqueeze(-2)
        return (inputs * scale + shift).float().flip(-1)


@pytest.mark.parametrize("kind", [MAML, MetaSGD, MAMLPlusPlus, IMAML, Reptile])
def test_scalars_and_mixed_types_are_adapted_as_one_by_one(kind):
    inputs, targets = torch.randn(2, 3, 4, 2), torch.randint(2, (2, 3, 4))
    episodes = Episode(*map(Examples, inputs, targets))
    options = {"inner_optimizer": "sgd", "inner_batch_size": None} if kind is Reptile else {}
    learner = kind(Scaled(), **options).train()
    learner.task_seeds = range(3)
    # Copies, since a training task of MAML++ changes the number of iterations.
    losses = [copy.deepcopy(learner)(select_episodes(episodes, i)).loss for i in range(3)]
    result, _ = forward_batched(learner, dict(learner.named_parameters()), episodes)
    torch.testing.assert_close(result.loss, torch.stack(losses))


def test_parameters_as_vectors_and_as_leaves():
    parameters = {"a": random(2, 3).requires_grad_(), "b": random(4).requires_grad_()}
    gradient = {"a": random(2, 3), "b": random(4)}
    vector = flatten_tensors(gradient.values())
    assert vector.tolist() == [*gradient["a"].flatten().tolist(), *gradient["b"].tolist()]
    again = unflatten_tensors(vector, parameters)
    assert list(again) == ["a", "b"] and all(torch.equal(again[n], gradient[n]) for n in again)
    copies = detach_parameters(parameters)
    assert all(
        copy.is_leaf and copy.requires_grad and copy.grad is None for copy in copies.values()
    )


@pytest.mark.parametrize(
    ("algorithm", "options", "name", "steps"),
    [
        (MAML, {}, "MAML", (2, 7)),
        (MAML, {"first_order": True}, "FOMAML", (2, 7)),
        (MAML, {"inner_steps": 0}, "pretrained on all tasks", (0, 7)),
        (MAML, {"eval_inner_steps": None}, "MAML", (2, 2)),
        (ANIL, {"first_order": True}, "ANIL", (2, 7)),
        (MetaSGD, {"first_order": True}, "Meta-SGD", (2, 7)),
        (MAMLPlusPlus, {}, "MAML++", (2, 7)),
        (IMAML, {}, "implicit MAML", (2, 7)),
        (Reptile, {}, "Reptile", (2, 7)),
        (Supervised, {"evaluation": "fine_tune"}, "supervised", (0, 7)),
        (Supervised, {"evaluation": "nearest_centroid"}, "supervised", (0, 0)),
        (Prototypical, {}, "prototypical networks", (0, 0)),
    ],
)
def test_name_and_inner_steps_in_the_results(algorithm, options, name, steps):
    known = inspect.signature(algorithm).parameters.keys()
    counts = {"inner_steps": 2, "eval_inner_steps": 7}
    given = {key: value for key, value in counts.items() if key in known}
    model = Conv4((1, 16, 16), 3, filters=2)
    learner = algorithm(model, transductive=False, **given | options)
    assert learner.algorithm_name == name
    assert learner.protocol() == dict(zip(counts, steps, strict=True))
    assert learner.transductive is False and not learner.eval().supports_batched_tasks


def test_a_subclass_has_its_own_name_unless_it_states_one():
    class Variant(MAML):
        pass

    class Stated(MAML):
        @property
        def algorithm_name(self):
            return f"{super().algorithm_name}, stated"

    class Derived(Stated):
        pass

    model = MLP((2,), 3)
    assert Variant(model).algorithm_name == "Variant" and Variant.batches_tasks
    assert Stated(model, first_order=True).algorithm_name == "FOMAML, stated"
    assert Derived(model).algorithm_name == "Derived"


class Smooth(MAML):
    """Written for one task: the classes are in the second dimension."""

    def loss(self, predictions, targets):
        return nn.functional.cross_entropy(predictions, targets, label_smoothing=0.1)


class SmoothForAll(Smooth):
    batches_tasks = True


class Named(Smooth, ANIL):
    algorithm_name = "named"


class Smoothing:
    def loss(self, predictions, targets):
        return nn.functional.cross_entropy(predictions, targets, label_smoothing=0.1)


class Mixed(Smoothing, MAML):
    pass


class Renamed(ANIL):
    algorithm_name = "renamed"

    def protocol(self):
        return {}


def test_a_subclass_that_overrides_methods_computes_one_task_at_a_time_unless_it_says_so():
    assert SmoothForAll.batches_tasks and Renamed.batches_tasks
    assert not any(each.batches_tasks for each in (Smooth, Named, Mixed, Learner))
    algorithms = (ANIL, IMAML, MAML, MAMLPlusPlus, MetaSGD, Prototypical, Reptile)
    assert all(each.batches_tasks for each in algorithms)


@pytest.mark.parametrize("algorithm", [ANIL, IMAML, MAML, MAMLPlusPlus, MetaSGD, Reptile])
def test_parameters_that_do_not_require_grad_are_not_adapted(algorithm):
    torch.manual_seed(0)
    model = MLP((1, 16, 16), 3, hidden=[5]).double()
    frozen = next(iter(model.parameters())).requires_grad_(False)
    learner, episode = algorithm(model), images()
    start = learner.initial()
    assert start and all(each is not frozen for each in start.values())
    learner.train()(episode).loss.backward()
    assert frozen.grad is None and any(each.grad is not None for each in model.parameters())


def unfrozen_later(algorithm, **options) -> tuple[Learner, nn.Module]:
    """A learner whose first layer was frozen when it was made, and that layer."""
    torch.manual_seed(0)
    layer = nn.Linear(256, 5)
    layer.requires_grad_(False)
    model = nn.Sequential(nn.Flatten(), layer, nn.Tanh(), nn.Linear(5, 3)).double()
    learner = algorithm(model, inner_steps=2, **options).train()
    layer.requires_grad_(True)
    return learner, layer


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [(MAML, {}), (MAMLPlusPlus, {}), (IMAML, {}), (Reptile, {"inner_optimizer": "sgd"})],
)
def test_a_layer_may_be_unfrozen_later(algorithm, options):
    learner, layer = unfrozen_later(algorithm, **options)
    learner(images()).loss.backward()
    assert layer.weight.grad.norm() > 1e-3


def test_an_inner_adam_has_no_moments_of_a_layer_that_was_frozen():
    learner, _ = unfrozen_later(Reptile)
    with pytest.raises(UserError, match=r"1\.weight was frozen when Reptile was made"):
        learner(images())
    assert learner.eval()(images()).predictions.shape == (6, 3)


@pytest.mark.parametrize("first_order", [True, False])
def test_frozen_parameters_of_heads_and_norms_stay_frozen(first_order):
    model = Conv4((1, 16, 16), 3, filters=2, running_statistics=True).double()
    model.head.bias.requires_grad_(False)
    anil = ANIL(model, first_order=first_order)
    assert list(anil.initial()) == ["weight"]
    anil.train()(images()).loss.backward()
    model.norms.requires_grad_(False)
    supervised = Supervised(model, evaluation="fine_tune", eval_inner_steps=2).eval()
    with torch.no_grad():
        assert supervised(images()).predictions.shape == (6, 3)
    MAMLPlusPlus(model)
    assert not any(each.requires_grad for each in model.norms.parameters())


def test_a_model_may_have_a_parameter_that_it_does_not_use():
    model = MLP((1, 16, 16), 3, hidden=[5]).double()
    model.unused = nn.Linear(2, 2).double()
    for algorithm in (MAML, IMAML):
        model.zero_grad()
        algorithm(model, inner_steps=2).train()(images()).loss.backward()
        assert model.head.weight.grad is not None
    tuned = Supervised(model, evaluation="fine_tune", eval_inner_steps=2).eval()
    assert tuned(images()).predictions.shape == (6, 3)


def test_a_model_without_parameters_that_require_grad_is_refused():
    with pytest.raises(UserError, match="parameters that require grad"):
        MAML(MLP((4,), 3, hidden=[5]).requires_grad_(False))


class LearnedRate(MAML):
    """Its rate would have a dimension of tasks in batches, for which it is not written."""

    def __init__(self, model, regression=False):
        super().__init__(model, regression)
        self.inner_lr = nn.Parameter(torch.tensor(0.1))


def test_a_subclass_with_parameters_of_its_own_computes_one_task_at_a_time():
    model = Conv4((1, 28, 28), 5, filters=8)
    assert MAML(model).train().supports_batched_tasks
    assert not LearnedRate(model).train().supports_batched_tasks


def test_targets_of_another_shape_are_refused():
    learner = MAML(MLP((1,), 1), regression=True)
    with pytest.raises(
        UserError, match=r"values of shape \(3, 1\), and the targets have the shape"
    ):
        learner.loss(torch.zeros(3, 1), torch.zeros(3))


@pytest.mark.parametrize(
    "algorithm", [MAML, ANIL, IMAML, MetaSGD, MAMLPlusPlus, Prototypical, Reptile]
)
def test_the_algorithms_batch_tasks(algorithm):
    assert algorithm(Conv4((1, 28, 28), 5, filters=4)).supports_batched_tasks


def test_a_model_without_features_is_told_to_define_them():
    with pytest.raises(UserError, match="or define both in your own model"):
        require_features(nn.Linear(2, 2), "anil")
