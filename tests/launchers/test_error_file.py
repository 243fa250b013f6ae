"""The error file of a run directory, and the report on a crashed run."""

import contextlib
import json
import sys
from pathlib import Path

from commands import run_command, specification
from tiny import SMALL

from metadist.launchers.error_reporting import print_error, record_error_in
from metadist.reports import read_config
from metadist.reports.run_report import write_run_report


def test_only_the_first_error_of_a_job_is_recorded(tmp_path, capsys):
    path = tmp_path / "error.txt"
    record_error_in(path)
    print_error("error: rank 0 failed:\nTraceback\nValueError: no")
    print_error("error: 1 job of the sweep failed")
    assert path.read_text() == "rank 0 failed:\nTraceback\nValueError: no\n"
    record_error_in(tmp_path / "other.txt")
    record_error_in(None)
    print_error("error: after a job that has succeeded")
    assert not (tmp_path / "other.txt").exists() and capsys.readouterr().err.count("\n") == 5


def test_a_crashed_run_has_its_error_with_traceback_and_its_environment(tmp_path):
    broken = ["~algorithm", "+algorithm._target_=broken_parts.BrokenMAML", "strategy=allreduce"]
    results = run_command("worker", specification(tmp_path, *SMALL, *broken), size=2)
    assert all(result.status == 1 for result in results)
    error = (tmp_path / "error.txt").read_text()
    assert error.startswith("rank 1 on ") and error.endswith("LookupError: a mistake on purpose\n")
    assert "Traceback (most recent call last)" in error and "broken_parts.py" in error
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["world_size"] == 2 and environment["strategy"] == "allreduce"
    html = write_run_report(tmp_path).read_text()
    assert "LookupError: a mistake on purpose" in html and "--nproc_per_node=2" in html


def test_a_run_that_crashes_at_its_start_has_its_error_and_a_finished_one_keeps_its_results(
    tmp_path,
):
    broken = ("~algorithm", "+algorithm._target_=broken_parts.BrokenMAML")
    options = (*SMALL, *broken, "+algorithm.where=start")
    run_command("worker", specification(tmp_path / "run", *options), size=2)
    error = (tmp_path / "run" / "error.txt").read_text()
    assert error.startswith("rank 1 on ") and error.endswith("LookupError: a mistake on purpose\n")
    assert "LookupError" in write_run_report(tmp_path / "run").read_text()
    assert read_config(tmp_path / "run")["strategy"]
    (tmp_path / "run" / "error.txt").unlink()
    (tmp_path / "run" / "results.json").write_text("{}")
    file = specification(tmp_path / "run", *options, "+algorithm.rank=0")
    (outcome,) = run_command("worker", file)
    assert outcome.status == 1 and not (tmp_path / "run" / "error.txt").exists()


def test_the_end_of_a_sweep_leaves_the_error_of_its_failed_job(tmp_path):
    broken = ("algorithm._target_=broken_parts.BrokenMAML", "+algorithm.rank=0")
    options = (*SMALL, *broken, "strategy=local", f"hydra.sweep.dir={tmp_path}")
    run_command("maml.py", "-m", *options)
    assert (tmp_path / "0" / "error.txt").read_text().startswith("rank 0 on ")


def test_an_output_that_cannot_be_written_does_not_hide_the_error(monkeypatch, capsys):
    full = Path("/dev/full").open("w")  # noqa: SIM115
    full.write("buffered")
    monkeypatch.setattr(sys, "stdout", full)
    print_error("error: what happened")
    assert capsys.readouterr().err == "error: what happened\n"
    with contextlib.suppress(OSError):
        full.close()
