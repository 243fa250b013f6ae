"""`report.html` of a sweep: table, figures, comparability, failures."""

import json
import math
from pathlib import Path

import plotly.graph_objects
import pytest
import yaml
from html_pages import Page

from metadist.errors import UserError
from metadist.reports import sweep_page, sweep_report
from metadist.reports.sweep_page import sweep_figures
from metadist.reports.sweep_report import write_sweep_report
from metadist.reports.sweep_table import MetricEstimate, Setting, SweepTable


def write_job(folder: Path, rate: float, shots: int, seed: int, test: float, **protocol) -> None:
    (folder / ".hydra").mkdir(parents=True)
    overrides = [f"algorithm.inner_lr={rate}", f"task.shots={shots}", f"seed={seed}"]
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    config = {"seed": seed, "algorithm": {"inner_lr": rate}, "task": {"shots": shots}}
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
    results = {"test_accuracy": test, "ci95": 0.01, "train_loss": 0.5, "seed": seed}
    protocol = {"ways": 5, "shots": shots, "queries": 5, **protocol}
    (folder / "results.json").write_text(json.dumps({**results, "protocol": protocol}))
    lines = [{"iteration": 10 * i, "validation_accuracy": test * i / 10} for i in (1, 2, 3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "report.html").touch()


@pytest.fixture
def folder(tmp_path) -> Path:
    jobs = [(rate, shots, seed) for rate in (0.1, 0.4) for shots in (1, 5) for seed in (0, 1, 2)]
    for number, (rate, shots, seed) in enumerate(jobs):
        write_job(
            tmp_path / str(number), rate, shots, seed, 0.5 + rate / 10 + shots / 100 + seed / 50
        )
    return tmp_path


def test_a_sweep_of_twelve_jobs(folder):
    report = write_sweep_report(folder)
    path = folder / "report.html"
    page, figures = Page(path), Page(path).figures
    assert path in report.files and path.stat().st_size < 3_000_000
    for figure in figures.values():
        plotly.graph_objects.Figure(figure)
    assert set(figures) == {"settings", "parallel", "heat-map", "curves"} <= page.ids()
    rows = {(row[0], row[1]): row for row in page.rows if len(row) == 7}
    assert len(rows) == 5  # the heading too
    assert rows["0.4", "5"][4].startswith("61.00% ±") and "best" in rows["0.4", "5"][6]
    links = [a for a in page.addresses() if not a.startswith("data:")]
    assert sorted(links) == sorted(f"./{number}/report.html" for number in range(12))
    means, seeds = figures["settings"]["data"]
    assert means["y"][0] == "inner_lr=0.4 shots=5" and means["x"][0] == pytest.approx(0.61)
    assert sorted(seeds["x"])[-1] == pytest.approx(0.63) and len(seeds["x"]) == 12
    interval = 4.302653 * 0.02 / 3**0.5  # Student's t of three seeds
    assert means["error_x"]["array"] == pytest.approx([interval] * 4, rel=1e-5)
    rate, shots, accuracy = figures["parallel"]["data"][0]["dimensions"]
    assert (rate["label"], rate["ticktext"], rate["values"]) == (
        "algorithm.inner_lr",
        ["0.1", "0.4"],
        [0, 0, 1, 1],
    )
    assert accuracy["values"] == pytest.approx([0.54, 0.58, 0.57, 0.61])
    (cells,) = figures["heat-map"]["data"]
    assert (cells["x"], cells["y"]) == (["0.1", "0.4"], ["1", "5"])
    assert [value for row in cells["z"] for value in row] == pytest.approx([0.54, 0.57, 0.58, 0.61])
    groups = [curve["legendgroup"] for curve in figures["curves"]["data"]]
    names = [f"inner_lr={rate} shots={count}" for rate in (0.1, 0.4) for count in (1, 5)]
    assert groups == [name for name in names for _ in range(3)]
    assert rows["0.4", "5"][5] == "0.5 ± 0" and shots["ticktext"] == ["1", "5"]
    assert "All finished runs have the same evaluation protocol" in page.text
    assert "finished 12 failed 0 unfinished 0 settings 4" in page.text
    assert "inner_lr=0.4 shots=5; 95% interval over seeds" in page.text
    common = page.text.split("Protocol and method in common")[1].split("Commands")[0]
    assert "ways 5 queries 5" in common and "shots" not in common


def test_runs_that_are_not_comparable_are_named_with_the_reason(folder):
    write_job(folder / "12", 0.1, 1, 7, 0.9, queries=15)
    text = Page(_report(folder)).text
    others = ", ".join(map(str, range(12)))
    assert f"Not comparable: queries differs: 5 ({others}), 15 (12)" in text
    assert "Different protocol: shots 1 or 5; queries 5 or 15." in text
    assert "the same evaluation protocol" not in text


def test_failed_runs_are_shown_with_their_traceback(folder):
    failed = folder / "12"
    failed.mkdir()
    overrides = ["algorithm.inner_lr=9", "task.shots=1", "seed=0"]
    failure = {"error": "ValueError: <no>", "exit_status": 1, "overrides": overrides}
    (failed / "failure.json").write_text(json.dumps(failure))
    write_sweep_report(folder)
    assert "Failed runs 12 ValueError: <no>" in Page(folder / "report.html").text
    (failed / "error.txt").write_text("rank 0 failed:\nTraceback\nValueError: <no>")
    write_sweep_report(folder)
    assert "12 rank 0 failed: Traceback ValueError: <no>" in Page(folder / "report.html").text


def test_runs_that_have_not_finished_are_counted_with_their_commands(folder):
    for name, file in (("12", "failure.json"), ("13", "metrics.jsonl"), ("14", "metrics.jsonl")):
        (folder / name / ".hydra").mkdir(parents=True)
        (folder / name / file).write_text('{"error": "no"}\n' if name == "12" else "")
        overrides = ["algorithm.inner_lr=0.4", "task.shots=5", "seed=9"]
        (folder / name / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    page = Page(_report(folder))
    assert "finished 12 failed 1 unfinished 2 settings 4" in page.text
    (row,) = [row for row in page.rows if row[:2] == ["0.4", "5"]]
    assert row[2:4] == ["3", "3"]
    commands = [f"metadist report {folder / name}" for name in ("12", "13", "14")]
    assert all(command in page.text for command in commands)


def test_a_folder_that_is_a_run_too_is_not_linked_to_itself(folder):
    write_job(folder, 0.9, 1, 0, 0.5)
    addresses = [a for a in Page(_report(folder)).addresses() if not a.startswith("data:")]
    assert sorted(addresses) == sorted(f"./{number}/report.html" for number in range(12))


def table_of(keys: tuple[str, ...], metric: str, means: dict[tuple[str, ...], float]) -> SweepTable:
    """A table whose last setting is the selected one."""
    settings = [
        Setting(values, (), (), (), (), MetricEstimate(mean, None), None, None)
        for values, mean in means.items()
    ]
    return SweepTable(keys, metric, tuple(settings), len(settings) - 1, "validation")


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_of_many_settings_the_best_and_the_selected_one_are_shown(tmp_path, metric):
    sign = 1 if metric == "mse" else -1
    table = table_of(("k",), metric, {(str(n),): sign * float(n) for n in range(70)})
    names = sweep_figures(table)["settings"]["data"][0]["y"]
    assert names == [f"k={n}" for n in (*range(60), 69)]


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_of_many_settings_those_without_a_mean_are_not_shown(tmp_path, metric):
    means = {(str(n),): math.nan if n % 2 else float(n) for n in range(120)}
    table = table_of(("k",), metric, {**means, ("selected",): math.nan})
    names = sweep_figures(table)["settings"]["data"][0]["y"]
    assert {*names} == {"k=selected", *(f"k={n}" for n in range(0, 120, 2))}


def test_keys_of_a_setting_are_short_where_they_are_unique():
    table = table_of(("a.lr", "b.lr", "task.shots"), "mse", {("1", "2", "5"): 0.5})
    assert table.describe(table.settings[0], short=True) == "a.lr=1 b.lr=2 shots=5"


def test_names_are_quoted_in_links(folder):
    (folder / "0").rename(folder / "x%y#z?q")
    write_sweep_report(folder)
    assert "./x%25y%23z%3Fq/report.html" in Page(folder / "report.html").addresses()


@pytest.mark.parametrize(
    ("limit", "value", "curves"), [("_MAX_CURVES", 5, 5), ("_MAX_METRICS_BYTES", 1, 1)]
)
def test_the_number_and_the_size_of_the_curves_are_bounded(
    folder, monkeypatch, limit, value, curves
):
    monkeypatch.setattr(sweep_page, limit, value)
    assert len(Page(_report(folder)).figures["curves"]["data"]) == curves


def test_a_defect_of_the_page_does_not_lose_the_tables(folder, monkeypatch):
    def fail(*arguments):
        raise ValueError("a defect")

    monkeypatch.setattr(sweep_report, "write_sweep_page", fail)
    monkeypatch.setattr(sweep_report, "plot_sweep", fail)
    report = write_sweep_report(folder)
    names = ("sweep.png", "report.html")
    assert report.missing == tuple(
        f"{name} could not be written (ValueError: a defect)" for name in names
    )
    assert [path.name for path in report.files] == ["sweep.csv", "sweep.md"]
    assert any(line.startswith("best: ") for line in report.summary_lines())


def test_a_report_that_cannot_be_written_is_a_warning(folder, monkeypatch):
    (folder / "report.html").mkdir()
    report = write_sweep_report(folder)
    assert "report.html" in report.missing[0] and (folder / "sweep.csv").exists()
    assert any("warning: cannot write" in line for line in report.summary_lines())


def test_tables_that_cannot_be_written_are_an_error_without_options_of_a_run(folder):
    (folder / "sweep.csv").mkdir()
    with pytest.raises(
        UserError, match=r"cannot write .*sweep\.csv .* or run `metadist report` on"
    ):
        write_sweep_report(folder)


def _report(folder: Path) -> Path:
    write_sweep_report(folder)
    return folder / "report.html"
