"""Plots of classification tasks."""

import numpy as np
import pytest
from PIL.ImageDraw import ImageDraw
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


@pytest.fixture
def texts(monkeypatch):
    """The texts that are drawn."""
    found, draw = [], ImageDraw.text

    def text(self, position, text, *arguments):
        found.append(text)
        draw(self, position, text, *arguments)

    monkeypatch.setattr(ImageDraw, "text", text)
    return found


def test_a_task_says_how_many_are_correct_and_what_is_shown(tmp_path, texts):
    five = task(5, 8, 4)
    five.predictions[:5] = (five.query_labels[:5] + 1) % 5
    plot_test_tasks([five], tmp_path / "t.png", "A title")
    assert {
        "A title",
        "Task 0",
        "75% correct",
        "adapted on 8 examples of each class, 5 are shown",
    } <= {*texts}
    assert "new images, 10 of 20 are shown" in texts
    # Two queries of each class, of which the first five are wrong.
    assert texts.count("B, not A") == 2 and texts.count("C, not B") == 1
    assert [texts.count(name) for name in "ABCDE"] == [1, 2, 3, 3, 3]  # with the support set's


def test_queries_of_many_classes_are_evenly_spaced(tmp_path, texts):
    plot_test_tasks([task(28, 1, 1)], tmp_path / "t.png", "title")
    shown = [name for name in texts if texts.count(name) == 2]
    assert [*dict.fromkeys(shown)] == ["A", "D", "G", "J", "M", "P", "S", "V", "Y", "AB"]


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
    with pytest.raises(UserError, match=r"t\.png \(No such file.*, or choose another directory\.$"):
        plot_test_tasks([task(2, 1, 1)], tmp_path / "no folder" / "t.png", "title")
