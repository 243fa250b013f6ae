"""Inner loops that adapt some of the parameters."""

import pytest
import torch
import torch.nn.functional as F
from problems import Scale, assert_equal_gradients, gradients, images
from torch import nn
from torch.func import functional_call

from metadist.algorithms import ANIL, MAML, MetaSGD, Prototypical
from metadist.algorithms.inner_loop import adapted_names
from metadist.errors import UserError
from metadist.models import MLP, Conv4
from metadist.tasks import stack_episodes
from metadist.training.batching import forward_batched

ADAPTED = {
    "all": lambda name: True,
    "no_norm": lambda name: not name.startswith("norms."),
    "head": lambda name: name in ("head.weight", "head.bias"),
    "body": lambda name: name not in ("head.weight", "head.bias"),
}
RATE, STEPS = 0.3, 2


def conv4() -> Conv4:
    torch.manual_seed(0)
    return Conv4((1, 16, 16), 3, filters=4).double()


def reference(model: nn.Module, task, adapted, first_order: bool) -> torch.Tensor:
    """The query loss after inner steps, with its gradient in `.grad`."""
    parameters = dict(model.named_parameters())
    names = [name for name in parameters if adapted(name)]
    for _ in range(STEPS):
        logits = functional_call(model, parameters, (task.support.inputs,))
        loss = F.cross_entropy(logits, task.support.targets)
        found = torch.autograd.grad(loss, [parameters[n] for n in names], create_graph=True)
        for name, each in zip(names, found, strict=True):
            parameters[name] = parameters[name] - RATE * (each.detach() if first_order else each)
    loss = F.cross_entropy(functional_call(model, parameters, (task.query.inputs,)), task.query[1])
    loss.backward()
    return loss


@pytest.mark.parametrize("adapt", ADAPTED)
@pytest.mark.parametrize("algorithm", ["maml", "fomaml", "meta_sgd"])
def test_loss_and_meta_gradient_against_a_reference(adapt, algorithm):
    task, model = images(), conv4()
    first_order = algorithm == "fomaml"
    expected = reference(model, task, ADAPTED[adapt], first_order)
    wanted = {f"model.{name}": each.clone() for name, each in gradients(model).items()}
    model.zero_grad()
    cls = MetaSGD if algorithm == "meta_sgd" else MAML
    learner = cls(
        model, inner_lr=RATE, inner_steps=STEPS, first_order=first_order, adapt=adapt
    ).train()
    result = learner(task)
    result.loss.backward()
    torch.testing.assert_close(result.loss, expected, rtol=1e-12, atol=0)
    found = {name: each for name, each in gradients(learner).items() if name in wanted}
    assert_equal_gradients(found, wanted)
    if algorithm == "meta_sgd":
        names = [name for name, _ in model.named_parameters() if ADAPTED[adapt](name)]
        assert len(learner.rates) == len(names)
        assert all(rate.grad.abs().max() > 0 for rate in learner.rates)


@pytest.mark.parametrize("adapt", ["no_norm", "head", "body"])
def test_evaluation_and_batched_tasks(adapt):
    learner = MAML(conv4(), inner_lr=RATE, inner_steps=STEPS, adapt=adapt).train()
    tasks = [images(seed=seed) for seed in range(3)]
    start = dict(learner.named_parameters())
    result, parameters = forward_batched(learner, start, stack_episodes(tasks))
    found = torch.autograd.grad(result.loss.sum(), list(parameters.values()))
    for index, task in enumerate(tasks):
        alone = learner(task)
        expected = torch.autograd.grad(alone.loss, list(learner.parameters()))
        torch.testing.assert_close(result.loss[index], alone.loss)
        for each, other in zip(found, expected, strict=True):
            torch.testing.assert_close(each[index], other)
        evaluated = learner.eval()(task)
        torch.testing.assert_close(evaluated.loss, alone.loss.detach())
        learner.train()


def test_adapting_the_head_is_anil():
    task = images()
    results = []
    for learner in (MAML(conv4(), adapt="head", inner_lr=RATE), ANIL(conv4(), inner_lr=RATE)):
        learner.inner_steps = learner.eval_inner_steps = STEPS
        result = learner.train()(task)
        result.loss.backward()
        evaluated = learner.eval()(task)
        results.append((result.loss.detach(), evaluated.predictions, evaluated.metrics))
        results.append(gradients(learner))
    torch.testing.assert_close(results[0], results[2], rtol=1e-10, atol=1e-12)
    assert_equal_gradients(results[1], results[3])


class Tied(MLP):
    """A network whose head has the weight of its only layer."""

    def __init__(self) -> None:
        super().__init__((4,), 4, [4], batch_norm=False)
        self.head.weight = next(self.layers.parameters())


@pytest.mark.parametrize("adapt", ["head", "body"])
def test_a_head_that_is_tied_to_the_features_is_refused(adapt):
    with pytest.raises(UserError, match=rf"algorithm\.adapt={adapt} needs a head with .* of Tied"):
        MAML(Tied(), adapt=adapt)
    MAML(Tied(), adapt="all")


def test_prototypical_networks_train_a_weight_that_head_and_features_share():
    model = Tied()
    Prototypical(model)
    assert model.head.weight.requires_grad and not model.head.bias.requires_grad


def test_a_model_that_does_not_fit_is_refused():
    with pytest.raises(UserError, match=r"algorithm\.adapt=body needs a model whose last layer is"):
        MAML(Scale(1.0), adapt="body")
    with pytest.raises(UserError, match=r"algorithm\.adapt=body leaves no parameter of MLP"):
        MAML(MLP((4,), 3, []), adapt="body")


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(2), nn.GroupNorm(1, 2), nn.LayerNorm(2), nn.RMSNorm(2)]
)
def test_parameters_are_told_apart_by_their_layers(norm):
    model = nn.ModuleDict({"header": nn.Linear(2, 2), "scale": norm, "head": nn.Linear(2, 2)})
    header, head = (["header.weight", "header.bias"], ["head.weight", "head.bias"])
    of_norm = [f"scale.{name}" for name, _ in norm.named_parameters()]
    assert adapted_names(model, "all") == header + of_norm + head
    assert adapted_names(model, "no_norm") == header + head
    assert adapted_names(model, "head") == head
    assert adapted_names(model, "body") == header + of_norm


class HeadUnderTwoNames(nn.Module):
    """A model whose last layer is in a sequence, too."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
        self.head = self.net[2]


def test_the_head_is_found_under_another_name():
    model = HeadUnderTwoNames()
    assert adapted_names(model, "body") == ["net.0.weight", "net.0.bias"]
    assert adapted_names(model, "head") == ["net.2.weight", "net.2.bias"]


def test_an_unknown_choice_is_refused():
    with pytest.raises(UserError, match="adapt=heads is unknown: choose all, no_norm, head, body"):
        MAML(MLP((4,), 2), adapt="heads")
