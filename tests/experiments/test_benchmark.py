"""The benchmark's bookkeeping, and the cost model of scaling against costs that are known."""

import json
import math
import sys
import time

import pytest
from tiny import CONF

sys.path.insert(0, str(CONF.parent / "experiments"))
from benchmarks import overhead, rounds, scaling
from benchmarks.cost_model import Costs, Step, fit, non_negative
from benchmarks.programs import PROGRAMS, RIVAL, Failed, Program, Setting, installed, run, speed
from benchmarks.scaling import elsewhere
from benchmarks.scaling_tables import Extension, markdown, picture, tables
from benchmarks.tables import cells, ratio

EXPERIMENTS = CONF.parent / "experiments"
SETTING = Setting(8, 1, 15, 5, "max", 2)
COSTS = Costs(
    (2e-3, 3e-6, 1e-8), (1e-3, 5e-9), (1e-4, 3e-4, 2e-9), (2e-4, 4e-9, 1e-4, 3e-9), sharing=0.2
)
CORES = 3


def steps_of(costs: Costs) -> list[Step]:
    found = []
    for parameters in (10_000, 100_000, 400_000):
        for tasks in (4, 16):
            seconds = costs.step("local", 1, tasks, parameters)
            found.append(Step("local", 1, tasks, parameters, seconds))
        for strategy in ("rpc", "allreduce"):
            for workers in (1, 2, 3):
                seconds = costs.messages(strategy, workers, parameters)
                found.append(Step(strategy, workers, 0, parameters, seconds))
                seconds = costs.step(strategy, workers, 8, parameters, CORES)
                found.append(Step(strategy, workers, 8, parameters, seconds))
    return found


def test_fitting_finds_the_costs_that_made_the_steps():
    found = fit(steps_of(COSTS), CORES)
    for mine, true in zip(found, COSTS, strict=True):
        assert mine == pytest.approx(true, rel=1e-6)
    for workers in (8, 64, 1024):
        for strategy in ("rpc", "allreduce"):
            true = COSTS.step(strategy, workers, 4 * workers, 100_000)
            assert found.step(strategy, workers, 4 * workers, 100_000) == pytest.approx(true)


def test_a_figure_that_would_be_negative_is_zero():
    # 3 - 0.5 x by measurement: the best line that does not fall is flat.
    rows, seconds = [(1.0, x) for x in (1.0, 2.0, 3.0)], [2.5, 2.0, 1.5]
    constant, slope = non_negative(rows, seconds)
    flat = sum(1 / s for s in seconds) / sum(1 / s**2 for s in seconds)
    assert slope == 0 and constant == pytest.approx(flat)
    with pytest.raises(ValueError, match="1 measurements"):
        non_negative(rows[:1], seconds[:1])


def test_rank_zero_is_the_bottleneck_where_its_messages_take_as_long_as_the_tasks():
    limit = COSTS.rank_zero_limit(4, 100_000)
    # 4 tasks of 3 ms and of 3 µs a square root, against 0.1 ms and 0.5 ms a worker.
    assert limit == pytest.approx((12e-3 + 12e-6 * math.sqrt(100_000) - 1e-4) / 5e-4)
    assert COSTS._replace(rpc=(1e-4, 0.0, 0.0)).rank_zero_limit(4, 100_000) == math.inf
    extension = Extension(COSTS, [8, 1024], 4, [100_000])
    assert extension.advice(1024, 100_000) == "allreduce"
    ((parameters, from_workers, few, many),) = extension.rows()
    assert (parameters, from_workers) == ("100,000", "32")
    assert many.startswith("3% / ") and many.endswith("allreduce") and few.startswith("81% / ")


def test_more_workers_than_cores_stretch_the_computation_alone():
    both = COSTS.step("rpc", 2, 8, 10_000, cores=2)
    crowded = COSTS.step("rpc", 4, 16, 10_000, cores=2)
    more = COSTS.messages("rpc", 4, 10_000) - COSTS.messages("rpc", 2, 10_000)
    assert crowded - both == pytest.approx(1.2 * COSTS.computation(4, 10_000) + more)
    apart = COSTS.step("rpc", 2, 8, 10_000)
    assert both - apart == pytest.approx(0.2 * COSTS.computation(4, 10_000))


def test_another_network_adds_latency_and_bounds_bandwidth():
    there = elsewhere(COSTS, 50.0, 1.0)
    assert there.rpc == pytest.approx((2e-4, 3e-4, 12e-9))
    assert there.allreduce == pytest.approx((2e-4, 4e-9, 1.5e-4, 8e-9))
    assert elsewhere(COSTS, None, 100.0) == COSTS


def test_scaling_is_drawn_and_written(tmp_path):
    extension = Extension(COSTS, [8, 64, 1024], 4, [10_000, 400_000])
    assert len(tables(steps_of(COSTS), COSTS, extension, 2)) > 4
    assert "| 400,000 |" in markdown(extension) and "Assumed: " in markdown(extension)
    picture(steps_of(COSTS), COSTS, extension, 2, tmp_path / "scaling.png")
    assert (tmp_path / "scaling.png").stat().st_size > 10_000


def test_ratios_are_medians_of_rounds_and_a_run_without_result_is_named(tmp_path):
    found = {RIVAL: [1.0, 2.0, 4.0], "a": [3.0, 4.0, 4.0], "b": [2.0, None, None]}
    assert ratio(found, "a") == 2.0  # of 3, 2 and 1
    assert cells({"s": found}, "a", 9) == ["4.0 (2.00)"]
    assert cells({"s": found}, "b", 9) == ["2.0 (2.00); no result within 9 s"]
    figures = {"T8 K1 Q15 S5 max": found}
    rounds.save(tmp_path, figures, 9)
    assert json.loads((tmp_path / "benchmark.json").read_text())["tasks_per_second"] == figures
    assert "no result within 9 s" in (tmp_path / "benchmark.md").read_text()
    assert (tmp_path / "benchmark.png").stat().st_size > 5_000


def test_what_hangs_is_killed_and_not_started_again(tmp_path):
    note = tmp_path / "pid"
    words = f"import os, pathlib, time; pathlib.Path({str(note)!r}).write_text(str(os.getpid()))"
    command = [sys.executable, "-c", f"{words}; time.sleep(60)"]
    started = []

    def measure(setting: Setting, patience: float) -> float:
        started.append(setting)
        return float(run(command, patience))

    so_far: list = []
    for _ in range(2):
        said = rounds.one(Program("sleeper", measure), SETTING, so_far, patience=1.0)
        assert said in ("no result: killed after 1 s", "not started again")
    assert len(started) == 1 and so_far == [None, None]
    with pytest.raises(ProcessLookupError):
        _signal(int(note.read_text()))
    with pytest.raises(Failed, match="killed after"):
        run(command, 0.3)


def test_what_fails_is_named_and_the_others_go_on():
    def measure(setting: Setting, patience: float) -> float:
        return float(run([sys.executable, "-c", "raise ValueError('no luck')"], patience))

    so_far: list = []
    said = rounds.one(Program("unlucky", measure), SETTING, so_far, patience=60.0)
    assert "no luck" in said and so_far == [None]


def _signal(number: int) -> None:
    import os

    time.sleep(0.05)
    os.kill(number, 0)


def test_speed_counts_whole_steps_behind_the_warm_up(tmp_path):
    lines = [{"train_loss": 1, "seconds": s} for s in (9.0, 10.0, 11.0, 13.0, 15.0)]
    text = "\n".join(map(json.dumps, [*lines, {"validation_loss": 1}]))
    (tmp_path / "metrics.jsonl").write_text(text)
    assert speed(tmp_path, SETTING) == 8 * 2 / 4.0


@pytest.mark.slow
def test_all_rivals_do_the_same(monkeypatch):
    printed: list[str] = []

    def run_and_keep(command: list[str], patience: float) -> str:
        printed.append(run(command, patience))
        return printed[-1]

    monkeypatch.setattr("benchmarks.programs.run", run_and_keep)
    monkeypatch.setattr("benchmarks.programs.WARM_UP", 1)
    for program in PROGRAMS:
        if not program.name.startswith("metadist") and installed(program.needs):
            program.measure(Setting(2, 1, 1, 2, "stride", 1), 120)
    # Of the second step, so that the first one's gradient counts.
    losses = [json.loads(each.splitlines()[-1])["loss"] for each in printed]
    assert losses == pytest.approx([losses[0]] * len(losses), rel=1e-3)


@pytest.mark.parametrize("module", [rounds, scaling, overhead])
def test_how_a_door_is_used_is_said(module, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["door", "--help"])
    with pytest.raises(SystemExit) as leaving:
        module.main()
    name = "benchmark" if module is rounds else module.__name__.rpartition(".")[2]
    assert leaving.value.code == 0
    assert f"python experiments/{name}.py" in capsys.readouterr().out
    assert (EXPERIMENTS / f"{name}.py").exists()
