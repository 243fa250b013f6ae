"""Ensembles: the mean of the predictions of several learners."""

import pytest
import torch

from metadist.algorithms import MAML, Ensemble, Prototypical, Reptile
from metadist.distributed.worker_local import WorkerLocal
from metadist.models import MLP, Conv4
from metadist.tasks import FewShotTasks, Glyphs, Sinusoid, task_keys
from metadist.training import EvaluateMapper, MetaBatch


def glyphs() -> FewShotTasks:
    sizes = {"train_classes": 6, "validation_classes": 5, "test_classes": 5, "examples": 6}
    return FewShotTasks(Glyphs(**sizes), 3, 1, 4)


def learners(algorithm, count: int, **options) -> list:
    made = []
    for seed in range(count):
        torch.manual_seed(seed)
        made.append(algorithm(Conv4((1, 28, 28), 3, filters=4), **options).eval())
    return made


@pytest.mark.parametrize("algorithm", [MAML, Prototypical])
def test_probabilities_are_averaged(algorithm):
    tasks, members = glyphs(), learners(algorithm, 3)
    episode = tasks.sample(task_keys(0, "test", 0, range(1))[0])
    probabilities = [learner(episode).predictions.softmax(-1) for learner in members]
    result = Ensemble(members).eval()(episode)
    mean = torch.stack(probabilities).mean(0)
    torch.testing.assert_close(result.predictions.exp(), mean)
    right = mean.argmax(-1) == episode.query.targets
    assert result.metrics["accuracy"] == right.float().mean()
    chosen = mean.gather(-1, episode.query.targets.unsqueeze(-1))
    torch.testing.assert_close(result.loss, -chosen.log().mean())


def test_values_are_averaged_in_regression():
    tasks = FewShotTasks(Sinusoid(), 1, 5, 5)
    members = [MAML(MLP((1,), 1, [8], batch_norm=False), True, 0.01).eval() for _ in range(2)]
    episode = tasks.sample(task_keys(0, "test", 0, range(1))[0])
    result = Ensemble(members).eval()(episode)
    mean = torch.stack([learner(episode).predictions for learner in members]).mean(0)
    torch.testing.assert_close(result.predictions, mean)
    torch.testing.assert_close(
        result.metrics["mse"], (mean - episode.query.targets).square().mean()
    )


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (MAML, {}),
        (Prototypical, {}),
        (Reptile, {"eval_inner_steps": 5, "eval_inner_batch_size": 2}),  # drawn at random
    ],
)
def test_batched_tasks_give_the_results_of_single_ones(algorithm, options):
    tasks = WorkerLocal(f"tasks of an ensemble of {algorithm.__name__}", glyphs())
    ensemble = Ensemble(learners(algorithm, 2, **options)).eval()
    assert ensemble.supports_batched_tasks
    batch = MetaBatch(task_keys(0, "test", 0, range(3)))
    mapper = EvaluateMapper(tasks, "cpu", 3)
    with torch.no_grad():
        single = torch.stack([result.loss for result in mapper.run_each(ensemble, batch)])
    torch.testing.assert_close(mapper(ensemble, batch)["loss"], single, rtol=1e-4, atol=1e-5)


def test_an_ensemble_is_not_trained():
    tasks, ensemble = glyphs(), Ensemble(learners(MAML, 2))
    assert ensemble.algorithm_name == "MAML" and ensemble.protocol()["ensemble"] == 2
    with pytest.raises(RuntimeError, match="cannot be trained"):
        ensemble.train()(tasks.sample(task_keys(0, "train", 1, range(1))[0]))


class AbsoluteError(MAML):
    """A learner with a loss and two metrics of its own, one of them by `metrics`."""

    def loss(self, predictions, targets):
        return (predictions - targets).abs().mean((-2, -1))

    def metrics(self, predictions, targets, suffix=""):
        bias = (predictions - targets).mean((-2, -1))
        return {**super().metrics(predictions, targets, suffix), f"bias{suffix}": bias}

    def forward(self, episode):
        result = super().forward(episode)
        return result._replace(metrics={**result.metrics, "norm": self.model.norm()})


class Norm(MLP):
    def norm(self):
        return sum(parameter.norm() for parameter in self.parameters())


def test_loss_and_metrics_are_those_of_the_learners():
    tasks = FewShotTasks(Sinusoid(), 1, 5, 5)
    made = [AbsoluteError(Norm((1,), 1, [8], batch_norm=False), True, 0.01) for _ in range(2)]
    first, second = (learner.eval() for learner in made)
    episode = tasks.sample(task_keys(0, "test", 0, range(1))[0])
    alone, twice = first(episode), Ensemble([first, first]).eval()(episode)
    torch.testing.assert_close(twice.loss, alone.loss)
    for name in ("mse", "bias", "norm"):
        torch.testing.assert_close(twice.metrics[name], alone.metrics[name].detach())
    both = Ensemble([first, second]).eval()(episode)
    mean = (first.model.norm() + second.model.norm()) / 2
    torch.testing.assert_close(both.metrics["norm"], mean.detach())


@pytest.mark.parametrize("transductive", [True, False])
def test_an_ensemble_is_as_transductive_as_its_learners(transductive):
    learner = MAML(Conv4((1, 16, 16), 3, filters=4), transductive=transductive)
    assert Ensemble([learner, learner]).transductive is transductive


def test_an_ensemble_of_one_has_the_metrics_of_its_learner():
    (member,) = learners(MAML, 1)
    episode = glyphs().sample(task_keys(0, "test", 0, range(1))[0])
    expected = member(episode).metrics["accuracy"]
    member.evaluate_each_step = True
    assert Ensemble([member]).eval()(episode).metrics == {"accuracy": expected}
