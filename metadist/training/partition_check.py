"""Checks of the partitioner before training."""

import hashlib

from metadist.algorithms import Learner
from metadist.distributed import get_worker_id, get_world_size
from metadist.distributed.partitioners import Partitioner, as_shards
from metadist.errors import UserError, user_frame
from metadist.tasks import task_keys
from metadist.training.strategies.strategy import Strategy
from metadist.training.task_mapper import MetaBatch


def check_partition(strategy: Strategy, learner: Learner, meta_batch_size: int) -> None:
    """Check that the partitioner names existing workers and puts each task into one shard.

    If every rank partitions, also check that a second call gives the same shards. Every rank calls
    it.

    Args:
        strategy: the run's strategy.
        learner: the partitioner's first argument.
        meta_batch_size: the number of tasks.

    Raises:
        UserError: the shards do not fit, or a second call gives others.
    """
    shards = _shards_of(strategy.partitioner, learner, meta_batch_size)
    indices = [index for _, tasks in shards for index in tasks]
    if sorted(indices) != list(range(meta_batch_size)):
        raise UserError(
            f"the partitioner's shards have {len(indices)} tasks, {len(set(indices))} of them "
            f"different, of a meta-batch of {meta_batch_size}: give each task to one shard."
        )
    on_every_rank = strategy.every_rank_drives and get_world_size() > 1
    if on_every_rank and _shards_of(strategy.partitioner, learner, meta_batch_size) != shards:
        raise UserError(
            "the partitioner gives different shards when it is called again, and with "
            f"strategy={strategy.name} every rank calls it: let the shards depend on the tasks and "
            "the number of workers alone, or take strategy=rpc."
        )


def partition_digest(strategy: Strategy, learner: Learner, meta_batch_size: int) -> str:
    """Compute a digest of the shards of a meta-batch. It must be the same on all drivers.

    Args:
        strategy: the run's strategy.
        learner: the partitioner's first argument.
        meta_batch_size: the number of tasks.
    """
    shards = _shards_of(strategy.partitioner, learner, meta_batch_size)
    return hashlib.sha256(repr(shards).encode()).hexdigest()


def _shards_of(
    partitioner: Partitioner, learner: Learner, meta_batch_size: int
) -> list[tuple[int, list[int]]]:
    """The worker and the indices of the tasks of each shard of a meta-batch."""
    keys = task_keys(0, "train", 1, range(meta_batch_size))
    shards = []
    try:
        triples = as_shards(partitioner(learner, MetaBatch(keys)))
    except TypeError as error:
        if user_frame(error):
            raise
        raise UserError(str(error)) from None
    for shard in triples:
        worker, args, kwargs = shard
        values = (*args, *kwargs.values())
        if not any(value is learner for value in values):
            raise UserError(
                f"the partitioner gives worker {worker} a shard without the learner that it was "
                "given: pass it on as it is; a copy would not be trained."
            )
        batches = [value for value in values if isinstance(value, MetaBatch)]
        if len(batches) != 1:
            raise UserError(
                "a shard of the partitioner has no MetaBatch among its arguments, but "
                f"{', '.join(type(value).__name__ for value in values)}: give it "
                "(learner, tasks.select(slice)) and size=tasks.size."
            )
        if batches[0].keys.shape[-1] != keys.shape[-1]:
            raise UserError(
                "the partitioner splits the keys of single tasks: let it split the first "
                "dimension, as with partition.dim=0."
            )
        tasks = batches[0].keys.reshape(-1, keys.shape[1])[:, 3].tolist()
        if not tasks:
            raise UserError(
                f"the partitioner gives worker {worker} a shard without tasks: leave it out."
            )
        if shard.size != len(tasks):
            raise UserError(
                f"the partitioner gives a shard of {len(tasks)} tasks the size {shard.size:g}, its "
                "weight in the mean: give Shard(worker, args, size=tasks.size)."
            )
        shards.append((get_worker_id(worker), tasks))
    return shards
