"""Predictions for unlabeled inputs, after adaptation to a support set."""

import copy
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metadist.algorithms import Learner
from metadist.errors import UserError
from metadist.tasks import Episode, Examples, random_state


@torch.no_grad()
def predict_unlabeled(
    learner: Learner,
    support: Examples,
    inputs: Tensor,
    batch_statistics: Literal["support", "transductive"] = "support",
) -> Tensor:
    """Adapt to a support set and predict unlabeled inputs, in evaluation mode. Any process.

    Batch norm without running statistics normalizes by the statistics of a batch. In few-shot
    evaluation that batch holds the queries of a task (transductive): a prediction depends on the
    other queries, and that of a single image is no better than chance.

    Each call adapts anew, with the same random numbers (of Reptile's minibatches, for example).
    Mode and parameters of the learner stay as they are.

    Args:
        learner: any whose `forward` returns predictions in evaluation.
        support: the labeled examples, on the learner's device.
        inputs: (queries, *input shape), any number of queries.
        batch_statistics: "support": each batch norm uses mean and variance of the support set, so
            that the prediction of a query does not depend on the others, up to rounding.
            "transductive": it uses those of all queries of this call, as MAML's evaluation. A
            model's running statistics, if it has them, are used in both cases.

    Returns:
        Logits or values, shape (queries, outputs), detached.

    Raises:
        UserError: the learner returned no predictions.
    """
    tensors = [*learner.parameters(), *learner.buffers()]
    # Shares the tensors and copies the modules, so that norms can be replaced.
    clone = copy.deepcopy(learner, {id(tensor): tensor for tensor in tensors}).eval()
    clone.evaluate_each_step = False
    clone.transductive = True
    first = 0
    if batch_statistics == "support":
        first = len(support.inputs)
        # In front of the queries: then every batch that the model is given begins with support
        # examples, whatever the learner does with the queries.
        inputs = torch.cat([support.inputs, inputs])
        _use_statistics_of_first(clone, first)
    targets = support.targets.new_zeros(len(inputs), *support.targets.shape[1:])
    episode = Episode(support, Examples(inputs, targets))
    with random_state(0, inputs.device):
        predictions = clone(episode).predictions
    if predictions is None:
        raise UserError(
            f"{type(learner).__name__}.forward returned no predictions in evaluation: return "
            "TaskResult(loss, metrics, predictions)."
        )
    return predictions[first:].detach()


def _use_statistics_of_first(module: nn.Module, count: int) -> None:
    """Replace, in place, each batch norm without running statistics."""
    for name, norm in list(module.named_modules()):
        if isinstance(norm, _BatchNorm) and not norm.track_running_stats:
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, _FirstExamplesNorm(norm, count))


class _FirstExamplesNorm(nn.Module):
    """Batch norm by mean and variance of the first examples of a batch.

    Args:
        norm: whose weight and bias it shares.
        count: number of first examples; batches up to this size are normalized as by `norm`.
    """

    def __init__(self, norm: _BatchNorm, count: int) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.eps, self.count = norm.eps, count

    def forward(self, inputs: Tensor) -> Tensor:
        """(n, channels, *size) -> the same shape."""
        if len(inputs) <= self.count:
            return F.batch_norm(
                inputs, None, None, self.weight, self.bias, training=True, eps=self.eps
            )
        dimensions = [0, *range(2, inputs.dim())]
        variance, mean = torch.var_mean(inputs[: self.count], dimensions, correction=0)
        return F.batch_norm(inputs, mean, variance, self.weight, self.bias, eps=self.eps)
