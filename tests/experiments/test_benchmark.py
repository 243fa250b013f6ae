"""The benchmarks: their tables and process handling, and the cost model on known costs."""

import json
import math
import os
import platform
import runpy
import sys
import time

import pytest
from benchmarks import baselines
from benchmarks.cost_model import (
    Costs,
    Step,
    all_reduce_path,
    fit,
    non_negative,
    rpc_path,
    with_network,
)
from benchmarks.overhead import profiled_ranges
from benchmarks.programs import (
    PROGRAMS,
    REFERENCE,
    SETTINGS,
    Program,
    ProgramFailed,
    Setting,
    installed,
    run,
    tasks_per_second,
    training,
)
from benchmarks.scaling_tables import Extrapolation, tables
from benchmarks.tables import cells, ratio
from commands import ROOT
from tiny import compose
from torch.profiler import ProfilerActivity, profile, record_function

from metadist.training.profiling import profile_table

SETTING = Setting(8, 1, 15, 5, "max", 2)
COSTS = Costs(
    (2e-3, 3e-6, 1e-8), (1e-3, 5e-9), (1e-4, 3e-4, 2e-9), (2e-4, 4e-9, 1e-4, 3e-9), sharing=0.2
)
CORES = 3


def steps_with(costs: Costs) -> list[Step]:
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


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_the_options_of_every_setting_exist(setting):
    command = training(setting, "run", 2, "strategy=local", "trainer.compile=false")
    overrides = command[command.index("+partition=dim0") :]
    given = [each for each in overrides if not each.startswith("hydra.")]
    configuration = compose(*given)
    assert configuration.trainer.meta_batch_size == setting.tasks
    if setting.model != "mlp":
        assert configuration.dataset.size == setting.size


def test_fit_recovers_the_costs_of_the_steps():
    found = fit(steps_with(COSTS), CORES)
    for fitted, true in zip(found, COSTS, strict=True):
        assert fitted == pytest.approx(true, rel=1e-6)
    for workers in (8, 64, 1024):
        for strategy in ("rpc", "allreduce"):
            true = COSTS.step(strategy, workers, 4 * workers, 100_000)
            assert found.step(strategy, workers, 4 * workers, 100_000) == pytest.approx(true)


def test_a_negative_coefficient_becomes_zero():
    # The measurements are 3 - 0.5 x; the best line with a non-negative slope is constant.
    rows, seconds = [(1.0, x) for x in (1.0, 2.0, 3.0)], [2.5, 2.0, 1.5]
    constant, slope = non_negative(rows, seconds)
    flat = sum(1 / s for s in seconds) / sum(1 / s**2 for s in seconds)
    assert slope == 0 and constant == pytest.approx(flat)
    with pytest.raises(ValueError, match="1 measurements"):
        non_negative(rows[:1], seconds[:1])


def test_the_limit_is_where_communication_exceeds_the_tasks():
    limit = COSTS.communication_limit(4, 100_000)
    # 4 tasks of 3 ms and 3 µs per square root.
    tasks = 12e-3 + 12e-6 * math.sqrt(100_000)
    before, at = (COSTS.messages("rpc", each, 100_000) for each in (limit - 1, limit))
    assert before <= tasks < at
    slow = COSTS._replace(rpc=(1e-4, 3e-3, 2e-9))
    assert slow.communication_limit(4, 100_000) == 5  # 0.1 ms and 3.2 ms per worker
    assert COSTS._replace(rpc=(1e-4, 0.0, 0.0)).communication_limit(4, 100_000) == math.inf
    extrapolation = Extrapolation(slow, [8, 1024], 4, [100_000])
    assert extrapolation.fastest(1024, 100_000) == "allreduce"
    ((parameters, found, few, many),) = extrapolation.rows()
    assert (parameters, found) == ("100,000", "5")
    assert many.endswith("allreduce") and few.startswith("40% / ")


def test_the_path_of_requests():
    assert rpc_path(1) == (1, 1)
    assert rpc_path(9) == rpc_path(9, math.inf) == (1, 9)
    assert rpc_path(1024, math.inf) == (1, 1024)
    # Eight others, the first of which sends on to one; itself.
    assert rpc_path(10) == (2, 9 + 2)
    # Of 1,023 others 128 are below the first, of 127 others 16, of 15 others two.
    assert rpc_path(1024) == (4, 9 + 9 + 9 + 2)
    assert rpc_path(4, 2) == (2, 3 + 2)


def test_more_workers_than_cores_slow_only_the_computation_down():
    both = COSTS.step("rpc", 2, 8, 10_000, cores=2)
    crowded = COSTS.step("rpc", 4, 16, 10_000, cores=2)
    more = COSTS.messages("rpc", 4, 10_000) - COSTS.messages("rpc", 2, 10_000)
    assert crowded - both == pytest.approx(1.2 * COSTS.computation(4, 10_000) + more)
    apart = COSTS.step("rpc", 2, 8, 10_000)
    assert both - apart == pytest.approx(0.2 * COSTS.computation(4, 10_000))


def test_a_network_adds_latency_and_limits_bandwidth():
    costs = with_network(COSTS, 50.0, 1.0)
    assert costs.rpc == pytest.approx((2e-4, 3e-4, 12e-9))
    assert costs.allreduce == pytest.approx((2e-4, 4e-9, 2e-4, 8e-9))
    assert with_network(COSTS, None, 100.0) == COSTS


def test_the_path_of_an_all_reduce():
    assert all_reduce_path(1) == (0, 0)
    assert all_reduce_path(8) == all_reduce_path(8, math.inf) == (14, 1.75)
    assert all_reduce_path(64, math.inf) == (126, 2 * 63 / 64)
    # Groups of 3 reduce in 3 messages and broadcast in 2; a ring of 3.
    assert all_reduce_path(8, 4).depth == 3 + 2 + 4
    # Groups of 8 reduce in 8 messages and spread in 3; a ring of 8.
    assert all_reduce_path(64) == pytest.approx((8 + 3 + 14, 1.75 + 3 + 1.75))
    # Groups of 32, 6 and a ring of 6.
    assert all_reduce_path(1024).depth == (32 + 5) + (6 + 3) + 10


def test_groups_pay_on_slow_networks_and_cost_transfers():
    slow = with_network(COSTS, 1000.0, None)
    assert slow.messages("allreduce", 64, 100) < 0.25 * slow.messages("flat", 64, 100)
    for workers in (1, 2, 8):
        assert slow.messages("allreduce", workers, 100) == slow.messages("flat", workers, 100)
    large = COSTS.messages("allreduce", 16, 10**8) / COSTS.messages("flat", 16, 10**8)
    assert 1 < large < 2.5


def test_scaling_results_are_tables():
    extrapolation = Extrapolation(COSTS, [8, 64, 1024], 4, [10_000, 400_000])
    parts = tables(steps_with(COSTS), COSTS, extrapolation, 2)
    assert "| 400,000 |" in parts[3] and "Assumed:" in parts


def test_the_ranges_of_a_profile_are_read(tmp_path):
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for name in ("train_step", "data"):
            with record_function(f"metadist::{name}"):
                time.sleep(0.06)
    (tmp_path / "rank0.txt").write_text(profile_table(profiler) + "\n")
    ranges = profiled_ranges(tmp_path / "rank0.txt")
    assert set(ranges) == {"train_step", "data"} and all(20 <= ms < 900 for ms in ranges.values())


def test_ratios_are_medians_over_rounds_and_failures_are_shown(tmp_path):
    found = {REFERENCE: [1.0, 2.0, 4.0], "a": [3.0, 4.0, 4.0], "b": [2.0, None, None]}
    assert ratio(found, "a") == 2.0  # of 3, 2 and 1
    assert cells({"s": found}, "a", 9) == ["4.0 (2.00)"]
    assert cells({"s": found}, "b", 9) == ["2.0 (2.00); failed or over 9 s"]
    speeds = {"T8 K1 Q15 S5 max": found}
    baselines.save_speeds(tmp_path, speeds, 9)
    assert json.loads((tmp_path / "benchmark.json").read_text())["tasks_per_second"] == speeds
    assert "failed or over 9 s" in (tmp_path / "benchmark.md").read_text()


def test_without_a_reference_speeds_have_no_ratio():
    found = {REFERENCE: [None, None], "a": [3.0, 4.0], "b": [None, None]}
    assert cells({"s": found}, "a", 9) == ["3.5"]
    assert (
        cells({"s": found}, "b", 9) == cells({"s": found}, REFERENCE, 9) == ["failed or over 9 s"]
    )


def test_a_hanging_program_is_killed_and_skipped_afterwards(tmp_path):
    pid_file = tmp_path / "pid"
    code = f"import os, pathlib, time; pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))"
    command = [sys.executable, "-c", f"{code}; time.sleep(60)"]
    started = []

    def measure(setting: Setting, timeout: float) -> float:
        started.append(setting)
        return float(run(command, timeout))

    measured: list[float | None] = []
    for _ in range(2):
        message = baselines.measure(Program("sleeper", measure), SETTING, measured, timeout=1.0)
        assert message in ("no result: killed after 1 s", "skipped after a failure")
    assert len(started) == 1 and measured == [None, None]
    time.sleep(0.05)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    with pytest.raises(ProgramFailed, match="killed after"):
        run(command, 0.3)


def test_the_error_of_a_failing_program_is_shown():
    def measure(setting: Setting, timeout: float) -> float:
        return float(run([sys.executable, "-c", "raise ValueError('broken')"], timeout))

    measured: list[float | None] = []
    message = baselines.measure(Program("failing", measure), SETTING, measured, timeout=60.0)
    assert "broken" in message and measured == [None]


def test_tasks_per_second_counts_complete_steps_after_the_warm_up(tmp_path):
    lines = [{"train_loss": 1, "seconds": s} for s in (9.0, 10.0, 11.0, 13.0, 15.0)]
    text = "\n".join(map(json.dumps, [*lines, {"validation_loss": 1}]))
    (tmp_path / "metrics.jsonl").write_text(text)
    assert tasks_per_second(tmp_path, SETTING) == 8 * 2 / 4.0


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        Setting(2, 1, 1, 2, "stride", 1),
        Setting(2, 1, 1, 1, "max", 1, ways=3, size=32, filters=8),
        Setting(4, 5, 5, 2, "mlp", 1),
    ],
    ids=str,
)
def test_all_baselines_compute_the_same_loss(monkeypatch, setting):
    outputs: dict[str, str] = {}

    def run_and_keep(command: list[str], timeout: float) -> str:
        outputs[program.name] = run(command, timeout)
        return outputs[program.name]

    monkeypatch.setattr("benchmarks.programs.run", run_and_keep)
    monkeypatch.setattr("benchmarks.programs.WARM_UP", 1)
    for program in PROGRAMS:
        known = installed(program.requires) and setting.model in program.models
        if known and not program.name.startswith("metadist"):
            program.measure(setting, 120)
    # The loss of the second step depends on the gradient of the first.
    losses = {name: json.loads(each.splitlines()[-1])["loss"] for name, each in outputs.items()}
    others = [loss for name, loss in losses.items() if not name.startswith("JAX")]
    assert others == pytest.approx([others[0]] * len(others), rel=1e-3)
    assert all(0 < loss < 20 for loss in losses.values())  # JAX samples other tasks


def run_command(monkeypatch, *arguments: str) -> None:
    script = ROOT / "experiments" / "benchmark.py"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    runpy.run_path(str(script), run_name="__main__")


def test_the_table_of_the_overhead_is_saved(tmp_path, monkeypatch):
    parts = {"latency": lambda rounds, only: iter([("a call", "another", 1.25, "at most 1.2")])}
    monkeypatch.setattr("benchmarks.overhead.PARTS", parts)
    run_command(monkeypatch, "overhead", "--out", str(tmp_path))
    found = json.loads((tmp_path / "overhead.json").read_text())
    assert found["rows"] == [["a call", "another", 1.25, "at most 1.2"]]
    text = (tmp_path / "overhead.md").read_text()
    assert "a call" in text and "1.250" in text
    assert f"cores, Python {platform.python_version()}, torch " in text and "{" not in text


def test_the_gpu_benchmark_on_a_cpu(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("benchmarks.gpu_speed.REPEATS", 1)
    monkeypatch.setattr("benchmarks.gpu_speed.DISTINCT_TASKS", 8)
    run_command(monkeypatch, "gpu", "--device", "cpu", "--quick", "--out", str(tmp_path))
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [each["result"] for each in found["parity"]] == ["pass"] * 8
    assert {each["result"] for each in found["synchronizations"]} == {"not on cpu"}
    assert "traceEvents" in json.loads((tmp_path / "trace.json").read_text())
    for row in found["speed"]:
        reason = "cpu has no tf32" if row["precision"] == "tf32" else ""
        if row["mode"] == "captured":
            reason = "no CUDA graphs on cpu"
        if reason:
            assert reason in row["reason"]
        else:
            assert row["tasks_per_second"] > 0 and row["ratio"] > 0
            assert row["peak_mib"] == "not on cpu"
    cells = {(row["mode"], row["precision"], row["tasks"]) for row in found["speed"]}
    assert len(cells) == len(found["speed"]) == (1 + 2 * 3) * 2
    for text in (capsys.readouterr().out, (tmp_path / "gpu.md").read_text()):
        assert "max-pool, 2 queries" in text and "MAML++" in text


def test_what_the_gpu_benchmark_does_not_reach_is_listed(tmp_path, monkeypatch):
    options = ("--device", "cpu", "--quick", "--minutes", "0", "--out", str(tmp_path))
    run_command(monkeypatch, "gpu", *options)
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found["parity"] == [{"result": "not run: out of time"}]
    assert {row["reason"] for row in found["speed"]} == {"not run: out of time"}


def test_a_failed_check_on_the_gpu_is_the_exit_status(tmp_path, monkeypatch):
    for part in ("parity", "tasks_on_device", "synchronizations", "write_trace", "speed"):
        result = "FAIL: other tasks" if part == "tasks_on_device" else "pass"
        rows = iter([{"result": result}])
        monkeypatch.setattr(f"benchmarks.gpu.{part}", lambda *_, rows=rows: rows)
    with pytest.raises(SystemExit) as exit_:
        run_command(monkeypatch, "gpu", "--device", "cpu", "--quick", "--out", str(tmp_path))
    assert exit_.value.code == 1
    assert json.loads((tmp_path / "gpu.json").read_text())["speed"] == [{"result": "pass"}]
    assert "FAIL: other tasks" in (tmp_path / "gpu.md").read_text()


@pytest.mark.parametrize("command", ["baselines", "scaling", "overhead", "gpu"])
def test_each_command_has_a_usage_message(command, monkeypatch, capsys):
    script = ROOT / "experiments" / "benchmark.py"
    monkeypatch.setattr(sys, "argv", [str(script), command, "--help"])
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(script), run_name="__main__")
    assert exit_.value.code == 0
    assert f"python experiments/benchmark.py {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["baselines", "--only", "T9"], "--only T9 matches no setting"),
        (["scaling", "--workers", "1"], "two of --workers"),
        (["overhead", "speed"], "unknown part speed"),
        (["gpu"], "needs a CUDA device; --device cpu --quick"),
    ],
)
def test_invalid_options_are_refused(arguments, expected, monkeypatch):
    script = ROOT / "experiments" / "benchmark.py"
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    with pytest.raises(SystemExit, match=expected):
        runpy.run_path(str(script), run_name="__main__")
