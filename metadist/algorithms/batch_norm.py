"""What batch norm normalises the queries by, and so whether an evaluation is transductive."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether predictions of the module, as it is set now, depend on what else is in the batch."""
    return any(norm.training or not norm.track_running_stats for norm in _norms(module))


def one_by_one(predict: Callable[[Tensor], Tensor], support: Tensor, queries: Tensor) -> Tensor:
    """Each query's prediction when no other query is seen: in a batch with the support set alone.

    The evaluation that is not transductive in Reptile's paper (arXiv 1803.02999, section 6.1)
    and code. It costs a pass through the network for each query.

    Args:
        predict: (n, *input shape) -> (n, outputs).
        support: shape (n, *input shape).
        queries: shape (queries, *input shape).

    Returns:
        Shape (queries, outputs).
    """
    batches = (torch.cat([support, query.unsqueeze(0)]) for query in queries)
    return torch.stack([predict(batch)[-1] for batch in batches])


def statistics_name(model: nn.Module, transductive: bool) -> str:
    """What an evaluation's protocol calls the batch-norm statistics of a model.

    Args:
        model: the network.
        transductive: whether the queries of a task are normalised by their common statistics,
            where the model keeps none of training.
    """
    norms = _norms(model)
    if not norms:
        return "none"
    if all(norm.track_running_stats for norm in norms):
        return "running statistics of training (not transductive)"
    if transductive:
        return "statistics of the batch at hand (transductive)"
    return "statistics of the support set with one query (not transductive)"


def _norms(module: nn.Module) -> list[_BatchNorm]:
    return [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
