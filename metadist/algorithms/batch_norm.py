"""Which statistics batch norms use: those of the batch, or running statistics."""

import contextlib
from collections.abc import Iterator

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm


def uses_batch_statistics(module: nn.Module) -> bool:
    """Whether predictions depend on the other inputs of the batch in the current mode."""
    return any(norm.training or not norm.track_running_stats for norm in batch_norms(module))


@contextlib.contextmanager
def batch_norms_as_in_training(module: nn.Module) -> Iterator[None]:
    """In the block, batch norms normalize as in training: with the statistics of the batch.

    Instance norms with running statistics, too, normalize as in training. Running statistics are
    not changed. Use it for inner steps in evaluation, so that they are the steps of training. A
    batch norm that the module's own `train` keeps in evaluation mode uses running statistics in
    training, too, and so in the block.
    """
    norms = [
        each
        for each in module.modules()
        if isinstance(each, _NormBase) and each.track_running_stats and not each.training
    ]
    if norms:
        modes = [(each, each.training) for each in module.modules()]
        module.train()
        norms = [norm for norm in norms if norm.training]
        module.train(modes[0][1])  # a `train` of the user may change more than the modes
        for each, mode in modes:
            each.training = mode
    # Instance norms, unlike batch norms, update running statistics that they do not use.
    statistics = [(n, n.running_mean, n.running_var) for n in norms if isinstance(n, _InstanceNorm)]
    for norm in norms:
        norm.training, norm.track_running_stats = True, False
    for norm, _, _ in statistics:
        norm.running_mean = norm.running_var = None
    try:
        yield
    finally:
        for norm in norms:
            norm.training, norm.track_running_stats = False, True
        for norm, mean, variance in statistics:
            norm.running_mean, norm.running_var = mean, variance


def batch_norm_protocol(model: nn.Module, transductive: bool) -> str:
    """The batch-norm statistics of an evaluation, as reported in its protocol.

    Args:
        model: the network.
        transductive: whether the queries of a task are normalized together, if the model keeps no
            running statistics.
    """
    norms = batch_norms(model)
    if not norms:
        return "none"
    if all(norm.track_running_stats for norm in norms):
        return "running statistics (not transductive)"
    if transductive:
        return "batch statistics (transductive)"
    return "batch statistics of one query with the support set (not transductive)"


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """The batch norms among a module and its submodules."""
    return [norm for norm in module.modules() if isinstance(norm, _BatchNorm)]
