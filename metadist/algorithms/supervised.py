"""The supervised baseline: train a classifier, transfer its features to few-shot tasks."""

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor, nn

from metadist.algorithms.functional import call_with
from metadist.algorithms.learner import Learner, TaskResult, require_features, tied_parameters
from metadist.errors import UserError
from metadist.tasks import Episode


class Supervised(Learner):
    """Supervised classification of all training classes; few-shot tasks in evaluation.

    After Chen et al. 2019 (arXiv 1904.04232), whose linear layer is trained differently, and the
    comparison of Snell et al., a few-shot task is evaluated by

    - evaluation="nearest_centroid": the class with the nearest mean support feature,
    - evaluation="linear_probe": a new linear layer trained on the frozen support features,
    - evaluation="fine_tune": the same, training the whole network. Batch norms with running
      statistics use them in its steps too, unlike those of meta-learned inner steps.

    Episodes without a support set are evaluated as ordinary classification.

    Args:
        model: a network with `features(inputs)` and a linear `head`.
        regression: must be False.
        evaluation: method for few-shot tasks.
        eval_inner_steps: gradient steps of the linear probe and of fine-tuning.
        inner_lr: learning rate of the linear probe and of fine-tuning.
        transductive: see `Learner`.

    Raises:
        UserError: a regression problem, or a model without features and head.
    """

    outputs_are_classes = False
    model: Any  # with `features` and `head`, see `require_features`

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        evaluation: Literal["nearest_centroid", "linear_probe", "fine_tune"] = "linear_probe",
        eval_inner_steps: Annotated[int, Ge(1)] = 50,
        inner_lr: Annotated[float, Gt(0)] = 0.1,
        transductive: bool = True,
    ) -> None:
        super().__init__(model, regression, transductive)
        if regression:
            raise UserError("algorithm=supervised classifies: choose a dataset with classes.")
        require_features(model, "supervised")
        self.evaluation = evaluation
        self.eval_inner_steps = eval_inner_steps
        self.inner_lr = inner_lr

    def forward(self, episode: Episode) -> TaskResult:
        """Classify `episode.query`, after adapting to `episode.support` unless it is empty.

        Raises:
            UserError: in training, the support set is not empty.
        """
        if len(episode.support.targets):
            if self.training:
                raise UserError(
                    "algorithm=supervised trains on batches of all training classes, not on "
                    "few-shot tasks: start experiments/ddp.py, or add task=supervised."
                )
            return self._few_shot(episode)
        predictions = self.model(episode.query.inputs)
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets), predictions)

    def _few_shot(self, episode: Episode) -> TaskResult:
        adapt = {
            "nearest_centroid": self._nearest_centroid,
            "linear_probe": self._linear_probe,
            "fine_tune": self._fine_tune,
        }[self.evaluation]
        predictions = adapt(episode).detach()
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets), predictions)

    @torch.no_grad()
    def _nearest_centroid(self, episode: Episode) -> Tensor:
        features = self._features(episode.support.inputs)
        targets = episode.support.targets
        centroids = torch.stack(
            [features[targets == label].mean(0) for label in range(int(targets.max()) + 1)]
        )
        queries = self.predict_queries(self._features, episode)
        # Not by products, which are inexact for features with a large mean.
        distances = torch.cdist(queries, centroids, compute_mode="donot_use_mm_for_euclid_dist")
        return -distances.square()

    def _features(self, inputs: Tensor) -> Tensor:
        """The features in float32 at least, since differences of bfloat16 numbers are inexact."""
        features = self.model.features(inputs)
        return features.to(torch.promote_types(features.dtype, torch.float32))

    def _linear_probe(self, episode: Episode) -> Tensor:
        with torch.no_grad():
            support = _normalize(self.model.features(episode.support.inputs))
            query = _normalize(self.predict_queries(self.model.features, episode))
        weight, bias = self._new_head(episode)
        for _ in range(self.eval_inner_steps):
            with torch.enable_grad():
                predictions = F.linear(support, weight, bias)
            weight, bias = self._step(predictions, episode.support.targets, [weight, bias])
        return F.linear(query, weight, bias)

    def _fine_tune(self, episode: Episode) -> Tensor:
        trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        # The features use parameters that the head shares.
        tied = {id(parameter) for parameter in tied_parameters(self.model, self.model.head)}
        replaced = {id(p) for p in self.model.head.parameters()} - tied
        names = [name for name, parameter in trainable.items() if id(parameter) not in replaced]
        body = [trainable[name].detach().requires_grad_() for name in names]
        weight, bias = self._new_head(episode)

        def predict(inputs: Tensor) -> Tensor:
            parameters = {f"model.{n}": p for n, p in zip(names, body, strict=True)}
            features = call_with(_Features(self.model), parameters, inputs)
            return F.linear(_normalize(features), weight, bias)

        for _ in range(self.eval_inner_steps):
            with torch.enable_grad():
                predictions = predict(episode.support.inputs)
            weight, bias, *body = self._step(
                predictions, episode.support.targets, [weight, bias, *body]
            )
        with torch.no_grad():
            return self.predict_queries(predict, episode)

    def _new_head(self, episode: Episode) -> tuple[Tensor, Tensor]:
        classes = int(episode.support.targets.max()) + 1
        head = self.model.head.weight
        weight = head.new_zeros(classes, head.shape[1]).requires_grad_()
        return weight, head.new_zeros(classes).requires_grad_()

    def _step(self, predictions: Tensor, targets: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            loss = self.loss(predictions, targets)
            grads = torch.autograd.grad(loss, tensors, allow_unused=True, materialize_grads=True)
        return [
            (tensor - self.inner_lr * grad).detach().requires_grad_()
            for tensor, grad in zip(tensors, grads, strict=True)
        ]

    def protocol(self) -> dict[str, Any]:
        """No inner steps in training; in evaluation, the steps of linear probe or fine-tuning."""
        steps = 0 if self.evaluation == "nearest_centroid" else self.eval_inner_steps
        return {"inner_steps": 0, "eval_inner_steps": steps}

    @property
    def algorithm_name(self) -> str:
        """See `Learner`."""
        return "supervised"


class _Features(nn.Module):
    """Wraps `model.features` as a forward for `call_with`."""

    model: Any  # with `features`

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model.features(inputs)


def _normalize(features: Tensor) -> Tensor:
    """Scale features to norm √d, so that one learning rate suits all networks."""
    return F.normalize(features, dim=1) * features.shape[1] ** 0.5
