"""`trainer.profile=true`: a trace and a table of every rank, and the same numbers."""

import gzip
import json
from pathlib import Path

import pytest
from tiny import build, records, train, without_times
from worlds import run_world

from metadist.errors import UserError
from metadist.training import Callback
from metadist.training.profiling import ACTIVE, WAIT, WARMUP

STEPS = WAIT + WARMUP + ACTIVE
QUICK = (
    *("trainer.profile=true", f"trainer.iterations={STEPS}", "trainer.eval_every=0"),
    *("trainer.eval_tasks=1", "trainer.checkpoint_every=0"),
)


def ranges_of(directory: Path, rank: int) -> list[tuple[str, float]]:
    """Names and milliseconds."""
    with gzip.open(directory / f"profile/rank{rank}.trace.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    ranges = [event for event in events if event.get("cat") == "user_annotation"]
    return [(event["name"], event["dur"] / 1000) for event in ranges]


def test_a_profile_changes_no_number_and_is_printed_at_the_end(tmp_path, capsys):
    train(str(tmp_path / "plain"), "strategy=local", *QUICK, "trainer.profile=false")
    assert "ms a step" not in capsys.readouterr().out
    train(str(tmp_path / "profiled"), "strategy=local", *QUICK)
    printed = capsys.readouterr().out
    assert without_times(records(tmp_path / "plain")) == without_times(
        records(tmp_path / "profiled")
    )
    assert not (tmp_path / "plain" / "profile").exists()
    table = (tmp_path / "profiled/profile/rank0.txt").read_text()
    assert table.strip() in printed
    rows = dict(line.split() for line in table.splitlines()[2:])
    names = ("data", "forward", "inner_gradient", "backward", "reduce", "optimizer_step", "log")
    for name in names:
        assert 0 < float(rows[name]) <= float(rows["train_step"])
    ranges = ranges_of(tmp_path / "profiled", 0)
    whole = sum(duration for name, duration in ranges if name == "metadist::train_step")
    assert float(rows["train_step"]) == pytest.approx(whole / ACTIVE, rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_every_rank_writes_a_trace(tmp_path, strategy):
    run_world(train, 2, str(tmp_path), f"strategy={strategy}", "trainer.task_chunk_size=1", *QUICK)
    # Of 5 tasks one worker has 3 and the other 2.
    for rank, tasks in ((0, 3), (1, 2)):
        names = [name for name, _ in ranges_of(tmp_path, rank)]
        for name in ("metadist::forward", "metadist::backward"):
            assert names.count(name) == ACTIVE * tasks, (rank, name)
        assert (tmp_path / f"profile/rank{rank}.txt").exists()


def test_a_run_that_is_too_short_is_refused(tmp_path):
    with pytest.raises(UserError, match=rf"trainer\.iterations={STEPS} or more"):
        build(tmp_path, "strategy=local", "trainer.profile=true", "trainer.iterations=4")


class StopsEarly(Callback):
    def on_iteration_end(self, trainer, output):
        trainer.state.should_stop = trainer.state.iteration == 2


def test_a_profile_that_is_not_complete_is_not_written(tmp_path, capsys):
    stop = f"+callbacks.stop._target_={__name__}.StopsEarly"
    train(str(tmp_path), "strategy=local", "trainer.profile=true", "trainer.iterations=9", stop)
    assert "no profile, because training ended after 2 steps" in capsys.readouterr().out
    assert not (tmp_path / "profile").exists()
