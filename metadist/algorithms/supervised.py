"""The supervised baseline: classify the training classes, reuse the features for new ones."""

from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.func import functional_call

from metadist.algorithms.embedding import require_embedding
from metadist.algorithms.learner import Learner, TaskResult
from metadist.errors import UserError


class Supervised(Learner):
    """Ordinary training; in evaluation, few-shot tasks through the trained features.

    In the manner of Chen et al. 2019 (arXiv 1904.04232) and of Snell et al.'s comparison: the
    network learns all training classes at once, and a new task is solved by

    - evaluation="nearest_centroid": the class whose mean support feature is nearest,
    - evaluation="linear_probe": a new linear layer, trained on the frozen support features,
    - evaluation="fine_tune": the same, with the whole network trained along.

    Episodes without a support set are judged as ordinary classification.

    Args:
        model: has `features(inputs)` and a linear `head`.
        regression: not for this algorithm.
        evaluation: how few-shot tasks are solved.
        eval_inner_steps: gradient steps of the probe or of fine-tuning.
        inner_lr: their step size.
        transductive: see `Learner`.

    Raises:
        UserError: a regression problem, or a model without features and head.
    """

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
        require_embedding(model, "supervised")
        self.evaluation = evaluation
        self.eval_inner_steps = eval_inner_steps
        self.inner_lr = inner_lr

    def forward(self, episode: Any) -> TaskResult:
        """Train on, or judge, `episode.query`; adapt to `episode.support` first if there is one."""
        if len(episode.support.targets):
            if self.training:
                raise UserError(
                    "algorithm=supervised trains on groups of all training classes, not on "
                    "few-shot tasks: start experiments/ddp.py, or add task=supervised."
                )
            return self._few_shot(episode)
        predictions = self.model(episode.query.inputs)
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets), predictions)

    def _few_shot(self, episode: Any) -> TaskResult:
        adapt = {
            "nearest_centroid": self._nearest_centroid,
            "linear_probe": self._linear_probe,
            "fine_tune": self._fine_tune,
        }[self.evaluation]
        predictions = adapt(episode).detach()
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets), predictions)

    @torch.no_grad()
    def _nearest_centroid(self, episode: Any) -> Tensor:
        features = self.model.features(episode.support.inputs)
        targets = episode.support.targets
        centroids = torch.stack(
            [features[targets == label].mean(0) for label in range(int(targets.max()) + 1)]
        )
        queries = self.predict_queries(self.model.features, episode)
        return -torch.cdist(queries, centroids).square()

    def _linear_probe(self, episode: Any) -> Tensor:
        with torch.no_grad():
            support = _unit(self.model.features(episode.support.inputs))
            query = _unit(self.predict_queries(self.model.features, episode))
        weight, bias = self._new_head(episode)
        for _ in range(self.eval_inner_steps):
            with torch.enable_grad():
                predictions = F.linear(support, weight, bias)
            weight, bias = self._step(predictions, episode.support.targets, [weight, bias])
        return F.linear(query, weight, bias)

    def _fine_tune(self, episode: Any) -> Tensor:
        names = [name for name, _ in self.model.named_parameters() if not name.startswith("head.")]
        known = dict(self.model.named_parameters())
        body = [known[name].detach().requires_grad_() for name in names]
        weight, bias = self._new_head(episode)

        def predict(inputs: Tensor) -> Tensor:
            parameters = {f"model.{n}": p for n, p in zip(names, body, strict=True)}
            features = functional_call(_Features(self.model), parameters, (inputs,))
            return F.linear(_unit(features), weight, bias)

        for _ in range(self.eval_inner_steps):
            with torch.enable_grad():
                predictions = predict(episode.support.inputs)
            weight, bias, *body = self._step(
                predictions, episode.support.targets, [weight, bias, *body]
            )
        with torch.no_grad():
            return self.predict_queries(predict, episode)

    def _new_head(self, episode: Any) -> tuple[Tensor, Tensor]:
        classes = int(episode.support.targets.max()) + 1
        like = self.model.head.weight
        weight = like.new_zeros(classes, like.shape[1]).requires_grad_()
        return weight, like.new_zeros(classes).requires_grad_()

    def _step(self, predictions: Tensor, targets: Tensor, tensors: list[Tensor]) -> list[Tensor]:
        with torch.enable_grad():
            loss = self.loss(predictions, targets)
            steps = torch.autograd.grad(loss, tensors)
        return [
            (tensor - self.inner_lr * step).detach().requires_grad_()
            for tensor, step in zip(tensors, steps, strict=True)
        ]

    def protocol(self) -> dict[str, Any]:
        """No inner steps in training; in evaluation those of a probe or of fine-tuning."""
        by_centroid = self.evaluation == "nearest_centroid"
        return {"inner_steps": 0, "eval_inner_steps": 0 if by_centroid else self.eval_inner_steps}

    def method(self) -> dict[str, Any]:
        """How few-shot tasks are solved."""
        return {
            "algorithm": "supervised",
            "evaluation": self.evaluation,
            "inner_lr": self.inner_lr,
        }


class _Features(nn.Module):
    """A model's features as a module's forward, so that parameters can be swapped in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model.features(inputs)


def _unit(features: Tensor) -> Tensor:
    """Features of length √d, so that one step size suits every network."""
    return F.normalize(features, dim=1) * features.shape[1] ** 0.5
