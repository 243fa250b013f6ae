"""A run's profile: phases that add up to the step, a trace of each rank, and no trace without."""

import gzip
import json
import threading
import time
from pathlib import Path

import pytest
import torch
from tiny import build, records, train, without_times
from worlds import run_world

from metadist.distributed.phases import finish_recording, get_ready_to_record, phase, recorded
from metadist.errors import UserError
from metadist.training import profiling, run
from metadist.training.profiling import CLOCKED, TRACED, WARM_UP, in_a_step, table_of

STEPS = WARM_UP + CLOCKED + TRACED
QUICK = ("trainer.profile=true", "trainer.iterations=4", "trainer.eval_every=0")


def phases_of(directory: Path) -> dict[str, dict[str, float]]:
    return json.loads((directory / "profile/phases.json").read_text())["seconds_a_step_by_rank"]


def ranges_of(directory: Path, rank: int) -> list[str]:
    with gzip.open(directory / f"profile/rank{rank}.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    return [event["name"] for event in events if event.get("cat") == "user_annotation"]


def profiled(directory: str, *overrides: str) -> None:
    """A run whose profile is of a single step of each kind; what a test's ranks do."""
    profiling.WARM_UP = profiling.CLOCKED = profiling.TRACED = 1
    train(directory, *QUICK, *overrides)


def test_a_profile_changes_no_number_and_is_shown_at_the_end(tmp_path, capsys):
    train(str(tmp_path / "plain"), "strategy=local", *QUICK, "trainer.profile=false")
    assert "step" not in capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WARM_UP", "CLOCKED", "TRACED"):
            patch.setattr(profiling, name, 1)
        profiled(str(tmp_path / "profiled"), "strategy=local")
    shown = capsys.readouterr().out
    assert without_times(records(tmp_path / "plain")) == without_times(
        records(tmp_path / "profiled")
    )
    assert not (tmp_path / "plain" / "profile").exists()
    table = (tmp_path / "profiled/profile/table.txt").read_text()
    assert table in shown
    (phases,) = phases_of(tmp_path / "profiled").values()
    for name in ("data", "support", "adapt", "query", "backward", "reduce", "outer step", "log"):
        assert phases[name] > 0 and name in table
    first, second, *_ = (record["seconds"] for record in records(tmp_path / "profiled"))
    # What the record counts begins and ends before the log, not behind it.
    assert abs(sum(phases.values()) - (second - first)) < 0.1


@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_every_rank_writes_a_trace_and_has_a_column(tmp_path, strategy):
    run_world(profiled, 2, str(tmp_path), f"strategy={strategy}", "trainer.tasks_at_once=1")
    found = phases_of(tmp_path)
    assert list(found) == ["0", "1"]
    # Of 5 tasks one worker has 3 and the other 2.
    for rank, tasks in ((0, 3), (1, 2)):
        names = ranges_of(tmp_path, rank)
        assert [names.count(n) for n in ("support", "adapt", "query", "backward")] == 4 * [tasks]
        assert names.count("data") >= tasks
        assert all(found[str(rank)][name] > 0 for name in ("data", "query", "backward"))
        assert all(seconds >= 0 for seconds in found[str(rank)].values())
        # Rank zero, which has more to do, need not wait for the other's answer.
        assert found[str(rank)]["wait"] > 0 or (strategy, rank) == ("rpc", 0)
    assert (found["0"]["send"] > 0) == (strategy == "rpc") and found["1"]["send"] == 0


def test_distributed_autograd_has_a_profile_too(tmp_path):
    run_world(profiled, 2, str(tmp_path), "strategy=rpc", "strategy.gradient=dist_autograd")
    found = phases_of(tmp_path)
    assert found["0"]["backward"] > 0 and all(found[rank]["query"] > 0 for rank in "01")


def test_too_short_a_run_is_refused(tmp_path):
    experiment = build(tmp_path, "strategy=local", "trainer.profile=true", "trainer.iterations=4")
    with pytest.raises(UserError, match=f"trainer.iterations={STEPS} or more"):
        run(experiment)


def test_seconds_of_a_phase_are_without_those_inside_it(tmp_path, monkeypatch):
    clock = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with recorded("clock"):  # begins at 0, "other" at 1
        with phase("data"), phase("log"):  # at 3 and at 6
            pass  # they end at 10 and 15
        torch.zeros(1)
    assert finish_recording(tmp_path / "none") == {
        "other": 2.0 + 6.0,
        "data": 3.0 + 5.0,
        "log": 4.0,
    }
    assert finish_recording(tmp_path / "none")["log"] == 4.0 and not any(tmp_path.iterdir())
    get_ready_to_record()
    assert finish_recording(tmp_path / "none") == {}


def test_a_share_that_is_done_while_others_are_still_sent_to_counts_once(tmp_path):
    def share() -> None:
        with recorded("clock"), phase("data"):
            time.sleep(0.02)

    started = time.perf_counter()
    with recorded("clock"), phase("send"):
        worker = threading.Thread(target=share)
        worker.start()
        worker.join()
    took = time.perf_counter() - started
    seconds = finish_recording(tmp_path / "none")
    assert seconds["wait"] == 0 and seconds["data"] >= 0.02
    assert all(s >= 0 for s in seconds.values()) and 0.02 <= sum(seconds.values()) <= took


def test_nothing_is_recorded_outside_a_recorded_step(tmp_path):
    get_ready_to_record()
    with recorded("no"), phase("data"):
        pass
    assert finish_recording(tmp_path / "none") == {}


def test_what_a_rank_does_not_do_it_waits():
    nothing = [0.0] * 12
    found = in_a_step({1: [*nothing[:-1], 2.0], 0: [*nothing[:-1], 6.0]}, steps=2)
    assert found[1]["wait"] == 2.0 and found[1]["other"] == 1.0 and found[0]["wait"] == 0.0
    assert "wait" in table_of(found, 2) and "data" not in table_of(found, 2)
    assert "3000.00  100.0%" in table_of(found, 2)
