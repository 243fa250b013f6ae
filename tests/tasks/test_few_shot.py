"""Tasks of training of another size than those of validation and test."""

import hashlib

import numpy as np
import pytest
import torch

from metadist.errors import UserError
from metadist.tasks import (
    SPLITS,
    Augment,
    Episode,
    Examples,
    FewShotTasks,
    Glyphs,
    ImageClasses,
    Sinusoid,
    SupervisedTasks,
    task_keys,
)

SPLIT_CLASSES = {"train": np.arange(12), "validation": np.arange(12, 16), "test": np.arange(16, 20)}


def noise() -> ImageClasses:
    images = np.random.default_rng(0).integers(0, 256, (20, 10, 4, 4), dtype=np.uint8)
    return ImageClasses("noise", images, SPLIT_CLASSES)


def counts(tasks: FewShotTasks, split: str) -> tuple[int, ...]:
    support, query = tasks.sample(task_keys(0, split, 1, range(1))[0])
    ways = int(support.targets.max()) + 1
    return ways, len(support.targets) // ways, len(query.targets) // ways


def test_training_has_its_own_size():
    tasks = FewShotTasks(noise(), 3, 1, 4, train_ways=12, train_shots=2, train_queries=5)
    assert counts(tasks, "train") == (12, 2, 5)
    assert counts(tasks, "validation") == counts(tasks, "test") == (3, 1, 4)
    assert tasks.outputs == 12
    found = tasks.protocol()
    assert (found["ways"], found["shots"], found["queries"]) == (3, 1, 4)
    assert (found["train_ways"], found["train_shots"], found["train_queries"]) == (12, 2, 5)


def test_only_what_differs_is_named_and_the_test_tasks_stay_the_same():
    tasks, plain = FewShotTasks(noise(), 3, 1, 4, train_shots=6), FewShotTasks(noise(), 3, 1, 4)
    assert tasks.protocol() == {**plain.protocol(), "train_shots": 6}
    for key in task_keys(0, "test", 0, range(3)):
        for ours, theirs in zip(tasks.sample(key), plain.sample(key), strict=True):
            assert torch.equal(ours.inputs, theirs.inputs)
    waves = FewShotTasks(Sinusoid(), 5, 5, 5, train_ways=9, train_shots=10)
    assert waves.protocol() == {
        "ways": 1, "shots": 5, "queries": 5, "train_shots": 10, "dataset": "sinusoid",
    }  # fmt: skip
    assert counts(plain, "train") == (3, 1, 4)
    assert FewShotTasks(noise(), 3, 1, 4, train_ways=2).outputs == 3


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"train_ways": 13}, ["task.train_ways is 13", "train split", "lower task.train_ways"]),
        ({"train_shots": 8}, ["task.train_shots + task.train_queries is 8 + 4"]),
        ({"train_queries": 0}, ["task.train_queries must be at least 1"]),
        ({"ways": 5, "train_ways": 3}, ["task.ways is 5", "validation split"]),
    ],
)
def test_impossible_training_tasks_are_refused(given, parts):
    with pytest.raises(UserError) as error:
        FewShotTasks(noise(), **{"ways": 4, "shots": 1, "queries": 4, **given})
    assert all(part in str(error.value) for part in parts), error.value


def test_splits_that_are_not_sampled_may_be_too_small():
    with pytest.raises(UserError, match=r"task\.ways is 5, but the validation split of noise has"):
        FewShotTasks(noise(), 5, 1, 4, sampled_splits=["train", "validation"])
    tasks = FewShotTasks(noise(), 12, 1, 4, sampled_splits=["train"])
    assert counts(tasks, "train") == (12, 1, 4) and tasks.sampled_splits == ("train",)
    with pytest.raises(UserError, match=r"task\.train_shots"):
        FewShotTasks(noise(), 4, 1, 4, train_shots=8, sampled_splits=["train"])
    FewShotTasks(noise(), 4, 1, 4, train_shots=8, sampled_splits=["test"])


def test_the_tasks_of_a_key_are_those_of_earlier_versions():
    glyphs = Glyphs(train_classes=40, validation_classes=10, test_classes=10)
    augment = Augment(crop_padding=2, flip=0.5, brightness=0.4)
    rotated = ImageClasses("rotated", glyphs.images, glyphs.splits, True, True, augment=augment)
    few_shot = FewShotTasks(glyphs, 5, 1, 5), FewShotTasks(rotated, 5, 2, 3)
    found = []
    for tasks in (*few_shot, SupervisedTasks(glyphs)):
        digest = hashlib.sha256()
        for split in SPLITS:
            for key in task_keys(3, split, 2, range(4)):
                for part in tasks.sample(key):
                    digest.update(part.inputs.numpy().tobytes())
                    digest.update(part.targets.numpy().tobytes())
        found.append(digest.hexdigest()[:16])
    assert found == ["2edf2ebaa4bb8b55", "cd0eb26819ad21ae", "6ee25043132adffd"]


def test_the_protocol_of_a_dataset_keeps_the_counts_of_the_tasks():
    class Own(Sinusoid):
        def protocol(self):
            return super().protocol() | {"train_shots": 3, "points": 4, "shots": 5}

    with pytest.raises(UserError, match=r'Own\.protocol returned the key "shots", which has the'):
        FewShotTasks(Own(), shots=2).protocol()


class Shifted(Sinusoid):
    """Overrides how one task is sampled, but not how several are."""

    def episode(self, *arguments):
        support, query = super().episode(*arguments)
        return Episode(Examples(support.inputs, support.targets + 100), query)


def test_a_dataset_with_an_episode_of_its_own_samples_one_task_at_a_time():
    keys, cpu = task_keys(0, "train", 0, range(2)), torch.device("cpu")
    assert FewShotTasks(Sinusoid(), shots=2, queries=2).sample_batch(keys, cpu) is not None
    tasks = FewShotTasks(Shifted(), shots=2, queries=2)
    assert tasks.sample_batch(keys, cpu) is None
    assert (tasks.sample(keys[0]).support.targets > 90).all()


def test_tasks_with_a_sampling_of_their_own_are_sampled_one_at_a_time():
    class Own(FewShotTasks):
        def sample(self, key):
            return super().sample(key.flip(0))

    keys = task_keys(0, "train", 0, range(2))
    assert Own(Sinusoid(), shots=2, queries=2).sample_batch(keys, torch.device("cpu")) is None


def test_a_dataset_without_a_method_is_refused():
    class Nothing:
        input_shape, regression = (1,), True

    with pytest.raises(UserError, match=r"Nothing has no outputs, episode, check, protocol: see"):
        FewShotTasks(Nothing())


def test_a_split_that_does_not_exist_is_refused():
    with pytest.raises(UserError, match="no split 'val': choose one of train, validation, test"):
        task_keys(0, "val", 0, range(1))
