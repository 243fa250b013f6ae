import hashlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from worlds import run_world

from metadist.tasks import FewShotTasks, Glyphs, ImageDataset, task_keys
from metadist.tasks.glyphs import render_glyphs

COUNTS = {"train_classes": 30, "validation_classes": 5, "test_classes": 10}


@pytest.fixture(scope="module")
def glyphs():
    return Glyphs(train_classes=300, validation_classes=20, test_classes=150)


def fingerprint():
    """Of the images and of some episodes."""
    tasks = FewShotTasks(Glyphs(seed=3, **COUNTS), 5, 1, 15)
    found = hashlib.sha256(tasks.dataset.images.tobytes())
    for key in task_keys(0, "train", 7, range(5)):
        found.update(tasks.sample(key).query.inputs.numpy().tobytes())
    return found.hexdigest()


def test_equal_in_a_fresh_process_with_another_number_of_threads():
    torch.set_num_threads(2)
    assert run_world(fingerprint, 1) == [fingerprint()]


def test_a_class_depends_on_its_key_alone():
    many = Glyphs(seed=1, **COUNTS)
    few = Glyphs(seed=1, train_classes=2, validation_classes=5, test_classes=10, examples=7)
    assert np.array_equal(few.split_classes("train"), np.stack(many.split_classes("train"))[:2, :7])
    assert np.array_equal(few.split_classes("test"), np.stack(many.split_classes("test"))[:, :7])
    other = Glyphs(seed=2, **COUNTS)
    assert not (many.images == other.images).all(axis=(-1, -2)).any()


def test_images_are_unique(glyphs):
    assert isinstance(glyphs, ImageDataset)
    assert [len(glyphs.split_classes(s)) for s in ("train", "validation", "test")] == [300, 20, 150]
    flat = glyphs.images.reshape(-1, 28 * 28)
    assert len(np.unique(flat, axis=0)) == len(flat) == 470 * 20


def test_every_image_has_strokes_and_background(glyphs):
    ink = (glyphs.images / 255).mean(axis=(-1, -2))
    assert ink.min() > 0.01
    assert ink.max() < 0.4
    assert 0.08 < ink.mean() < 0.14
    assert (glyphs.images.max(axis=(-1, -2)) > 200).all()
    # Little is cut off at the border.
    border = np.concatenate(
        [glyphs.images[..., [0, -1], :].ravel(), glyphs.images[..., [0, -1]].ravel()]
    )
    assert (border / 255).mean() < 0.05


@pytest.mark.parametrize("size", [14, 56])
def test_other_sizes_show_the_same_characters(size):
    keys = [(0, 0, index) for index in range(20)]
    usual, other = render_glyphs(keys, 2, 28), render_glyphs(keys, 2, size)
    assert other.shape == (20, 2, size, size)
    common = [
        F.adaptive_avg_pool2d(torch.from_numpy(images).flatten(0, 1).float(), 7).flatten(1)
        for images in (usual, other)
    ]
    nearest = torch.cdist(*common).argmin(dim=1)
    assert (nearest == torch.arange(40)).float().mean() > 0.9


def nearest_neighbour(dataset, embed, tasks=80):
    accuracies = []
    few_shot = FewShotTasks(dataset, 5, 1, 15)
    for key in task_keys(0, "test", 0, range(tasks)):
        support, query = few_shot.sample(key)
        with torch.no_grad():
            features = embed(torch.cat([support.inputs, query.inputs]))
        nearest = torch.cdist(features[5:], features[:5]).argmin(dim=1)
        accuracies.append((support.targets[nearest] == query.targets).float().mean().item())
    return np.mean(accuracies)


@pytest.mark.slow
def test_it_is_a_real_few_shot_problem(glyphs):
    """Pixels do better than chance and far from well; a little learning does clearly better."""
    pixels = nearest_neighbour(glyphs, lambda inputs: inputs.flatten(1))
    assert 0.5 < pixels < 0.7

    torch.manual_seed(0)
    layers = []
    for channels in (1, 24, 24, 24):
        layers += [nn.Conv2d(channels, 24, 3, stride=2, padding=1)]
        layers += [nn.BatchNorm2d(24, track_running_stats=False), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Flatten())
    optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
    few_shot = FewShotTasks(glyphs, 20, 1, 3)
    for key in task_keys(0, "train", 0, range(90)):
        support, query = few_shot.sample(key)
        features = network(torch.cat([support.inputs, query.inputs]))
        loss = F.cross_entropy(-torch.cdist(features[20:], features[:20]).square(), query.targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    learned = nearest_neighbour(glyphs, network)
    assert learned > pixels + 0.1
    assert learned < 0.99


def test_protocol():
    assert Glyphs(seed=4, **COUNTS).protocol() == {
        "dataset": "glyphs",
        "rotations": False,
        "test_rotations": False,
        "dataset_seed": 4,
        "classes": {"train": 30, "validation": 5, "test": 10},
        "examples": 20,
        "image_size": 28,
    }
