"""`test_tasks.json`: the images and points of the tasks that a report shows."""

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image
from tiny import build

from metadist import plots
from metadist.reports import (
    TEST_PREDICTIONS_FILE,
    read_test_predictions,
    run_report,
    write_test_predictions,
)
from metadist.tasks import SPLITS, FewShotTasks, ImageClasses, task_keys
from metadist.training import Trainer
from metadist.training.example_tasks import write_test_tasks

SHORT = ("strategy=local", "trainer.iterations=1", "trainer.eval_every=0")


def test_images_are_those_of_the_hardest_and_the_median_tasks(tmp_path):
    x = build(tmp_path, *SHORT, "trainer.report=true", "trainer.eval_seed=9")
    Trainer(x).run()
    records = read_test_predictions(tmp_path)
    content = json.loads((tmp_path / "test_tasks.json").read_text())
    shown = {kind: [task["task"] for task in tasks] for kind, tasks in content.items()}
    order = sorted(records, key=lambda each: (each["accuracy"], -each["loss"]))
    numbers = [each["task"] for each in order]
    assert shown == {"hardest": numbers[:3], "typical": numbers[2:5]}  # of seven
    for task in content["hardest"]:
        key = task_keys(
            x.trainer_config.eval_seed, "test", 0, range(task["task"], task["task"] + 1)
        )[0]
        episode = x.tasks.sample(key)
        assert task["support"]["labels"] == [0, 1, 2]
        assert task["query"]["indices"] == list(range(6))  # two queries of three ways
        for part, images in (("support", task["support"]), ("query", task["query"])):
            for image, inputs in zip(images["images"], getattr(episode, part).inputs, strict=True):
                encoded = image.removeprefix("data:image/png;base64,")
                pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(encoded))))
                expected = (inputs[0] - inputs.min()) / (inputs.max() - inputs.min())
                np.testing.assert_allclose(pixels / 255, expected.numpy(), atol=1 / 255)
    html = (tmp_path / "report.html").read_text()
    assert all(task["query"]["images"][0] in html for task in content["hardest"])


def test_points_are_those_of_the_tasks(tmp_path):
    overrides = ["dataset=sinusoid", "model=mlp", "model.hidden=[8]", "model.batch_norm=false"]
    omit = ("++dataset", "model.filters", "task.ways")
    x = build(tmp_path, *SHORT, "trainer.report=true", "callbacks=ema", *overrides, omit=omit)
    Trainer(x).run()
    task = json.loads((tmp_path / "test_tasks.json").read_text())["hardest"][0]
    records = {each["task"]: each for each in read_test_predictions(tmp_path)}
    assert records[task["task"]]["mse"] == max(each["mse"] for each in records.values())
    key = task_keys(x.trainer_config.eval_seed, "test", 0, range(task["task"], task["task"] + 1))[0]
    episode = x.tasks.sample(key)
    assert task["inputs"] == episode.query.inputs.ravel().tolist()
    assert task["support"] == [each.ravel().tolist() for each in episode.support]
    assert task["before"] == pytest.approx(
        x.evaluated_learner.model(episode.query.inputs).detach().ravel().tolist()
    )
    assert f'"task-hardest-{task["task"]}"' in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(
    "error",
    [pytest.param(ImportError("no plotly"), marks=pytest.mark.slow), ValueError("a defect")],
)
def test_a_report_that_cannot_be_written_does_not_make_the_run_fail(
    tmp_path, monkeypatch, caplog, error
):
    def fail(directory):
        raise error

    monkeypatch.setattr(run_report, "write_run_report", fail)
    results = Trainer(build(tmp_path, *SHORT, "trainer.report=true")).run()
    assert results["test_tasks"] == 7 and (tmp_path / "results.json").exists()
    assert not (tmp_path / "report.html").exists()
    assert f"could not be made: {error} (metadist report {tmp_path} writes it later)" in caplog.text


def test_plots_that_cannot_be_drawn_do_not_make_the_run_fail(tmp_path, monkeypatch, caplog):
    def fail(*arguments):
        raise ValueError("a defect")

    monkeypatch.setattr(plots, "plot_learning_curves", fail)
    results = Trainer(build(tmp_path, *SHORT, "trainer.report=true")).run()
    assert results["test_tasks"] == 7 and (tmp_path / "report.html").exists()
    assert "the run's plots could not be made: a defect" in caplog.text


def test_plots_and_report_may_be_left_out_and_follow_on_resume(tmp_path):
    Trainer(build(tmp_path, *SHORT, "trainer.report=false")).run()
    files = {"learning_curves.png", "test_tasks.png", "test_tasks.json", "report.html"}
    assert not files & {path.name for path in tmp_path.iterdir()}
    Trainer(build(tmp_path, *SHORT, "trainer.report=true", "resume=auto")).run()
    assert files <= {path.name for path in tmp_path.iterdir()}


def test_of_many_color_images_some_of_each_class_are_saved_small(tmp_path):
    x = build(tmp_path, "strategy=local")
    ramps = np.add.outer(np.arange(96) * 2, np.arange(120)).clip(0, 255)  # (height, width)
    images = np.broadcast_to(ramps, (15, 16, 3, 96, 120)).astype(np.uint8)
    splits = {split: np.arange(5) + 5 * index for index, split in enumerate(SPLITS)}
    x.tasks = FewShotTasks(ImageClasses("ramps", images, splits), 5, 6, 10)
    record = {"task": 0, "accuracy": 0.5, "loss": 1.0}
    write_test_predictions(tmp_path / TEST_PREDICTIONS_FILE, [record])
    (task,) = json.loads(write_test_tasks(x).read_text())["hardest"]
    assert task["query"]["indices"] == [10 * c + i for c in range(5) for i in range(4)]
    assert task["support"]["labels"] == [c for c in range(5) for _ in range(5)]
    image = task["query"]["images"][0].removeprefix("data:image/jpeg;base64,")
    thumbnail = Image.open(io.BytesIO(base64.b64decode(image)))
    assert (thumbnail.format, thumbnail.size) == ("JPEG", (84, 67))
    whole = Image.fromarray(((ramps - ramps.min()) / np.ptp(ramps) * 255).astype(np.uint8))
    expected = np.asarray(whole.resize(thumbnail.size)).astype(float)
    assert np.abs(np.asarray(thumbnail).astype(float)[..., 0] - expected).mean() < 4
