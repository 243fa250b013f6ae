"""Predictions for unlabeled inputs, after adaptation to a support set."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metadist.algorithms import Learner
from metadist.distributed import module_clone
from metadist.errors import UserError
from metadist.tasks import Episode, Examples, random_state
from metadist.training.precision import tensor_float32


@torch.inference_mode(False)
@torch.no_grad()
def predict_unlabeled(
    learner: Learner,
    support: Examples,
    inputs: Tensor,
    batch_statistics: Literal["support", "transductive"] = "support",
) -> Tensor:
    """Adapt to a support set and predict unlabeled inputs, in evaluation mode.

    Batch norm without running statistics normalizes with the statistics of a batch. In few-shot
    evaluation that batch holds the queries of a task (transductive): a prediction depends on the
    other queries, and the prediction of a single image is no better than chance.

    Each call adapts again, with the same random numbers (for example for Reptile's minibatches).
    The learner's mode and parameters are not changed. It sets and restores the states of the global
    random generators, so that threads must not call it at the same time.

    Args:
        learner: a learner whose `forward` returns predictions in evaluation.
        support: the labeled examples, on the learner's device.
        inputs: the queries, shape (queries, *input shape), any number of them, of the type of the
            support set's inputs (float32 for metadist's models).
        batch_statistics: "support": each batch norm uses mean and variance of the support set, so
            that the prediction of a query does not depend on the other queries, up to rounding.
            "transductive": each batch norm uses mean and variance of all queries of this call, as
            in MAML's evaluation. A model's running statistics, if it has them, are used in both
            cases.

    Returns:
        Logits or values, shape (queries, outputs), detached.

    Raises:
        UserError: `batch_statistics` has another value, or the learner returned no predictions.
    """
    check_batch_statistics(batch_statistics)
    # A learner cannot differentiate tensors that the caller made in inference mode.
    support, inputs = Examples(*(tensor.clone() for tensor in support)), inputs.clone()
    # Shares the parameters and copies the modules, so that norms can be replaced.
    clone = module_clone(learner, by="reference", detach_buffers=True).eval()
    clone.evaluate_each_step = False
    clone.transductive = True
    first = 0
    if batch_statistics == "support":
        first = len(support.inputs)
        # Before the queries, so that every batch of the model begins with support examples,
        # whatever the learner does with the queries.
        inputs = torch.cat([support.inputs, inputs])
        _use_statistics_of_first(clone, first)
    targets = support.targets.new_zeros(len(inputs), *support.targets.shape[1:])
    episode = Episode(support, Examples(inputs, targets))
    with random_state(0, inputs.device), tensor_float32("float32", inputs.device):
        predictions = clone(episode).predictions
    if predictions is None:
        raise UserError(
            f"{type(learner).__name__}.forward returned no predictions in evaluation: return "
            "TaskResult(loss, metrics, predictions)."
        )
    return predictions[first:].detach()


def check_batch_statistics(value: str) -> None:
    """Check the name of the statistics that batch norm uses; see `predict_unlabeled`.

    Args:
        value: the name.

    Raises:
        UserError: it is unknown.
    """
    if value not in ("support", "transductive"):
        raise UserError(
            f'batch_statistics={value!r} is unknown: choose "support" or "transductive".'
        )


def _use_statistics_of_first(module: nn.Module, count: int) -> None:
    """Replace, in place, each batch norm without running statistics."""
    replacements: dict[nn.Module, _FirstExamplesNorm] = {}
    for name, norm in list(module.named_modules(remove_duplicate=False)):
        if isinstance(norm, _BatchNorm) and not norm.track_running_stats:
            if norm not in replacements:
                replacements[norm] = _FirstExamplesNorm(norm, count)
            parent, _, child = name.rpartition(".")
            setattr(module.get_submodule(parent), child, replacements[norm])


class _FirstExamplesNorm(nn.Module):
    """Batch norm with mean and variance of the first examples of a batch.

    Args:
        norm: the batch norm whose weight and bias are shared.
        count: number of first examples; batches up to this size are normalized as by `norm`.
    """

    def __init__(self, norm: _BatchNorm, count: int) -> None:
        super().__init__()
        self.weight, self.bias = norm.weight, norm.bias
        self.eps, self.count = norm.eps, count

    def forward(self, inputs: Tensor) -> Tensor:
        """Normalize inputs of shape (n, channels, *size)."""
        if len(inputs) <= self.count:
            return F.batch_norm(
                inputs, None, None, self.weight, self.bias, training=True, eps=self.eps
            )
        dimensions = [0, *range(2, inputs.dim())]
        variance, mean = torch.var_mean(inputs[: self.count], dimensions, correction=0)
        return F.batch_norm(inputs, mean, variance, self.weight, self.bias, eps=self.eps)
