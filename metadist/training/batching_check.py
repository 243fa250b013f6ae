"""Checks of a user's own classes: that they batch tasks, and that these are independent."""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from metadist.algorithms import Learner
from metadist.algorithms.learner import model_supports_batched_tasks, require_equal_metrics
from metadist.distributed import get_rank
from metadist.errors import UserError
from metadist.tasks import Episode, TaskDistribution, random_state, task_keys
from metadist.training.batching import ChunkSize, forward_batched, split_into_chunks
from metadist.training.precision import Precision, tensor_float32
from metadist.training.task_mapper import set_task_seeds, task_seed

_log = logging.getLogger(__name__)

_BATCHES = ((0, 1), (1, 0), (0,))
"""Batches of the first two tasks; a task's results must be the same in all."""


def log_unbatched(learner: Learner) -> None:
    """Say, on rank zero, if a learner or model of the user's own is why tasks run one by one.

    Args:
        learner: the learner of a run whose strategy sums on workers, which batches tasks.
    """
    model, missing = learner.model, []
    if not (learner.batches_tasks or _is_of_metadist(learner)):
        missing.append(f"batches_tasks of {type(learner).__name__}")
    declined = getattr(model, "supports_batched_tasks", None) is False  # as with dropout
    if not (model_supports_batched_tasks(model) or declined or _is_of_metadist(model)):
        missing.append(f"supports_batched_tasks of {type(model).__name__}")
    if missing and get_rank() == 0:
        _log.info(
            "tasks are computed one at a time, which is slower for small tasks: if the methods "
            "accept batched tasks, set %s to True",
            " and ".join(missing),
        )


def check_batched_tasks(
    tasks: TaskDistribution,
    learner: Learner,
    split: str,
    precision: Precision,
    chunk_size: ChunkSize,
    count: int,
) -> None:
    """Check a user's own learner or model: the results of batched tasks must depend neither on each
    other nor on global random numbers. Every rank calls it.

    Nothing is checked if the first two tasks are not batched, such as tasks of different shapes.

    Args:
        tasks: this rank's tasks.
        learner: the learner, on its device.
        split: the split of the tasks, which determines the learner's mode.
        precision: the precision of the tasks' computation.
        chunk_size: see `metadist.training.batching.max_chunk_size`.
        count: the number of tasks that the run takes from the split at once.

    Raises:
        UserError: the results depend on each other, or have another shape.
    """
    learner.train(split == "train")  # whether tasks are batched may depend on the mode
    own = not (_is_of_metadist(learner) and _is_of_metadist(learner.model))
    if not own or not learner.supports_batched_tasks or count < 2 or chunk_size == 1:
        return
    sampled = [(key, tasks.sample(key)) for key in task_keys(0, split, 0, range(2))]
    expected: dict[int, dict[str, Tensor]] = {}
    for batch in _BATCHES:
        chosen = [sampled[index] for index in batch]
        results = _results_of_batch(learner, chosen, precision, chunk_size)
        if results is None:
            return
        for position, index in enumerate(batch):
            found = {name: values[position] for name, values in results.items()}
            before = expected.setdefault(index, found)
            require_equal_metrics(learner, [before, found])
            for name, value in before.items():
                if not _equal(value, found[name], precision):
                    raise UserError(_message(learner, split, name))


def _equal(first: Tensor, second: Tensor, precision: Precision) -> bool:
    if first.shape != second.shape:
        return False
    # The order of sums may depend on the number of tasks on a GPU, and matters in bfloat16.
    tolerance = 1e-3 if first.is_cpu and precision != "bf16" else 0.05
    finite = first.double().masked_select(first.isfinite())
    largest = finite.abs().max().item() if finite.numel() else 0.0
    return torch.allclose(
        first.double(), second.double(), rtol=0, atol=tolerance * (largest + 0.1), equal_nan=True
    )


def _message(learner: Learner, split: str, name: str) -> str:
    part = f"{type(learner).__name__} has batches_tasks=True"
    if _is_of_metadist(learner):
        part = f"{type(learner.model).__name__} has supports_batched_tasks=True"
    return (
        f"{part}, and the {name} of a {split} task changes with the other tasks of its batch or "
        "with global random numbers: compute along the dimension of tasks, take gradients of the "
        "sum of the tasks' losses, draw random numbers from task_seeds, or leave the attribute out."
    )


def _is_of_metadist(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "metadist"


def _results_of_batch(
    learner: Learner,
    sampled: Sequence[tuple[Tensor, Episode]],
    precision: Precision,
    chunk_size: ChunkSize,
) -> dict[str, Tensor] | None:
    """Loss, metrics and predictions of tasks in one batch; None if they are not batched."""
    device = next(learner.parameters()).device
    chunk, *others = split_into_chunks(learner, sampled, len(sampled), device, chunk_size)
    if others or not chunk.batched:
        return None
    set_task_seeds(learner, chunk.keys)
    parameters = dict(learner.named_parameters())
    with (
        torch.set_grad_enabled(learner.training),
        # Another seed for each batch, so that global random numbers differ.
        random_state(task_seed(sampled[0][0]) + len(sampled), device),
        tensor_float32(precision, device),
    ):
        result, _ = forward_batched(learner, parameters, chunk.episodes, precision)
    values = {"loss": result.loss.detach(), **result.metrics}
    if result.predictions is not None:
        if len(result.predictions) != len(sampled):
            raise UserError(
                f"{type(learner).__name__}.forward of {len(sampled)} batched tasks returned "
                f"predictions of shape {tuple(result.predictions.shape)}: let the first dimension "
                "be that of the tasks."
            )
        values["predictions"] = result.predictions.detach()
    return values
