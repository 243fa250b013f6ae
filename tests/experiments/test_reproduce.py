"""The reproduction command: real runs, resumed and skipped, and the table of what they come to."""

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
from hydra.core.override_parser.overrides_parser import OverridesParser
from reproduction_folders import fake
from tiny import CONF

from metadist.errors import UserError

sys.path.insert(0, str(CONF.parent / "experiments"))
from reproduction import command, pictures
from reproduction.cells import Cell, compose, load_cells
from reproduction.gather import Found, find, rows_of
from reproduction.runs import Planned, Runner, failure
from reproduction.table import markdown

ROOT = CONF.parent
QUICK = ("trainer.eval_tasks=4", "trainer.validation_tasks=2", "trainer.meta_batch_size=2")


def start(directory: Path, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "experiments/reproduce.py", "--directory", str(directory), *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_torchrun_world_is_stopped_gone_on_with_and_then_skipped(tmp_path):
    words = ("maml_sinusoid", "--iterations", "600", "--workers", "2", *QUICK)
    first = start(tmp_path, *words)
    run = tmp_path / "maml_sinusoid" / "600" / "seed0"
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not _begun(run):
        time.sleep(0.1)
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate(timeout=60)
    assert first.returncode == 130 and "the same command goes on with it" in out
    assert ", 1 step | — | — | 0 | 600 of 70,000 |  | unfinished |" in out
    assert "- maml_sinusoid trainer.eval_tasks=4 trainer.meta" in out and "stopped at iter" in out
    saved = list((run / "checkpoints").glob("iteration-*.pt"))
    assert saved and not (run / "results.json").exists()
    out, err = start(tmp_path, *words).communicate(timeout=90)
    assert "finished" in out, out + err
    results = json.loads((run / "results.json").read_text())
    assert (results["iterations"], results["world_size"], results["test_tasks"]) == (600, 2, 4)
    (row, *_) = csv.DictReader((tmp_path / "table.csv").open())
    assert row["cell"] == "maml_sinusoid" and row["seeds"] == "0"
    assert row["failed"] == row["unfinished"] == ""
    assert float(row["ours"]) == results["test_mse_by_steps"][1]["mean"]
    assert (tmp_path / "learning_curves.png").stat().st_size > 10_000
    # Finished: nothing runs, and in this process the table is made again.
    before = (run / "metrics.jsonl").read_bytes()
    assert command.main(["--directory", str(tmp_path), *words]) == 0
    assert (run / "metrics.jsonl").read_bytes() == before
    assert "meta_batch_size=2, 10 steps" in (tmp_path / "table.md").read_text()


def _begun(run: Path) -> bool:
    metrics = run / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("train_loss") > 2


STAND_IN = """
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


def test_a_signal_stops_all_runs_and_the_next_time_they_go_on(tmp_path, monkeypatch):
    runs = [Planned("x", "omniglot", seed, 5, (), tmp_path / str(seed)) for seed in range(2)]
    stand_in = lambda run, workers, root: [sys.executable, "-c", STAND_IN, str(run.directory)]  # noqa: E731
    monkeypatch.setattr(Planned, "command", stand_in)

    def stop():
        while not all((run.directory / "ready").exists() for run in runs):
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    told: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    threading.Thread(target=stop, daemon=True).start()
    first = Runner(1, 2, {}, told.append)
    first.carry_out(runs)
    assert first.stopped and signal.getsignal(signal.SIGINT) is before
    assert sum("the same command goes on with it" in line for line in told) == 2
    again = Runner(1, 1, {}, told.append)
    again.carry_out(runs)
    assert not again.stopped and all(run.finished() for run in runs)
    again.carry_out(runs)  # and now they are skipped
    assert [(run.directory / "starts").read_text() for run in runs] == ["xx", "xx"]
    assert sum("finished before" in line for line in told) == 2


def test_a_run_that_is_about_to_start_when_a_signal_comes_does_not(tmp_path, monkeypatch):
    run = Planned("x", "omniglot", 0, 5, (), tmp_path / "0")
    runner = Runner(1, 1, {}, lambda text: None)

    def interrupted(*_):
        runner._stop(signal.SIGINT, None)
        return [sys.executable, "-c", STAND_IN, str(run.directory)]

    monkeypatch.setattr(Planned, "command", interrupted)
    runner.carry_out([run])
    assert runner.stopped and not (run.directory / "starts").exists()


PARENT = """
import pathlib, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it would be ignored
sys.path.insert(0, "experiments")
from reproduction.runs import Planned, Runner
folder = pathlib.Path(sys.argv[1])
child = "import sys; open('ready', 'w'); sys.stdin.read(); open('ended', 'w')"
child = f"import os; os.chdir({str(folder)!r}); {child}"
Planned.command = lambda *_: [sys.executable, "-c", child]
Runner(1, 1, {}, print).carry_out([Planned("x", "omniglot", 0, 5, (), folder)])
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGHUP])
def test_runs_hear_of_the_end_of_a_parent_that_cannot_say_so(tmp_path, number):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path)], cwd=ROOT)
    for name in ("ready", "ended"):
        deadline = time.monotonic() + 60
        while not (tmp_path / name).exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert (tmp_path / name).exists(), name
        parent.send_signal(number)
        parent.wait(30)
    plan = Planned("x", "omniglot", 0, 5, (), tmp_path)
    assert "metadist.distributed.torchrun" in plan.command(1, None)  # which heeds it


def test_runs_started_by_hand_are_found_with_what_they_changed(tmp_path):
    words = ["+experiment=maml_sinusoid", "seed=4", "algorithm.inner_lr=0.1", "hydra.run.dir=x"]
    for name, overrides in (("a", words), ("b", [*words[:2], "strategy=local"]), ("c", words[1:])):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
        held = {"seed": 4, "trainer": {"iterations": 9}}
        (tmp_path / name / ".hydra" / "config.yaml").write_text(json.dumps(held))
    found = find([tmp_path], load_cells())
    assert [(run.directory.name, run.seed, run.iterations) for run in found] == [
        ("b", 4, 9),
        ("a", 4, 9),
    ]
    names = [row.name for row in rows_of(found, {})]
    assert names[0] == "maml_sinusoid, 1 step"
    assert names[3] == "maml_sinusoid algorithm.inner_lr=0.1, 1 step"


def test_another_folder_and_other_options(tmp_path):
    plan = Planned("maml_sinusoid", "sinusoid", 1, 7, ("task.shots=5",), tmp_path)
    assert not plan.finished()
    (tmp_path / "reproduction.json").write_text(json.dumps(plan.plan()))
    assert not plan.finished()
    (tmp_path / "results.json").write_text("{}")
    assert plan.finished()
    other = Planned("maml_sinusoid", "sinusoid", 1, 7, (), tmp_path)
    with pytest.raises(UserError, match=r"begun with the options task\.shots=5, not \(none"):
        other.finished()
    words = plan.command(3, "/data, new")
    assert "--nproc-per-node=3" in words
    (root,) = [word for word in words if word.startswith("dataset.root=")]
    assert OverridesParser.create().parse_override(root).value() == "/data, new"
    assert words[-1] == "task.shots=5" and "strategy=local" not in words
    assert "strategy=local" in other.command(1, None)
    assert failure(tmp_path) == "it left no log"


def test_a_finished_run_of_another_version_of_the_preset_is_refused(tmp_path):
    plan = Planned("maml_sinusoid", "sinusoid", 1, 7, (), tmp_path)
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / ".hydra").mkdir()
    saved = compose(["+experiment=maml_sinusoid", "seed=1", "threads=2"])
    del saved["algorithm"]["transductive"]  # an option that was not there yet
    held = tmp_path / ".hydra" / "config.yaml"
    (tmp_path / "reproduction.json").write_text(json.dumps(plan.plan()))
    held.write_text(json.dumps(saved))
    assert plan.finished()
    saved["algorithm"]["inner_lr"] = 0.5
    held.write_text(json.dumps(saved))
    with pytest.raises(UserError, match=r"another maml_sinusoid, with algorithm\.inner_lr=0\.5 wh"):
        plan.finished()


def test_an_error_behind_the_results_is_no_end_and_a_damaged_plan_is_made_anew(tmp_path):
    plan = Planned("maml_sinusoid", "sinusoid", 1, 7, (), tmp_path)
    (tmp_path / "results.json").write_text("{}")
    (tmp_path / "reproduction.json").write_text('{"preset": ')
    assert plan.finished()
    (tmp_path / "failure.json").write_text('{"error": "no room"}')
    assert not plan.finished()


def test_a_folder_that_cannot_be_used_does_not_end_the_others(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    runs = [Planned("x", "omniglot", 0, 5, (), tmp_path / name) for name in ("file/a", "b")]
    monkeypatch.setattr(Planned, "command", lambda *_: [sys.executable, "-c", "open('ran', 'w')"])
    monkeypatch.setattr("reproduction.runs.ROOT", tmp_path)
    told: list[str] = []
    runner = Runner(1, 1, {}, told.append)
    runner.carry_out(runs)
    assert runner.refused == runs[:1] and (tmp_path / "ran").exists()
    assert "could not be used (Not a directory)" in told[0]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["maml_sinusoit"], "did you mean maml_sinusoid"),
        (["--seeds", "2"], "name presets"),
        (["maml_sinusoid", "--fraction", "0"], "must be above 0"),
        (["maml_sinusoid", "--iterations", "0"], "must be above 0"),
        (["maml_sinusoid", "seed=5", "--seeds", "3"], "use --seeds"),
        (["maml_sinusoid", "++trainer.iterations=100"], "use --iterations"),
        (["all", "--root", "somewhere"], "does not say of which dataset"),
        (["all", "--root", "omniglt=DIR"], "names no dataset"),
        (["all", "--root", "/run=3/omniglot"], "does not say of which dataset"),
        (["--table-only"], "no run of a preset"),
        (["--sinusoid", "here", "there"], "no run's directory"),
    ],
)
def test_what_does_not_fit_is_refused_before_any_run(tmp_path, capsys, words, told):
    assert command.main(["--directory", str(tmp_path), *words]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and told in err and not list(tmp_path.iterdir())


def test_the_list_names_every_preset(capsys):
    assert command.main(["--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(load_cells())
    assert "98.70%; arXiv 1703.03400, table 1" in lines[0]


def test_what_goes_on_or_was_stopped_has_not_failed(tmp_path):
    cells = {"x": Cell("x", "omniglot", "accuracy")}
    for seed, log in enumerate(("it trains\n", "stopped at iteration 7\n", "error: no room.\n")):
        fake(tmp_path / str(seed), "x", seed)
        (tmp_path / str(seed) / "log.txt").write_text(log)
    (row,) = rows_of(find([tmp_path / "0", tmp_path / "1"], cells), {})
    assert row.outcome == "unfinished" and row.failures == {}
    assert row.unfinished == {0: "it trains", 1: "stopped at iteration 7"}
    (row,) = rows_of(find([tmp_path], cells), {})
    assert row.outcome == "FAILED" and row.failures == {2: "no room."}
    word = {"error": "out of memory", "exit_status": 1, "overrides": []}
    (tmp_path / "0" / "failure.json").write_text(json.dumps(word))
    (row,) = rows_of(find([tmp_path], cells), {})
    assert row.failures == {0: "out of memory", 2: "no room."}
    text = markdown([row], "c")
    assert "## Unfinished" in text and "- x, seed 1, 600 iterations: stopped at" in text


def test_a_run_that_ends_badly_leaves_word_and_the_next_start_takes_it_away(tmp_path, monkeypatch):
    run = Planned("maml_sinusoid", "sinusoid", 0, 5, ("task.shots=5",), tmp_path)
    for script, words in (("print('Killed'); exit(9)", "Killed"), ("exit(143)", None)):
        monkeypatch.setattr(Planned, "command", lambda *_, s=script: [sys.executable, "-c", s])
        Runner(1, 1, {}, lambda text: None).carry_out([run])
        (found,) = find([tmp_path], load_cells())
        assert found.failed == (words is not None) and (not words or found.trouble == words)


def test_damaged_results_are_one_sentence(tmp_path, capsys):
    fake(tmp_path / "a", "maml_sinusoid", 0)
    (tmp_path / "a" / "results.json").write_text('{"test_mse": ')
    assert command.main(["--directory", str(tmp_path), "--table-only"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and "results.json cannot be read" in err


def test_the_figure_is_of_the_presets_as_they_are(tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(pictures, "draw_pair", lambda runs, path: drawn.append(runs) or path)
    cell = load_cells()["maml_sinusoid"]

    def run(name: str, steps: int, iterations: int, *options: str) -> Found:
        results = {"protocol": {"inner_steps": steps, "shots": 10}}
        return Found(tmp_path / name, cell, 0, iterations, options, results)

    found = [run("changed", 1, 900, "algorithm.inner_lr=1"), run("maml", 1, 600), run("p", 0, 600)]
    pictures.draw_sinusoids(found, tmp_path)
    assert drawn == [{"MAML": tmp_path / "maml", "pretrained": tmp_path / "p"}]


def test_a_panels_title_is_read_from_the_record(tmp_path):
    (tmp_path / ".hydra").mkdir()
    saved = {"task": {"ways": 20, "shots": 5}, "dataset": {"root": "${nowhere}"}}
    (tmp_path / ".hydra" / "config.yaml").write_text(json.dumps(saved))
    cell = Cell("x", "omniglot", "accuracy")
    titles = [
        pictures._column(Found(folder, cell, 0, 1, (), None))
        for folder in (tmp_path, tmp_path / "nothing")
    ]
    assert titles == ["omniglot 20-way 5-shot", "omniglot"]
