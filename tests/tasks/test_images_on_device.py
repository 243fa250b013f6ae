"""Episodes made on a device from images that stay there; here the device is the CPU."""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from metadist.tasks import (
    Augment,
    FewShotTasks,
    ImageClasses,
    Normalize,
    key_generator,
    stack_episodes,
    task_keys,
)
from metadist.tasks.images_on_device import fits_on_device

CPU = torch.device("cpu")
SPLITS = {"train": np.arange(6), "validation": np.arange(6, 9), "test": np.arange(9, 12)}


@pytest.fixture(autouse=True)
def keep_images_on_the_cpu(monkeypatch):
    monkeypatch.setattr("metadist.tasks.images.fits_on_device", lambda *arguments: True)


def random_images(*shape, sizes=(9,) * 12):
    generator = np.random.default_rng(0)
    return [generator.integers(0, 256, (size, *shape), np.uint8) for size in sizes]


def assert_same_episodes(dataset, split="train"):
    keys = task_keys(3, split, 5, range(20))
    counts = (3, 2, 4)
    found = dataset.episodes(CPU, (key_generator(key) for key in keys), split, *counts)
    expected = stack_episodes([dataset.episode(key_generator(k), split, *counts) for k in keys])
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine.inputs, other.inputs) and mine.inputs.dtype == other.inputs.dtype
        assert torch.equal(mine.targets, other.targets)
        assert mine.targets.dtype == other.targets.dtype


@pytest.mark.parametrize("split", ["train", "test"])
@pytest.mark.parametrize("shape", [(8, 8), (3, 8, 8)], ids=["gray", "color"])
@pytest.mark.parametrize("rotations", [False, True], ids=["upright", "rotated"])
def test_episodes_are_those_made_one_by_one(shape, split, rotations):
    channels = shape[0] if len(shape) == 3 else 1
    assert_same_episodes(
        ImageClasses(
            "random",
            np.array(random_images(*shape)),
            SPLITS,
            rotations=rotations,
            normalize=Normalize([0.3] * channels, [0.7] * channels),
        ),
        split,
    )


def test_classes_of_unequal_sizes():
    images = random_images(5, 7, sizes=range(6, 18))
    assert_same_episodes(ImageClasses("unequal", images, SPLITS))


def test_test_tasks_of_one_drawer_and_of_one_group():
    images, groups = np.array(random_images(4, 4)), [str(i // 3) for i in range(12)]
    dataset = ImageClasses("drawers", images, SPLITS, groups=groups, test_drawers=True)
    assert_same_episodes(dataset, "test")


def test_augmented_images_and_subclasses_with_own_episodes_are_made_on_the_cpu():
    class Own(ImageClasses):
        def inputs(self, pixels, split, generator):
            return super().inputs(pixels, split, generator) * 2

    images = np.array(random_images(8, 8))
    augmented = ImageClasses("augmented", images, SPLITS, augment=Augment(flip=True))
    arguments = ([np.random.default_rng(0)], "train", 3, 1, 1)
    assert augmented.episodes(CPU, *arguments) is None
    keys = task_keys(0, "train", 1, range(2))
    assert FewShotTasks(Own("own", images, SPLITS), 3, 1, 2).sample_batch(keys, CPU) is None
    assert_same_episodes(augmented, "test")


def test_images_with_transforms_are_made_on_the_cpu_in_training():
    images = np.array(random_images(8, 8))
    dataset = ImageClasses("transformed", images, SPLITS, transforms=[torch.rand_like])
    arguments = ([np.random.default_rng(0)], "train", 3, 1, 1)
    assert dataset.episodes(CPU, *arguments) is None
    assert_same_episodes(dataset, "test")


def test_tasks_are_made_on_the_device_where_they_are_computed():
    class Dataset(ImageClasses):
        def episodes(self, device, generators, *arguments):
            devices.append(device)
            return super().episodes(CPU, generators, *arguments)

    devices = []
    tasks = FewShotTasks(Dataset("random", np.array(random_images(8, 8)), SPLITS), 3, 1, 2)
    keys = task_keys(0, "train", 1, range(4))
    found = tasks.sample_batch(keys, torch.device("cuda", 0))
    assert devices == [torch.device("cuda", 0)]
    assert torch.equal(found.query.inputs[3], tasks.sample(keys[3]).query.inputs)


def test_images_that_do_not_fit_stay_where_they_are(monkeypatch):
    monkeypatch.setattr("metadist.tasks.images.fits_on_device", fits_on_device)
    dataset = ImageClasses("large", np.array(random_images(8, 8)), SPLITS)
    size = dataset.images.nbytes
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (4 * size - 1, 8 * size))
    arguments = ([np.random.default_rng(0)], "test", 3, 1, 1)
    assert dataset.episodes(torch.device("cuda", 0), *arguments) is None
    assert dataset.episodes(CPU, *arguments) is None


@pytest.mark.skipif(
    torch.__version__ < (2, 10), reason="fake tensors of PyTorch 2.9 are copied to a real GPU"
)
def test_episodes_for_a_gpu_lie_there_as_a_whole(monkeypatch):
    images = np.array(random_images(3, 8, 8))
    normalize = Normalize([0.3] * 3, [0.7] * 3)
    dataset = ImageClasses("random", images, SPLITS, rotations=True, normalize=normalize)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10**9, 10**9))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    # Tensors without values: mixing devices is an error, as on a machine with a GPU.
    with FakeTensorMode(allow_non_fake_inputs=True):
        generators = [np.random.default_rng(seed) for seed in range(4)]
        episodes = dataset.episodes(torch.device("cuda", 0), generators, "train", 3, 1, 2)
    for part, count in zip(episodes, (3, 6), strict=True):
        assert part.inputs.shape == (4, count, 3, 8, 8) and part.targets.shape == (4, count)
        assert part.inputs.is_cuda and part.targets.is_cuda
