"""Evaluation of several trained learners whose predictions are averaged."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from metadist.algorithms.learner import Learner, TaskResult
from metadist.errors import UserError
from metadist.metrics import is_user_metric
from metadist.tasks import Episode
from metadist.tasks.random_state import preserved_random_state


class Ensemble(Learner):
    """Averages the predictions of several trained learners. It cannot be trained.

    In classification, the probabilities are averaged; in regression, the predicted values. MAML++
    is tested with its five best checkpoints ("How to train your MAML", section 5); its authors'
    code averages logits. Loss and metrics are of the averaged predictions; metrics of the user that
    a learner's `metrics` does not return are averaged over the learners. There are no metrics of
    single inner steps.

    Args:
        learners: at least one learner, all of one algorithm and for the same tasks.
    """

    def __init__(self, learners: Sequence[Learner]) -> None:
        nn.Module.__init__(self)  # the learners have the models
        self.learners = nn.ModuleList(learners)
        self.regression = learners[0].regression
        self.transductive = learners[0].transductive
        self.needs_task_seeds = learners[0].needs_task_seeds
        self.outputs_are_classes = learners[0].outputs_are_classes

    @property
    def first(self) -> Learner:
        """The first learner, whose options are those of all."""
        learner: Any = self.learners[0]
        return learner

    @property
    def model(self) -> nn.Module:  # type: ignore[override]
        """The first learner's model."""
        return self.first.model

    @property
    def supports_batched_tasks(self) -> bool:
        """Whether the learners' `forward` supports batched tasks."""
        return self.first.supports_batched_tasks

    @property
    def algorithm_name(self) -> str:
        """The name of the learners' algorithm."""
        return self.first.algorithm_name

    def protocol(self) -> dict[str, Any]:
        """The learners' settings, and their number."""
        return {**self.first.protocol(), "ensemble": len(self.learners)}

    def forward(self, episode: Episode) -> TaskResult:
        """The result of the averaged predictions; see `Learner`.

        Raises:
            RuntimeError: in training mode.
            UserError: a learner returns no predictions.
        """
        if self.training:
            raise RuntimeError("an ensemble cannot be trained: train each learner, then evaluate.")
        results: list[TaskResult] = []
        for learner in cast(Iterable[Learner], self.learners):
            learner.task_seeds = self.task_seeds
            # All learners draw the same random numbers, as with `task_seeds`.
            with preserved_random_state(episode.query.inputs.device):
                result = learner(episode)
            if result.predictions is None:
                raise UserError(
                    f"{type(learner).__name__}.forward returns no predictions, which an ensemble "
                    "averages: return TaskResult(loss, metrics, predictions)."
                )
            results.append(result)
        mean, targets = self._mean_prediction(results), episode.query.targets
        metrics = self.first.metrics(mean, targets)
        for name in results[0].metrics:
            if is_user_metric(name) and name not in metrics:
                values = [torch.as_tensor(result.metrics[name]).double() for result in results]
                metrics[name] = _mean(values).to(mean)
        return TaskResult(self.first.loss(mean, targets), metrics, mean)

    def _mean_prediction(self, results: Sequence[TaskResult]) -> Tensor:
        """The mean of the values, or the logarithm of the mean of the probabilities."""
        predictions = [cast(Tensor, result.predictions) for result in results]
        if self.regression:
            return _mean(predictions)
        logs = [each.log_softmax(-1) for each in predictions]
        # Finite, so that a probability of zero in all learners is not NaN.
        largest = torch.stack(logs).amax(0).clamp(min=torch.finfo(logs[0].dtype).min)
        return largest + _mean([(each - largest).exp() for each in logs]).log()


def _mean(values: Sequence[Tensor]) -> Tensor:
    """The mean, added up in order: that of `torch.mean` depends on the number of tasks."""
    return sum(values[1:], values[0]) / len(values)
