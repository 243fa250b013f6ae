"""Groups of supervised training, and what their protocol says."""

import numpy as np
import torch

from metadist.tasks import ImageClasses, SupervisedTasks, task_keys

PLACES = {"train": np.arange(4), "validation": np.arange(4, 6), "test": np.arange(6, 12)}
IMAGES = np.random.default_rng(0).integers(0, 256, (12, 6, 4, 4), dtype=np.uint8)


def test_turned_classes_are_of_the_test_alone():
    dataset = ImageClasses("noise", IMAGES, PLACES, rotations=True, test_rotations=True)
    assert dataset.protocol()["rotations"] is True
    tasks = SupervisedTasks(dataset, group=8, held_out=2, ways=2)
    protocol = tasks.protocol()
    assert protocol["rotations"] is False and protocol["test_rotations"] is True
    assert tasks.outputs == 4
    straight = {image.tobytes() for image in IMAGES[:4].reshape(-1, 4, 4)}
    group = tasks.draw(task_keys(0, "train", 0, range(1))[0]).query
    drawn = (group.inputs * 255).round().to(torch.uint8).numpy()
    assert {image.tobytes() for image in drawn.reshape(-1, 4, 4)} <= straight


def test_only_the_test_split_must_have_the_ways():
    dataset = ImageClasses("noise", IMAGES, PLACES)
    assert SupervisedTasks(dataset, group=8, held_out=2, ways=6).ways == 6
