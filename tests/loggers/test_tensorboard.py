"""TensorBoard event files: scalars, images, resuming."""

import io
import time

import numpy as np
import pytest
from example_runs import example_run, log_run
from PIL import Image

from metadist.errors import UserError
from metadist.loggers import TensorBoardLogger


def read_events(directory, run="."):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard" / run))
    events.Reload()
    return events


def test_resumed_run_has_each_scalar_once(tmp_path, capfd):
    log_run(TensorBoardLogger(), tmp_path, 0, 4, {"task": {"ways": 5}})
    time.sleep(1.1)  # event files are ordered by the second in their names
    results = {"ci95": 0.25}
    log_run(TensorBoardLogger(), tmp_path, 2, 6, {"task": {"ways": 5}}, True, results)
    assert capfd.readouterr() == ("", "")
    events = read_events(tmp_path)
    assert sorted(events.Tags()["scalars"]) == [
        "test/accuracy",
        "test/ci95",
        "train/loss",
        "validation/accuracy",
    ]
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0), (5, 25.0), (6, 26.0)]
    assert [(event.step, event.value) for event in events.Scalars("test/accuracy")] == [(6, 0.75)]
    (image,) = events.Images("learning_curves")
    assert image.step == 6 and image.width > 400
    texts = {}
    for name in ("run", "configuration", "results"):
        newest = events.Tensors(f"{name}/text_summary")[-1]
        texts[name] = newest.step, newest.tensor_proto.string_val[0].decode()
    assert texts["run"] == (2, "MAML on glyphs")
    assert texts["configuration"][0] == 2 and '"ways": 5' in texts["configuration"][1]
    assert texts["results"][0] == 6 and '"test_accuracy": 0.75' in texts["results"][1]


def test_restart_before_the_first_checkpoint_hides_earlier_events(tmp_path):
    log_run(TensorBoardLogger(), tmp_path, 0, 4)
    time.sleep(1.1)  # event files are ordered by the second in their names
    log_run(TensorBoardLogger(), tmp_path, 0, 2)
    assert [event.step for event in read_events(tmp_path).Scalars("train/loss")] == [1, 2]


def test_long_runs_are_thinned_but_for_their_validations(tmp_path):
    logger = TensorBoardLogger()
    logger.start(example_run(tmp_path, iterations=15_000))
    for iteration in range(1, 11):
        logger.log_metrics({"iteration": iteration, "train_loss": 1.0})
    logger.log_metrics({"iteration": 10, "validation_accuracy": 0.5})
    logger.close()
    events = read_events(tmp_path)
    assert [event.step for event in events.Scalars("train/loss")] == [3, 6, 9]
    assert [event.step for event in events.Scalars("validation/accuracy")] == [10]


def test_unwritable_directory_is_a_user_error(tmp_path):
    (tmp_path / "tensorboard").touch()
    logger = TensorBoardLogger()
    with pytest.raises(UserError, match=r"cannot write .*tensorboard"):
        logger.start(example_run(tmp_path))
    logger.close()


def test_numpy_scalars_become_scalars_and_booleans_are_left_out(tmp_path):
    logger = TensorBoardLogger()
    logger.start(example_run(tmp_path))
    logger.log_metrics({"iteration": np.int64(1), "train_loss": np.float32(0.5), "ok": True})
    logger.close()
    events = read_events(tmp_path)
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5)]


def test_validations_have_histograms_and_images_and_the_run_its_hyperparameters(tmp_path):
    logger = TensorBoardLogger()
    logger.start(example_run(tmp_path, configuration={"task": {"ways": 5, "name": "a"}}))
    image = tmp_path / "validation_tasks.png"
    for iteration, level in ((2, 50), (4, 200)):
        Image.new("RGB", (8, 6), (level, 0, 0)).save(image)
        values = {"validation_accuracy": [0.25, 0.75, float("nan")], "validation_loss": [1e30]}
        logger.log_panels(iteration, values, [image])
    logger.close()
    events = read_events(tmp_path)
    assert logger.shows_panels and events.Tags()["images"] == ["validation/tasks"]
    assert [(each.step, each.height) for each in events.Images("validation/tasks")] == [
        (2, 6),
        (4, 6),
    ]
    for image, level in zip(events.Images("validation/tasks"), (50, 200), strict=True):
        pixels = Image.open(io.BytesIO(image.encoded_image_string))
        assert pixels.getpixel((0, 0)) == (level, 0, 0)
    (newest,) = events.Histograms("validation/accuracy_of_tasks")
    assert (newest.histogram_value.num, newest.histogram_value.sum) == (2, 1.0)
    plugin = events.SummaryMetadata("_hparams_/session_start_info").plugin_data
    assert plugin.plugin_name == "hparams" and b"task.ways" in plugin.content


def test_a_continued_run_has_the_metrics_by_inner_steps_of_its_last_test(tmp_path):
    for start, means in ((0, [0.25, 0.5, 0.625]), (6, [0.25, 0.75])):
        if start:
            time.sleep(1.1)  # event files are ordered by the second in their names
        logger = TensorBoardLogger()
        logger.start(example_run(tmp_path, start))
        rows = [{"steps": steps, "mean": mean, "ci95": 0.1} for steps, mean in enumerate(means)]
        logger.finish({"iterations": start + 6, "test_accuracy_by_steps": rows}, [])
        logger.close()
    events = read_events(tmp_path, "inner_steps")
    assert events.Tags()["scalars"] == ["test/accuracy_by_steps"]
    points = [(each.step, each.value) for each in events.Scalars("test/accuracy_by_steps")]
    assert points == [(0, 0.25), (1, 0.75)]
    assert read_events(tmp_path).Tags()["scalars"] == []
