"""The reproduction command: real runs, resumed and skipped, and its errors."""

import csv
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict
from reproduction import command, plots
from reproduction.cells import Cell, compose, load_cells
from reproduction.rows import Run, aggregate, find_runs
from reproduction.runs import PresetRun, Runner
from reproduction.table import markdown
from reproduction_folders import create_failed_run, create_run
from tiny import run_results
from worlds import run_world

from metadist.errors import UserError
from metadist.launchers.torchrun import TorchrunLauncher
from metadist.reports.run_record import RunRecord

QUICK = ("trainer.eval_tasks=4", "trainer.validation_tasks=2", "trainer.meta_batch_size=2")


def start(directory: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "experiments/reproduce.py", "--directory", str(directory), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for(condition, seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def use_command(monkeypatch, *arguments: str) -> None:
    """Have the launcher start a Python program with the run's directory as its last argument."""
    program = lambda self, spec, *_: [sys.executable, *arguments, str(spec.directory)]  # noqa: E731
    monkeypatch.setattr(TorchrunLauncher, "command", program)


def preset_run(directory: Path, *options: str, seed: int = 0) -> PresetRun:
    return PresetRun("maml_sinusoid", "sinusoid", seed, 600, options, directory)


@pytest.mark.slow
def test_a_run_of_two_workers_is_stopped_resumed_and_then_skipped(tmp_path):
    arguments = ("maml_sinusoid", "--iterations", "3000", "--workers", "2", *QUICK)
    first = start(tmp_path, *arguments)
    run = tmp_path / "maml_sinusoid" / "3000" / "seed0"
    metrics = run / "metrics.jsonl"
    wait_for(lambda: metrics.exists() and metrics.read_text().count("train_loss") > 2)
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=300)
    assert first.returncode == 130 and "the same command resumes it" in out
    assert ", 1 step | — | — | 0 | 3,000 of 70,000 |  | unfinished |" in out
    assert "- maml_sinusoid trainer.eval_tasks=4 trainer.meta" in out and ": at iteration " in out
    saved = list((run / "checkpoints").glob("iteration-*.pt"))
    assert saved and not (run / "results.json").exists()
    out, err = start(tmp_path, *arguments).communicate(timeout=300)
    assert "finished" in out, out + err
    results = run_results(run)
    assert (results["iterations"], results["world_size"], results["test_tasks"]) == (3000, 2, 4)
    (row, *_) = csv.DictReader((tmp_path / "table.csv").open())
    assert row["cell"] == "maml_sinusoid" and row["seeds"] == "0"
    assert row["failed"] == row["unfinished"] == ""
    assert float(row["measured"]) == results["test_mse_by_steps"][1]["mean"]
    assert (tmp_path / "learning_curves.png").stat().st_size > 10_000
    # A finished run is skipped; the table is written again.
    before = metrics.read_bytes()
    assert command.main(["--directory", str(tmp_path), *arguments]) == 0
    assert metrics.read_bytes() == before
    assert "meta_batch_size=2, 10 steps" in (tmp_path / "table.md").read_text()


INTERRUPTED_ONCE = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
starts = folder / "starts"
starts.write_text(starts.read_text() + "x" if starts.exists() else "x")
if len(starts.read_text()) == 1:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    (folder / "ready").touch()
    time.sleep(60)
(folder / "results.json").write_text(json.dumps({"seed": 1}))
"""


@pytest.mark.slow
def test_a_signal_stops_all_runs_and_the_next_start_resumes_them(tmp_path, monkeypatch):
    runs = [preset_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    use_command(monkeypatch, "-c", INTERRUPTED_ONCE)

    def stop() -> None:
        wait_for(lambda: all((run.directory / "ready").exists() for run in runs[:2]))
        os.kill(os.getpid(), signal.SIGINT)

    messages: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    threading.Thread(target=stop, daemon=True).start()
    first = Runner(1, 2, {}, messages.append)
    first.run(runs)
    assert first.stopped == signal.SIGINT and signal.getsignal(signal.SIGINT) is before
    assert sum("the same command resumes it" in message for message in messages) == 2
    assert not (runs[2].directory / "starts").exists(), "a run was started after the signal"
    (runs[2].directory).mkdir()
    (runs[2].directory / "starts").write_text("x")
    again = Runner(1, 1, {}, messages.append)
    again.run(runs)
    assert not again.stopped and all(run.is_finished() for run in runs)
    again.run(runs)  # finished runs are skipped
    assert [(run.directory / "starts").read_text() for run in runs] == ["xx"] * 3
    assert sum("already finished" in message for message in messages) == 3


def kill_the_parent_of_a_run(directory: Path, number: int) -> None:
    """End the process that has started a run by a signal, and wait until the run has ended."""
    child = "import sys; open('ready', 'w'); sys.stdin.read(); open('ended', 'w')"
    child = f"import os; os.chdir({str(directory)!r}); {child}"
    TorchrunLauncher.command = lambda *_: [sys.executable, "-c", child]
    parent = os.fork()
    if parent == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
        Runner(1, 1, {}, lambda text: None).run([preset_run(directory)])
        os._exit(0)
    wait_for((directory / "ready").exists, 60)
    os.kill(parent, number)
    os.waitpid(parent, 0)
    wait_for((directory / "ended").exists, 60)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGHUP, marks=pytest.mark.slow)]
)
def test_runs_end_with_a_parent_that_is_killed(tmp_path, number):
    run_world(kill_the_parent_of_a_run, 1, tmp_path, number)


def test_runs_started_by_hand_are_found_with_their_options(tmp_path):
    overrides = ["+experiment=maml_sinusoid", "seed=4", "algorithm.inner_lr=0.1"]
    for name, saved in (
        ("a", overrides),
        ("b", [*overrides[:2], "strategy=local"]),
        ("c", overrides[1:]),
    ):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(json.dumps(saved))
        config = {"seed": 4, "trainer": {"iterations": 9}}
        (tmp_path / name / ".hydra" / "config.yaml").write_text(json.dumps(config))
    found = find_runs([tmp_path], load_cells())
    assert [(run.record.directory.name, run.seed, run.iterations) for run in found] == [
        ("b", 4, 9),
        ("a", 4, 9),
    ]
    names = [row.name for row in aggregate(found, {})]
    assert names[0] == "maml_sinusoid, 1 step"
    assert names[3] == "maml_sinusoid algorithm.inner_lr=0.1, 1 step"


def test_a_directory_of_a_run_with_other_options_is_refused(tmp_path):
    run = preset_run(tmp_path / "0", "task.shots=5")
    assert not run.is_finished()
    create_run(tmp_path / "0", "maml_sinusoid", 0, "task.shots=5", "strategy=local")
    assert not run.is_finished()
    (tmp_path / "0" / "results.json").write_text("{}")
    assert run.is_finished()
    with pytest.raises(UserError, match=r"started with the options task\.shots=5, not \(none"):
        preset_run(tmp_path / "0").is_finished()


def test_overrides_of_a_run(tmp_path):
    run = preset_run(tmp_path, "task.shots=5")
    overrides = run.overrides(3, "/data, new")
    (root,) = [each for each in overrides if each.startswith("dataset.root=")]
    assert OverridesParser.create().parse_override(root).value() == "/data, new"
    assert overrides[-1] == "task.shots=5" and "strategy=local" not in overrides
    assert "strategy=local" in run.overrides(1)


def test_a_finished_run_of_another_version_of_the_preset_is_refused(tmp_path):
    run = preset_run(tmp_path / "0", seed=1)
    create_run(tmp_path / "0", "maml_sinusoid", 1, test_mse=0.1)
    saved = compose(["+experiment=maml_sinusoid", "seed=1", "threads=2"])
    with open_dict(saved):
        del saved.algorithm.transductive  # an option that has been added since
    file = tmp_path / "0" / ".hydra" / "config.yaml"
    OmegaConf.save(saved, file)
    assert run.is_finished()
    saved.algorithm.inner_lr = 0.5
    OmegaConf.save(saved, file)
    with pytest.raises(UserError, match=r"another maml_sinusoid, with algorithm\.inner_lr=0\.5 wh"):
        run.is_finished()


def test_a_run_of_unreadable_options_is_refused_and_is_not_in_the_table(tmp_path):
    run = preset_run(tmp_path / "0", seed=1)
    create_run(tmp_path / "0", "maml_sinusoid", 1, test_mse=0.1)
    (tmp_path / "0" / ".hydra" / "overrides.yaml").write_text("[")
    with pytest.raises(UserError, match=r"overrides\.yaml cannot be read"):
        run.is_finished()
    assert not find_runs([tmp_path], load_cells())


def test_a_run_that_fails_after_its_results_is_finished_and_has_failed_once(tmp_path, monkeypatch):
    create_run(tmp_path, "maml_sinusoid", 0)
    write = "import sys; open(sys.argv[1] + '/results.json', 'w').write('{}'); exit(1)"
    use_command(monkeypatch, "-c", write)
    run, runner = preset_run(tmp_path), Runner(1, 1, {}, lambda text: None)
    runner.run([run])
    assert runner.failed == [run] and not (tmp_path / "failure.json").exists()
    assert run.is_finished()


def test_an_unusable_directory_does_not_end_the_other_runs(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    runs = [preset_run(tmp_path / name) for name in ("file/a", "b")]
    use_command(monkeypatch, "-c", "import sys; open(sys.argv[1] + '/ran', 'w')")
    messages: list[str] = []
    runner = Runner(1, 1, {}, messages.append)
    runner.run(runs)
    assert runner.failed == runs[:1] and (tmp_path / "b" / "ran").exists()
    assert "cannot be used (Not a directory)" in messages[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["maml_sinusoit"], "did you mean maml_sinusoid"),
        (["--seeds", "2"], "name presets"),
        (["maml_sinusoid", "--fraction", "0"], "must be greater than 0"),
        (["maml_sinusoid", "--iterations", "0"], "must be greater than 0"),
        (["maml_sinusoid", "seed=5", "--seeds", "3"], "use --seeds"),
        (["maml_sinusoid", "++trainer.iterations=100"], "use --iterations"),
        (["all", "--root", "somewhere"], "names no dataset"),
        (["all", "--root", "omniglt=DIR"], "names no dataset"),
        (["all", "--root", "/run=3/omniglot"], "names no dataset"),
        (["--quick", "--jobs", "0"], "--jobs 0 is invalid"),
        (["--quick", "scheduler=cosine", "--seeds", "3"], "--seeds, scheduler=cosine would have"),
        (["--quick", "--iterations", "5"], "--iterations would have no effect"),
        (["--table-only"], "no run of a preset"),
        (["--sinusoid", "here", "there"], "is not a run directory"),
    ],
)
def test_invalid_arguments_are_refused_before_any_run(tmp_path, capsys, arguments, message):
    assert command.main(["--directory", str(tmp_path), *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert not list(tmp_path.iterdir())


def test_the_list_names_every_preset(capsys):
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(load_cells())
    assert "98.70%; arXiv 1703.03400, table 1" in lines[0]


def test_unfinished_runs_are_not_failures(tmp_path):
    cells = {"x": Cell("x", "omniglot", "accuracy")}
    for seed in (0, 1):
        create_run(tmp_path / str(seed), "x", seed)
    (tmp_path / "1" / "metrics.jsonl").write_text('{"iteration": 7, "train_loss": 1.0}\n')
    create_failed_run(tmp_path / "2", "x", 2, "the disk is full.")
    (row,) = aggregate(find_runs([tmp_path / "0", tmp_path / "1"], cells), {})
    assert row.outcome == "unfinished" and row.failures == {}
    assert row.unfinished == {0: "no iteration recorded", 1: "at iteration 7"}
    (row,) = aggregate(find_runs([tmp_path], cells), {})
    assert row.outcome == "FAILED" and row.failures == {2: "the disk is full."}
    create_failed_run(tmp_path / "0", "x", 0, "out of memory")
    (row,) = aggregate(find_runs([tmp_path], cells), {})
    assert row.failures == {0: "out of memory", 2: "the disk is full."}
    text = markdown([row], "command")
    assert "## Unfinished" in text and "- x, seed 1, 600 iterations: at iteration 7" in text


def test_a_failure_is_recorded_and_the_next_start_removes_it(tmp_path, monkeypatch):
    run = PresetRun("maml_omniglot_5w1s", "omniglot", 0, 600, ("task.shots=5",), tmp_path)
    use_command(monkeypatch, "-c", "exit(9)")
    Runner(1, 1, {"omniglot": "data of mine"}, lambda text: None).run([run])
    (found,) = find_runs([tmp_path], load_cells())
    assert found.record.value("dataset.root") == "data of mine"
    assert found.record.error_line == "ended with status 9" and found.options == ("task.shots=5",)
    use_command(monkeypatch, "-c", "exit(143)")
    Runner(1, 1, {}, lambda text: None).run([run])
    assert not find_runs([tmp_path], load_cells())  # stopped before it recorded anything


def test_corrupted_results_are_refused(tmp_path, capsys):
    create_run(tmp_path / "a", "maml_sinusoid", 0)
    (tmp_path / "a" / "results.json").write_text('{"test_mse": ')
    assert command.main(["--directory", str(tmp_path), "--table-only"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "results.json cannot be read" in err


def test_the_sinusoid_plot_uses_presets_without_options(tmp_path, monkeypatch):
    pairs = []
    monkeypatch.setattr(plots, "plot_pair", lambda runs, path: pairs.append(runs) or path)
    cell = load_cells()["maml_sinusoid"]

    def run(name: str, steps: int, iterations: int, *options: str) -> Run:
        protocol = {"inner_steps": steps, "shots": 10}
        create_run(tmp_path / name, cell.preset, 0, protocol=protocol)
        return Run(RunRecord(tmp_path / name), cell, 0, iterations, options)

    runs = [run("changed", 1, 900, "algorithm.inner_lr=1"), run("maml", 1, 600), run("p", 0, 600)]
    plots.plot_sinusoids(runs, tmp_path)
    assert pairs == [{"MAML": tmp_path / "maml", "pretrained": tmp_path / "p"}]


def test_the_title_of_a_panel_is_read_from_the_configuration(tmp_path):
    (tmp_path / ".hydra").mkdir()
    saved = {"task": {"ways": 20, "shots": 5}, "dataset": {"root": "${nowhere}"}}
    (tmp_path / ".hydra" / "config.yaml").write_text(json.dumps(saved))
    cell = Cell("x", "omniglot", "accuracy")
    titles = [
        plots.panel_title(Run(RunRecord(folder), cell, 0, 1, ()))
        for folder in (tmp_path, tmp_path / "nothing")
    ]
    assert titles == ["omniglot 20-way 5-shot", "omniglot"]
