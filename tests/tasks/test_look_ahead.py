"""Tasks that are sampled in advance are those of their keys."""

import copy
import itertools
import pickle

import pytest
import torch

from metadist.errors import UserError
from metadist.tasks import (
    Episode,
    Examples,
    FewShotTasks,
    Sinusoid,
    stack_episodes,
    task_keys,
)

CPU = torch.device("cpu")


def assert_sampled(tasks, keys):
    """Compare tasks that were sampled together with those of each key."""
    found = tasks.sample_batch(keys, CPU)
    expected = stack_episodes([tasks.sample(key) for key in keys])
    for part, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert torch.equal(part, other)
    for examples in found:  # of one alignment, with which the rounding of products varies
        assert examples.inputs.data_ptr() % 64 == 0
    return found


class Counted(Sinusoid):
    """Counts the tasks of each call."""

    looks_ahead = True

    def __init__(self):
        self.calls = []

    def episodes(self, *arguments):
        episodes = super().episodes(*arguments)
        self.calls.append(len(episodes.query.inputs))
        return episodes


def test_tasks_of_consecutive_iterations_are_sampled_together():
    dataset = Counted()
    tasks = FewShotTasks(dataset, 1, 10, 10)
    for iteration in range(5, 17):
        assert_sampled(tasks, task_keys(3, "train", iteration, range(25)))
    assert dataset.calls == [25, 250, 250]


@pytest.mark.parametrize(
    ("indices", "points", "calls"),
    [
        (range(100), 10, [100, 200, 200]),
        (range(129), 10, [129] * 4),
        (range(2), 9000, [2, 2, 2, 2]),  # their tensors have 72,000 elements
        (range(7, 8), 10, [1, 256]),
    ],
)
def test_the_number_of_tasks_that_are_sampled_together_is_bounded(indices, points, calls):
    dataset = Counted()
    tasks = FewShotTasks(dataset, 1, points, points)
    for iteration in range(1, 5):
        assert_sampled(tasks, task_keys(0, "train", iteration, indices))
    assert dataset.calls == calls


def test_tasks_are_the_same_in_any_order_of_calls():
    dataset = Counted()
    tasks = FewShotTasks(dataset, 1, 4, 2)
    keys = [task_keys(seed, "train", i, range(3)) for seed in (0, 1) for i in (1, 2, 3)]
    keys += [task_keys(0, "test", 0, range(3)), task_keys(0, "train", 2, range(1, 4))]
    for order in itertools.permutations(range(len(keys)), 3):
        for number in order:
            assert_sampled(tasks, keys[number])


def test_other_counts_take_effect_in_the_next_iteration():
    tasks = FewShotTasks(Sinusoid(), 1, 4, 2)
    for iteration in range(1, 9):
        if iteration == 5:
            tasks.train_shots = 6
        found = assert_sampled(tasks, task_keys(0, "train", iteration, range(3)))
        assert found.support.inputs.shape[1] == (4 if iteration < 5 else 6)


def test_tasks_that_were_changed_in_place_are_sampled_again():
    tasks = FewShotTasks(Sinusoid(), 1, 4, 2)
    for iteration in (1, 2, 3, 1, 2, 3):
        found = assert_sampled(tasks, task_keys(0, "train", iteration, range(3)))
        for tensor in itertools.chain(*found):
            tensor.fill_(7)


def test_other_splits_and_subclasses_are_sampled_as_they_are_asked_for():
    class Changing(Counted):
        pass

    for dataset, split in ((Counted(), "validation"), (Changing(), "train")):
        tasks = FewShotTasks(dataset, 1, 4, 2)
        for iteration in range(4):
            assert_sampled(tasks, task_keys(0, split, iteration, range(3)))
        assert dataset.calls == [3] * 4


def test_validations_do_not_discard_what_was_sampled():
    dataset = Counted()
    tasks = FewShotTasks(dataset, 1, 4, 2)
    for iteration in range(4):
        assert_sampled(tasks, task_keys(0, "train", iteration, range(16)))
        assert_sampled(tasks, task_keys(0, "validation", 0, range(2)))
    assert dataset.calls == [16, 2, 256, 2, 2, 2]


class Far(Counted):
    """Its inputs are told apart from those of other datasets; it does not look ahead."""

    def episodes(self, *arguments):
        support, query = super().episodes(*arguments)
        return Episode(Examples(support.inputs + 100, support.targets), query)


class FarAhead(Far):
    looks_ahead = True


def test_another_dataset_takes_effect_in_the_next_iteration():
    tasks = FewShotTasks(Counted(), 1, 4, 2)
    copied = copy.copy(tasks)
    copied.dataset = Far()
    for iteration in range(1, 9):
        keys = task_keys(0, "train", iteration, range(3))
        assert tasks.sample_batch(keys, CPU).support.inputs.max() < 50
        assert copied.sample_batch(keys, CPU).support.inputs.min() > 50


def test_a_dataset_that_is_replaced_takes_effect_in_the_next_iteration():
    tasks = FewShotTasks(Counted(), 1, 4, 2)
    for iteration in range(1, 9):
        if iteration == 5:
            tasks.dataset = FarAhead()
        inputs = tasks.sample_batch(task_keys(0, "train", iteration, range(3)), CPU).support.inputs
        assert (inputs > 50).all() == (iteration >= 5)


def test_what_was_sampled_is_not_sent_with_the_tasks():
    tasks = FewShotTasks(Counted(), 1, 4, 2)
    for iteration in range(1, 4):
        tasks.sample_batch(task_keys(0, "train", iteration, range(3)), CPU)
    assert len(pickle.dumps(tasks)) < 1000
    assert_sampled(pickle.loads(pickle.dumps(tasks)), task_keys(0, "train", 4, range(3)))


def test_a_dataset_that_does_not_always_sample_together_may_not_look_ahead():
    class Sometimes(Counted):
        looks_ahead = True

        def episodes(self, device, generators, *arguments):
            generators = list(generators)
            if len(generators) > 6:
                return None
            return stack_episodes([self.episode(each, *arguments) for each in generators])

    tasks = FewShotTasks(Sometimes(), 1, 4, 2)
    tasks.sample_batch(task_keys(0, "train", 1, range(3)), CPU)
    with pytest.raises(UserError, match="episodes returned None"):
        tasks.sample_batch(task_keys(0, "train", 2, range(3)), CPU)


def test_looks_ahead_may_be_a_property():
    class Changing(Counted):
        @property
        def looks_ahead(self):
            return False

    dataset = Changing()
    tasks = FewShotTasks(dataset, 1, 4, 2)
    for iteration in range(1, 4):
        assert_sampled(tasks, task_keys(0, "train", iteration, range(3)))
    assert dataset.calls == [3, 3, 3]
