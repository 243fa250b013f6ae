"""Plots of classification tasks."""

import numpy as np
import pytest
from png_files import GREEN, RED, check_png, count_color

from metadist.errors import UserError
from metadist.plots import ClassificationData, plot_test_tasks


def task(ways, shots, queries, channels=1, correct=1.0, seed=0):
    random = np.random.default_rng(seed)
    labels = np.repeat(np.arange(ways), queries)
    wrong = random.random(len(labels)) >= correct
    return ClassificationData(
        random.standard_normal((ways * shots, channels, 28, 28)).astype(np.float32),
        np.repeat(np.arange(ways), shots),
        random.standard_normal((ways * queries, channels, 28, 28)).astype(np.float32),
        labels,
        np.where(wrong, (labels + 1) % ways, labels),
    )


@pytest.mark.parametrize(
    ("ways", "shots", "queries", "channels"),
    [(5, 1, 15, 1), (20, 1, 15, 1), (5, 5, 15, 3), (2, 1, 1, 1), (30, 10, 1, 1)],
)
def test_tasks_of_every_shape(tmp_path, ways, shots, queries, channels):
    tasks = [task(ways, shots, queries, channels, seed=seed) for seed in range(2)]
    path = tmp_path / "tasks.png"
    assert plot_test_tasks(tasks, path, "tasks of the test split") == path
    check_png(path)


def test_correct_predictions_are_green_and_incorrect_ones_red(tmp_path):
    pixels = {
        correct: check_png(
            plot_test_tasks([task(5, 1, 15, correct=correct)], tmp_path / "t.png", "title")
        )
        for correct in (0.0, 1.0)
    }
    assert count_color(pixels[1.0], GREEN) > 5 * count_color(pixels[0.0], GREEN)
    assert count_color(pixels[0.0], RED) > 5 * count_color(pixels[1.0], RED)


def test_images_without_contrast(tmp_path):
    blank = task(2, 1, 1)._replace(support_images=np.zeros((2, 1, 8, 8)))
    check_png(plot_test_tasks([blank], tmp_path / "t.png", "title"))


def test_non_finite_images(tmp_path):
    for value in (np.nan, np.inf):
        images = np.full((2, 1, 8, 8), value)
        odd = task(2, 1, 1)._replace(query_images=images)
        check_png(plot_test_tasks([odd], tmp_path / "t.png", "title"))
        odd = odd._replace(support_images=images)
        check_png(plot_test_tasks([odd], tmp_path / "t.png", "title"))


def test_missing_folder_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot write .*t\.png \(No such file"):
        plot_test_tasks([task(2, 1, 1)], tmp_path / "no folder" / "t.png", "title")
