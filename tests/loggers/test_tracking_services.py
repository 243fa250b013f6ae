"""TensorBoard, Weights & Biases, and several trackers as one."""

import os
import subprocess
import sys
import time
import typing

import numpy as np
import pytest

from metadist.errors import UserError
from metadist.loggers import (
    Console,
    JsonLines,
    Run,
    TensorBoard,
    Tracker,
    Trackers,
    WeightsAndBiases,
)
from metadist.plots import learning_curves

KEY = "0123456789abcdef0123456789abcdef01234567"


def run(directory, start_iteration=0, configuration=None):
    return Run(directory, "maml", configuration or {}, 6, start_iteration, "MAML on glyphs")


def drive(tracker, directory, start, stop, configuration=None, finish=False):
    tracker.start(run(directory, start, configuration))
    for iteration in range(start + 1, stop + 1):
        tracker.record({"iteration": iteration, "train_loss": 10.0 * start + iteration, "s": "x"})
    tracker.record({"iteration": stop, "validation_accuracy": 0.5})
    if finish:
        records = [{"iteration": 1, "train_loss": 1.0}]
        picture = learning_curves(records, directory / "learning_curves.png", "title")
        tracker.finish({"test_accuracy": 0.75, "protocol": {"ways": 5}}, [picture])
    tracker.close()
    tracker.close()


def test_tensorboard_reads_back_and_a_resume_leaves_no_figure_twice(tmp_path, capfd):
    drive(TensorBoard(), tmp_path, 0, 4, {"task": {"ways": 5}})
    time.sleep(1.1)  # event files are ordered by the second in their names
    drive(TensorBoard(), tmp_path, 2, 6, {"task": {"ways": 5}}, finish=True)
    assert capfd.readouterr() == ("", "")

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["train_loss", "validation_accuracy"]
    losses = [(event.step, event.value) for event in events.Scalars("train_loss")]
    assert losses == [(1, 1.0), (2, 2.0), (3, 23.0), (4, 24.0), (5, 25.0), (6, 26.0)]
    (image,) = events.Images("learning_curves")
    assert image.step == 6 and image.width > 400
    assert "configuration/text_summary" in events.Tags()["tensors"]


def test_tensorboard_of_a_run_that_died_before_its_first_checkpoint(tmp_path):
    drive(TensorBoard(), tmp_path, 0, 4)
    time.sleep(1.1)  # event files are ordered by the second in their names
    drive(TensorBoard(), tmp_path, 0, 2)

    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("train_loss")] == [1, 2]


def test_what_is_flushed_outlives_the_process(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        trackers = Trackers([JsonLines(), TensorBoard()])
        trackers.start(run(tmp_path))
        trackers.record({"iteration": 1, "train_loss": 0.5})
        trackers.flush()
        os.write(writer, b"x")
        os._exit(0)  # as if killed: nothing is closed
    assert os.read(reader, 1) == b"x"
    os.waitpid(child, 0)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train_loss" in events.read_bytes()
    assert b"train_loss" in (tmp_path / "metrics.jsonl").read_bytes()


def test_notes_reach_a_person_if_there_is_a_console(tmp_path, capsys):
    assert not Trackers([JsonLines(), Tracker()]).note("a task went wrong")
    both = Trackers([Console(), JsonLines()])
    both.start(run(tmp_path))
    assert both.note("a task went wrong")
    both.close()
    assert "warning: a task went wrong\n" in capsys.readouterr().out


def test_tensorboard_that_cannot_write_says_so(tmp_path):
    (tmp_path / "tensorboard").touch()
    tracker = TensorBoard()
    with pytest.raises(UserError, match=r"cannot write .*tensorboard"):
        tracker.start(run(tmp_path))
    tracker.close()


def test_wandb_offline_goes_on_with_the_same_run_and_keeps_the_key(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("WANDB_API_KEY", KEY)
    configuration = {"task": {"ways": 5}, "secrets": [f"key {KEY}"]}
    drive(WeightsAndBiases(), tmp_path, 0, 4, configuration)
    run_id = (tmp_path / "wandb_run_id").read_text()
    drive(WeightsAndBiases(tags=("a",)), tmp_path, 2, 6, configuration, finish=True)
    assert capfd.readouterr() == ("", "")

    assert (tmp_path / "wandb_run_id").read_text() == run_id
    runs = list((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert all(run_id.strip() in path.name for path in runs)
    contents = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"train_loss" in content for content in contents)  # they can be searched
    assert not any(KEY.encode() in content for content in contents)


def test_wandb_online_without_a_login_does_not_ask(tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("HOME", str(tmp_path))
    tracker = WeightsAndBiases(mode="online")
    with pytest.raises(UserError, match="no login for Weights & Biases"):
        tracker.start(run(tmp_path))
    tracker.close()


def test_trackers_are_told_in_order_and_all_closed():
    told = []

    class Teller(Tracker):
        def __init__(self, name, fails=False):
            self.name, self.fails = name, fails

        def start(self, run):
            told.append(f"start {self.name}")

        def record(self, record):
            told.append(f"record {self.name}")

        def finish(self, results, pictures):
            told.append(f"finish {self.name}")

        def close(self):
            told.append(f"close {self.name}")
            if self.fails:
                raise RuntimeError("a fault")

    trackers = Trackers([Teller("a", fails=True), Teller("b"), Tracker()])
    trackers.start(None)
    trackers.record({"iteration": 1})
    trackers.finish({}, [])
    trackers.close()
    assert told == [
        f"{what} {who}" for what in ("start", "record", "finish", "close") for who in "ab"
    ]


@pytest.mark.parametrize("tracker", [JsonLines, Console, TensorBoard, WeightsAndBiases])
def test_close_is_safe_before_start_and_parameters_are_typed(tracker):
    tracker().close()
    typing.get_type_hints(tracker.__init__)


def test_importing_the_layer_imports_nothing_heavy():
    code = (
        "import sys, metadist.loggers; "
        "heavy = {'matplotlib', 'tensorboard', 'wandb', 'rich.live'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=os.environ
    )
    assert out.stdout.strip() == "[]", out.stderr


def test_figures_of_numpy_are_figures(tmp_path):
    tracker = TensorBoard()
    tracker.start(run(tmp_path))
    tracker.record({"iteration": np.int64(1), "train_loss": np.float32(0.5), "ok": True})
    tracker.close()
