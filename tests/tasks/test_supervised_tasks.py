"""Micro-batches of supervised training, and their protocol."""

import numpy as np
import pytest
import torch

from metadist.errors import UserError
from metadist.tasks import Augment, FewShotTasks, ImageClasses, SupervisedTasks, task_keys

SPLIT_CLASSES = {"train": np.arange(4), "validation": np.arange(4, 6), "test": np.arange(6, 12)}
IMAGES = np.random.default_rng(0).integers(0, 256, (12, 6, 4, 4), dtype=np.uint8)


def test_only_test_classes_are_rotated():
    dataset = ImageClasses("noise", IMAGES, SPLIT_CLASSES, rotations=True, test_rotations=True)
    assert dataset.protocol()["rotations"] is True
    tasks = SupervisedTasks(dataset, micro_batch_size=8, held_out=2, ways=2)
    protocol = tasks.protocol()
    assert protocol["rotations"] is False
    assert protocol["test_rotations"] is True
    assert tasks.outputs == 4
    straight = {image.tobytes() for image in IMAGES[:4].reshape(-1, 4, 4)}
    group = tasks.sample(task_keys(0, "train", 0, range(1))[0]).query
    drawn = (group.inputs * 255).round().to(torch.uint8).numpy()
    assert {image.tobytes() for image in drawn.reshape(-1, 4, 4)} <= straight


def test_only_the_test_split_must_have_the_ways():
    dataset = ImageClasses("noise", IMAGES, SPLIT_CLASSES)
    assert SupervisedTasks(dataset, micro_batch_size=8, held_out=2, ways=6).ways == 6
    with pytest.raises(UserError, match="ways is 7, but the test split of noise has only 6"):
        SupervisedTasks(dataset, held_out=2, ways=7)


def test_training_needs_training_classes_and_a_test_alone_does_not():
    dataset = ImageClasses("noise", IMAGES, {**SPLIT_CLASSES, "train": np.arange(0)})
    with pytest.raises(UserError, match="supervised training needs classes"):
        SupervisedTasks(dataset, ways=2)
    tasks = SupervisedTasks(dataset, ways=2, sampled_splits=("test",))
    assert len(tasks.sample(task_keys(0, "test", 0, range(1))[0]).support.targets) == 2


def test_only_training_examples_are_augmented():
    plain, flipped = (
        SupervisedTasks(ImageClasses("noise", IMAGES, SPLIT_CLASSES, augment=augment), ways=2)
        for augment in (None, Augment(flip=1.0))
    )
    for split in ("train", "validation"):
        key = task_keys(0, split, 0, range(1))[0]
        found, expected = flipped.sample(key).query.inputs, plain.sample(key).query.inputs
        assert torch.equal(found, expected.flip(-1) if split == "train" else expected)


def test_the_last_examples_of_each_class_are_held_out_from_training():
    held_out, examples = 2, IMAGES.shape[1]
    # Each image says with its pixels which example of which class it is.
    images = np.arange(12 * examples, dtype=np.uint8).reshape(12, examples, 1, 1)
    dataset = ImageClasses("numbers", images.repeat(4, -1).repeat(4, -2), SPLIT_CLASSES)
    tasks = SupervisedTasks(dataset, micro_batch_size=16, held_out=held_out, ways=2)
    for split, expected in (("train", {0, 1, 2, 3}), ("validation", {4, 5})):
        drawn = set()
        for key in task_keys(0, split, 1, range(8)):
            inputs, labels = tasks.sample(key).query
            numbers = (inputs[:, 0, 0, 0] * 255).round().long()
            assert torch.equal(numbers // examples, labels)
            drawn |= set((numbers % examples).tolist())
        assert drawn == expected


def test_the_protocol_and_the_descriptions_are_of_the_test():
    dataset = ImageClasses("noise", IMAGES, SPLIT_CLASSES)
    tasks = SupervisedTasks(dataset, 8, held_out=2, ways=2, shots=2, queries=4)
    assert tasks.protocol() == {
        **{"ways": 2, "shots": 2, "queries": 4, "micro_batch_size": 8, "held_out": 2},
        **dataset.protocol(),
    }
    assert tasks.describe(task_keys(0, "validation", 0, range(1))[0]) is None
    key = task_keys(0, "test", 0, range(1))[0]
    described, few_shot = tasks.describe(key), FewShotTasks(dataset, 2, 2, 4)
    assert described == few_shot.describe(key) and len(described.query_images) == 8
    for found, expected in zip(tasks.sample(key), few_shot.sample(key), strict=True):
        assert torch.equal(found.inputs, expected.inputs)
    with pytest.raises(UserError, match="held_out=6 leaves no example of a class's 6"):
        SupervisedTasks(dataset, held_out=6, ways=2, queries=4)
    tasks = SupervisedTasks(dataset, held_out=6, ways=2, queries=4, sampled_splits=["test"])
    assert len(tasks.sample(task_keys(0, "test", 0, range(1))[0]).query.inputs) == 8
