"""Partitioners whose shards do not fit are refused before training."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import SMALL, build, compose
from worlds import run_world

from metadist.distributed import Shard, get_rank, get_world_size
from metadist.errors import UserError
from metadist.launchers import RunSpec, run_job
from metadist.training import MetaBatch


def first_three(learner, tasks: MetaBatch) -> list[Shard]:
    return [Shard(0, (learner, tasks.select(slice(3))), size=3)]


def with_a_copy_of_the_learner(learner, tasks: MetaBatch) -> list[Shard]:
    return [Shard(0, (copy.deepcopy(learner), tasks), size=tasks.size)]


def twice(learner, tasks: MetaBatch) -> list[Shard]:
    return [Shard(0, (learner, tasks), size=tasks.size)] * 2


def one_for_another(learner, tasks: MetaBatch) -> list[Shard]:
    parts = (tasks.select(slice(2)), tasks.select(slice(1, 3)))
    return [Shard(0, (learner, part), size=part.size) for part in parts]


def without_tasks(learner, tasks: MetaBatch) -> list[Shard]:
    return [Shard(0, (learner, tuple(tasks)))]


def with_an_empty_shard(learner, tasks: MetaBatch) -> list[Shard]:
    parts = (tasks, tasks.select(slice(0)))
    return [Shard(0, (learner, part), size=part.size) for part in parts]


def of_size_one(learner, tasks: MetaBatch) -> list[Shard]:
    return [Shard(0, (learner, tasks))]


def of_parts_of_keys(learner, tasks: MetaBatch) -> list[Shard]:
    return [Shard(0, (learner, MetaBatch(tasks.keys[:, 2:])), size=tasks.size)]


@pytest.mark.parametrize(
    ("partitioner", "message"),
    [
        (of_parts_of_keys, "splits the keys of single tasks: let it split the first dimension"),
        (with_an_empty_shard, "gives worker 0 a shard without tasks: leave it out"),
        (of_size_one, "gives a shard of 4 tasks the size 1, its weight in the mean: give"),
        (first_three, "shards have 3 tasks, 3 of them different, of a meta-batch of 4: give each"),
        (
            with_a_copy_of_the_learner,
            "gives worker 0 a shard without the learner that it was given",
        ),
        (twice, "shards have 8 tasks, 4 of them different, of a meta-batch of 4: give each"),
        (one_for_another, "shards have 4 tasks, 3 of them different, of a meta-batch of 4: give"),
        (without_tasks, "no MetaBatch among its arguments, but MAML, tuple: give it"),
    ],
)
def test_partitioners_whose_shards_do_not_fit_are_refused(tmp_path, partitioner, message):
    target = f"+partition._target_={partitioner.__module__}.{partitioner.__name__}"
    options = ("strategy=local", target, "+partition._partial_=true", "trainer.meta_batch_size=4")
    with pytest.raises(UserError, match=message):
        build(tmp_path, *options)


def other_shards_on_each_rank(learner, tasks: MetaBatch) -> list[Shard]:
    workers = [(index + get_rank()) % get_world_size() for index in range(tasks.size)]
    return [
        Shard(worker, (learner, tasks.select(slice(index, index + 1))))
        for index, worker in enumerate(workers)
    ]


def run_with_other_shards(directory: str) -> None:
    target = f"+partition._target_={__name__}.other_shards_on_each_rank"
    configuration = compose(*SMALL, "strategy=allreduce", target, "+partition._partial_=true")
    run_job(RunSpec("maml", Path(directory), configuration))


def test_shards_that_differ_between_the_ranks_are_refused(tmp_path):
    for error in run_world(run_with_other_shards, 2, str(tmp_path), may_fail=True):
        assert "the partitioner gives different shards on ranks [1] and on rank 0" in str(error)


def at_random(learner, tasks: MetaBatch) -> list[Shard]:
    order = torch.from_numpy(np.random.default_rng().permutation(tasks.size))
    some = MetaBatch(tasks.keys[order])
    return [Shard(0, (learner, some), size=some.size)]


def test_a_random_partitioner_is_refused_where_every_rank_calls_it(tmp_path):
    target = f"+partition._target_={at_random.__module__}.{at_random.__name__}"
    options = (target, "+partition._partial_=true", "trainer.meta_batch_size=30")
    build(tmp_path, "strategy=local", *options)
    found = run_world(build, 2, str(tmp_path), "strategy=allreduce", *options, may_fail=True)
    assert all("gives different shards when it is called again" in str(each) for each in found)
