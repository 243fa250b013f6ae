"""Micro-batches of supervised training, and their protocol."""

import numpy as np
import torch

from metadist.tasks import ImageClasses, SupervisedTasks, task_keys

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
