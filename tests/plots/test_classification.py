"""The pictures are there, of a sensible size, and show something."""

import numpy as np
import pytest
from matplotlib.image import imread

from metadist.errors import UserError
from metadist.plots import (
    EpisodePicture,
    RegressionPicture,
    learning_curves,
    regression_tasks,
    test_episodes,
)


def check(path, width=(500, 2500), height=(300, 3000)):
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = imread(path)[..., :3]
    assert width[0] <= pixels.shape[1] <= width[1]
    assert height[0] <= pixels.shape[0] <= height[1]
    assert pixels.var() > 1e-3
    edge = np.concatenate([pixels[:, :3].ravel(), pixels[:, -3:].ravel()])
    assert edge.min() > 0.9  # nothing runs over the sides
    return pixels


def colours(pixels, red, green, blue):
    """How many pixels are within 3 of a colour of 0 to 255."""
    wanted = np.array([red, green, blue]) / 255
    return int((np.abs(pixels - wanted) < 3 / 255).all(axis=-1).sum())


GREEN, RED = (0x2C, 0x97, 0x4B), (0xCF, 0x36, 0x36)


def episode(ways, shots, queries, channels=1, right=1.0, seed=0):
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(ways), queries)
    wrong = random.random(len(labels)) >= right
    return EpisodePicture(
        random.standard_normal((ways * shots, channels, 28, 28)).astype(np.float32),
        np.repeat(np.arange(ways), shots),
        random.standard_normal((ways * queries, channels, 28, 28)).astype(np.float32),
        labels,
        np.where(wrong, (labels + 1) % ways, labels),
    )


@pytest.mark.parametrize(
    "records",
    [
        [{"iteration": 1, "train_loss": 1.6, "train_accuracy": 0.2}],
        [{"iteration": 1, "train_loss": 1.6}],
        [{"iteration": i, "train_loss": float("nan") if i % 3 else 1.0 / i} for i in range(1, 99)],
    ],
    ids=["single", "loss alone", "not finite"],
)
def test_learning_curves_of_little(tmp_path, records):
    path = tmp_path / "curves.png"
    assert learning_curves(records, path, "100$ and $50 for $x") == path
    check(path)


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_learning_curves_with_validation_and_test(tmp_path, metric):
    records = [{"iteration": i, "train_loss": 2.0 / i} for i in range(1, 200)]
    records += [
        {"iteration": i, "validation_loss": 0.5, f"validation_{metric}": 0.5}
        for i in range(20, 200, 20)
    ]
    path = learning_curves(records, tmp_path / "curves.png", "title", test=(0.7, 0.02))
    pixels = check(path, width=(1200, 2000))
    assert colours(pixels, *GREEN) > 200  # the dashed line of the test


@pytest.mark.parametrize(
    ("ways", "shots", "queries", "channels"),
    [(5, 1, 15, 1), (20, 1, 15, 1), (5, 5, 15, 3), (2, 1, 1, 1), (30, 10, 1, 1)],
)
def test_episodes_of_every_shape(tmp_path, ways, shots, queries, channels):
    episodes = [episode(ways, shots, queries, channels, seed=seed) for seed in range(2)]
    path = tmp_path / "episodes.png"
    assert test_episodes(episodes, path, "tasks of the test split") == path
    check(path)


def test_right_answers_are_green_and_wrong_ones_red(tmp_path):
    counts = {
        right: check(test_episodes([episode(5, 1, 15, right=right)], tmp_path / "e.png", "t"))
        for right in (0.0, 1.0)
    }
    assert colours(counts[1.0], *GREEN) > 5 * colours(counts[0.0], *GREEN)
    assert colours(counts[0.0], *RED) > 5 * colours(counts[1.0], *RED)


def test_images_without_contrast_are_no_fault(tmp_path):
    blank = episode(2, 1, 1)._replace(support_images=np.zeros((2, 1, 8, 8)))
    check(test_episodes([blank], tmp_path / "e.png", "t"))


def test_images_that_are_not_finite_are_drawn_all_the_same(tmp_path):
    for value in (np.nan, np.inf):
        odd = episode(2, 1, 1)._replace(query_images=np.full((2, 1, 8, 8), value))
        check(test_episodes([odd], tmp_path / "e.png", "t"))
        odd = odd._replace(support_images=np.full((2, 1, 8, 8), value))
        check(test_episodes([odd], tmp_path / "e.png", "t"))


@pytest.mark.parametrize("tasks", [1, 4, 5])
def test_regression_tasks(tmp_path, tasks):
    inputs = np.random.default_rng(0).uniform(-5, 5, (50, 1))
    task = RegressionPicture(
        inputs[:5], np.sin(inputs[:5]), inputs, np.sin(inputs), 0 * inputs, np.sin(inputs) + 0.1
    )
    path = regression_tasks([task] * tasks, tmp_path / "tasks.png", "sinusoid")
    check(path)


def test_a_picture_that_cannot_be_written_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*curves\.png \(No such file"):
        learning_curves([{"iteration": 1, "train_loss": 1.0}], tmp_path / "no" / "curves.png", "t")
