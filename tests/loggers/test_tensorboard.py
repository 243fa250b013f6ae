"""TensorBoard event files: scalars, images, resuming."""

import time

import numpy as np
import pytest
from example_runs import example_run, log_run

from metadist.errors import UserError
from metadist.loggers import TensorBoardLogger


def read_events(directory):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory / "tensorboard"))
    events.Reload()
    return events


def test_resumed_run_has_each_scalar_once(tmp_path, capfd):
    log_run(TensorBoardLogger(), tmp_path, 0, 4, {"task": {"ways": 5}})
    time.sleep(1.1)  # event files are ordered by the second in their names
    log_run(TensorBoardLogger(), tmp_path, 2, 6, {"task": {"ways": 5}}, finish=True)
    assert capfd.readouterr() == ("", "")
    events = read_events(tmp_path)
    assert sorted(events.Tags()["scalars"]) == [
        "test/accuracy",
        "train/loss",
        "validation/accuracy",
    ]
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0), (5, 25.0), (6, 26.0)]
    assert [(event.step, event.value) for event in events.Scalars("test/accuracy")] == [(6, 0.75)]
    (image,) = events.Images("learning_curves")
    assert image.step == 6 and image.width > 400
    assert "configuration/text_summary" in events.Tags()["tensors"]


def test_restart_before_the_first_checkpoint_hides_earlier_events(tmp_path):
    log_run(TensorBoardLogger(), tmp_path, 0, 4)
    time.sleep(1.1)  # event files are ordered by the second in their names
    log_run(TensorBoardLogger(), tmp_path, 0, 2)
    assert [event.step for event in read_events(tmp_path).Scalars("train/loss")] == [1, 2]


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
