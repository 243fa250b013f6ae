"""The report on a folder of runs: rows, means, the best setting, warnings, files."""

import csv
import json
import os
import runpy
import sys
from pathlib import Path

import pytest
import yaml
from html_pages import Page
from matplotlib.figure import Figure
from matplotlib.text import Text
from tiny import run_results

from metadist.errors import UserError
from metadist.reports.run_record import read_run_record
from metadist.reports.sweep_report import write_sweep_report
from metadist.reports.sweep_table import SweepTable, build_sweep_table, read_runs

PROTOCOL = {"ways": 5, "shots": 1, "inner_steps": 1, "inner_lr": 0.4, "dataset": "glyphs"}


def write(folder: Path, overrides: list[str], test: float, validation: float | None = None, **more):
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(overrides))
    configuration = {"seed": 0, "algorithm": {"inner_lr": 0.4}, "task": {"shots": 1}}
    (folder / ".hydra" / "config.yaml").write_text(yaml.safe_dump(configuration))
    metric = more.pop("metric", "accuracy")
    seed = next((int(each.split("=")[1]) for each in overrides if each.startswith("seed=")), 0)
    optional = {} if validation is None else {f"validation_{metric}": validation}
    protocol = {**PROTOCOL, **more.pop("protocol", {})}
    results = {f"test_{metric}": test, "ci95": 0.01, "train_loss": 0.5, "seed": seed, **optional}
    (folder / "results.json").write_text(json.dumps({**results, "protocol": protocol}))


def table(folder: Path) -> SweepTable:
    """The table of the report alone."""
    return build_sweep_table(read_runs(folder))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open() as file:
        return list(csv.DictReader(file))


def test_seeds_are_one_row_and_the_best_is_selected_by_validation(tmp_path):
    for job, (rate, seed, test, validation) in enumerate(
        [("0.1", 0, 0.7, 0.8), ("0.1", 1, 0.8, 0.9), ("0.40", 0, 0.9, 0.6), ("0.4", 1, 0.9, 0.7)]
    ):
        overrides = [f"+algorithm.inner_lr={rate}", f"seed={seed}", "logger=jsonl"]
        write(tmp_path / str(job), overrides, test, validation, protocol={"inner_lr": float(rate)})
    report = write_sweep_report(tmp_path)
    first, second = rows(tmp_path)
    assert first["algorithm.inner_lr"] == "0.1" and second["algorithm.inner_lr"] == "0.4"
    assert float(first["test_accuracy"]) == pytest.approx(0.75)
    assert float(first["test_accuracy_ci95"]) == pytest.approx(12.7062 * 0.05, rel=1e-4)
    assert json.loads(first["test_accuracy_by_seed"]) == {"0": 0.7, "1": 0.8}
    assert (first["runs"], first["best"], second["best"]) == ("2", "yes", "")
    assert first["protocol.ways"] == "5" and first["protocol.inner_lr"] == "0.1"
    assert not report.warnings and report.table.keys == ("algorithm.inner_lr",)
    text = (tmp_path / "sweep.md").read_text()
    assert "| 0.1 | 2 | 85.00% ± 63.53% | 75.00% ± 63.53% |" in text and "ways 5" in text
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    assert "best: algorithm.inner_lr=0.1" in "\n".join(report.summary_lines())


def test_single_run_has_the_interval_over_test_tasks_and_defaults_are_shown(tmp_path):
    write(tmp_path / "a", [], 0.7)
    write(tmp_path / "b", ["task.shots=5"], 0.9, protocol={"shots": 5})
    report = write_sweep_report(tmp_path)
    assert [row["task.shots"] for row in rows(tmp_path)] == ["1", "5"]
    assert {row["test_accuracy_ci95"] for row in rows(tmp_path)} == {"0.01"}
    assert report.table.selected_by == "test" and not report.warnings


def test_the_best_of_different_test_tasks_is_said_to_be_not_comparable(tmp_path):
    for job, ways in enumerate((5, 20)):
        protocol = {"ways": ways, "train_ways": 20}
        write(tmp_path / str(job), [f"task.ways={ways}"], 0.9 / ways, protocol=protocol)
    lines = write_sweep_report(tmp_path).summary_lines()
    remark = "the settings have different test tasks (ways), so the best one may only have the "
    assert any(line.startswith(f"warning: {remark}") for line in lines)
    assert remark[1:] in (tmp_path / "sweep.md").read_text()
    assert remark in (tmp_path / "report.html").read_text()


def test_settings_of_equal_test_tasks_have_no_remark(tmp_path):
    for job, ways in enumerate((5, 20)):
        write(tmp_path / str(job), [f"task.train_ways={ways}"], 0.5, protocol={"train_ways": ways})
    assert not table(tmp_path).remarks()


def test_repeated_seed_is_not_a_second_seed(tmp_path):
    for job, (rate, test) in enumerate((("0.1", 0.2), ("0.4", 0.5), ("0.1", 0.7))):
        write(tmp_path / str(job), [f"algorithm.inner_lr={rate}"], test)
    write_sweep_report(tmp_path)
    assert [row["runs"] for row in rows(tmp_path)] == ["1", "1"]
    assert [row["test_accuracy"] for row in rows(tmp_path)] == ["0.7", "0.5"]  # the last one


def test_a_metric_that_a_seed_lacks_has_no_mean(tmp_path):
    for job, (rate, validation) in enumerate((("0.1", 0.9), ("0.1", None), ("0.4", 0.6))):
        overrides = [f"algorithm.inner_lr={rate}", f"seed={job}"]
        write(tmp_path / str(job), overrides, 0.7, validation)
    table = write_sweep_report(tmp_path).table
    assert [setting.validation is None for setting in table.settings] == [True, False]
    assert (table.best, table.selected_by) == (1, "validation")
    assert [row["validation_accuracy"] for row in rows(tmp_path)] == ["", "0.6"]


def test_only_equal_metrics_are_a_tie(tmp_path):
    for job, (rate, validation) in enumerate((("0.1", 0.6), ("0.2", 0.6), ("0.4", 0.599))):
        write(tmp_path / str(job), [f"algorithm.inner_lr={rate}"], 0.7, validation)
    lines = write_sweep_report(tmp_path).summary_lines()
    assert "  equal by validation: algorithm.inner_lr=0.2" in lines


def test_what_an_interval_is_over_is_said(tmp_path, monkeypatch):
    texts = []

    def savefig(figure, *arguments, **options):
        texts.extend(each.get_text() for each in figure.findobj(Text))

    monkeypatch.setattr(Figure, "savefig", savefig)
    for job, (rate, seed) in enumerate((("0.1", 0), ("0.4", 0), ("0.4", 1))):
        test = 0.7 + job / 10  # a tie is one of the validation
        write(tmp_path / str(job), [f"algorithm.inner_lr={rate}", f"seed={seed}"], test, 0.6)
    report = write_sweep_report(tmp_path)
    assert [row["test_interval"] for row in rows(tmp_path)] == [
        "95% over test tasks",
        "95% over seeds",
    ]
    assert rows(tmp_path)[0]["test_accuracy_ci95"] == "0.01"
    assert rows(tmp_path)[0]["validation_accuracy_ci95"] == ""
    over = "95% intervals over seeds, for these test tasks, of a single seed over test tasks"
    assert f"mean of 1 to 2 seeds; {over}" in texts
    text = (tmp_path / "sweep.md").read_text()
    assert (
        "error of choosing the tasks; for the test metric of a single seed, over test tasks."
        in text
    )
    assert "| 0.1 | 1 | 60.00% | 70.00% ± 1.00% | 0.5 | best |" in text
    assert report.summary_lines()[1:6] == [
        "3 runs finished",
        "best: algorithm.inner_lr=0.1",
        "  validation accuracy 60.00%, test accuracy 70.00% ± 1.00% (over test tasks)",
        "  directory: 0",
        "  equal by validation: algorithm.inner_lr=0.4",
    ]


def test_without_validation_the_selection_is_said_to_be_biased(tmp_path):
    write(tmp_path / "a", ["algorithm.inner_lr=0.1"], 0.7)
    write(tmp_path / "b", ["algorithm.inner_lr=0.4"], 0.6)
    lines = write_sweep_report(tmp_path).summary_lines()
    assert lines[1:5] == [
        "2 runs finished",
        "best: algorithm.inner_lr=0.1",
        "  test accuracy 70.00% ± 1.00% (over test tasks)",
        "  directory: a",
    ]
    assert "selected by the test metric" in lines[5] and "biased" in lines[5]


def test_a_single_setting_is_not_said_to_be_the_best(tmp_path):
    write(tmp_path / "0", ["seed=0"], 0.7, 0.6)
    (tmp_path / "1" / ".hydra").mkdir(parents=True)
    (tmp_path / "1" / ".hydra" / "overrides.yaml").write_text("[seed=1]")
    (tmp_path / "1" / "metrics.jsonl").touch()
    report = write_sweep_report(tmp_path)
    assert report.summary_lines() == [
        "",
        "1 run finished, 1 unfinished",
        "  validation accuracy 60.00%, test accuracy 70.00% ± 1.00% (over test tasks)",
        "  directory: 0",
        *(f"  {path}" for path in report.files),
    ]


def test_runs_that_have_not_finished_are_counted(tmp_path):
    for job, rate in enumerate(("0.1", "0.4")):
        write(tmp_path / str(job), [f"algorithm.inner_lr={rate}"], 0.7)
    for name, file in (("2", "failure.json"), ("3", "metrics.jsonl"), ("10", "metrics.jsonl")):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        text = '{"error": "no | memory", "overrides": ["algorithm.inner_lr=0.4"]}'
        (tmp_path / name / file).write_text(text if name == "2" else "")
        (tmp_path / name / ".hydra" / "overrides.yaml").write_text("[algorithm.inner_lr=0.4]")
    report = write_sweep_report(tmp_path)
    assert (report.failed, report.unfinished) == (("2",), ("3", "10"))
    assert report.summary_lines()[1] == "2 runs finished, 1 failed, 2 unfinished"
    found = [(row["runs"], row["failed"], row["unfinished"]) for row in rows(tmp_path)]
    assert found == [("1", "0", "0"), ("1", "1", "2")]
    text = (tmp_path / "sweep.md").read_text()
    assert "| seeds | failed or unfinished |" in text and "| 0.4 | 1 | 3 | — |" in text


def test_a_best_setting_with_failed_runs_has_a_remark(tmp_path):
    for job, (rate, test) in enumerate([("0.1", 0.7), ("0.1", 0.7), ("0.4", 0.9), ("0.4", None)]):
        overrides = [f"algorithm.inner_lr={rate}", f"seed={job % 2}"]
        write(tmp_path / str(job), overrides, test or 0.0, test)
    (tmp_path / "3" / "results.json").unlink()
    failure = {"error": "the loss is not finite", "overrides": overrides}
    (tmp_path / "3" / "failure.json").write_text(json.dumps(failure))
    lines = write_sweep_report(tmp_path).summary_lines()
    assert "best: algorithm.inner_lr=0.4" in lines
    remark = "the best setting (algorithm.inner_lr=0.4) is compared without its failed or"
    assert f"warning: {remark} unfinished runs: 3" in lines


def test_names_that_are_not_utf_8_are_replaced(tmp_path):
    write(tmp_path / os.fsdecode(b"caf\xe9"), ["seed=0"], 0.7)
    report = write_sweep_report(tmp_path)
    assert not report.missing and "caf?" in (tmp_path / "sweep.csv").read_text()


def test_a_run_in_progress_alone_has_a_column_of_its_own(tmp_path):
    write(tmp_path / "0", ["seed=0"], 0.7)
    (tmp_path / "1" / ".hydra").mkdir(parents=True)
    (tmp_path / "1" / "metrics.jsonl").touch()
    write_sweep_report(tmp_path)
    assert "| seeds | failed or unfinished |" in (tmp_path / "sweep.md").read_text()


def test_a_run_that_a_later_one_repeats_is_left_out_and_named(tmp_path):
    for job, test in enumerate((0.7, 0.8, 0.9)):
        write(tmp_path / str(job), [f"seed={int(job == 2)}"], test)
    report = write_sweep_report(tmp_path)
    sentence = "left out, as another run, later by name, has the same setting and seed: 0"
    assert f"warning: {sentence}" in report.summary_lines()
    assert report.summary_lines()[1] == "2 runs finished"
    assert json.loads(rows(tmp_path)[0]["test_accuracy_by_seed"]) == {"0": 0.8, "1": 0.9}
    assert f"L{sentence[1:]}." in (tmp_path / "sweep.md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert sentence in page and "2 runs of" in page


def test_files_of_other_programs_are_no_runs(tmp_path):
    write(tmp_path / "0", [], 0.7)
    for name in ("results.json", "metrics.jsonl"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_text('{"accuracy": 0.5')
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "results.json").write_text('{"test_accuracy": 1.0}')
    write(tmp_path / ".trash" / "3", [], 0.7)
    assert [run.name for run in table(tmp_path).runs] == ["0"]


def test_linked_runs_are_found_once_each(tmp_path):
    write(tmp_path / "elsewhere" / "0", ["seed=0"], 0.7)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere" / "back").symlink_to(folder)
    write(folder / "1²", ["seed=1"], 0.8)
    assert [run.name for run in table(folder).runs] == ["1²", "linked/0"]


def test_null_is_one_setting_whether_it_is_given_or_the_default(tmp_path):
    for job, overrides in enumerate((["algorithm.decay=null"], ["seed=1"], ["algorithm.decay=2"])):
        write(tmp_path / str(job), overrides, 0.7)
        configuration = {"seed": 0, "algorithm": {"decay": None, "inner_lr": 0.4}}
        path = tmp_path / str(job) / ".hydra" / "config.yaml"
        path.write_text(yaml.safe_dump(configuration))
    write_sweep_report(tmp_path)
    assert [row["algorithm.decay"] for row in rows(tmp_path)] == ["null", "2"]


def test_settings_without_validation_and_results_that_are_not_finite_are_named(tmp_path):
    values = [("0.1", 0.7, 0.6), ("0.2", 0.9, None), ("0.3", float("nan"), 0.5)]
    for job, (rate, test, validation) in enumerate(values):
        write(tmp_path / str(job), [f"algorithm.inner_lr={rate}"], test, validation)
    lines = write_sweep_report(tmp_path).summary_lines()
    assert "best: algorithm.inner_lr=0.1" in lines
    assert "warning: not compared, without validation: algorithm.inner_lr=0.2" in lines
    assert "warning: the test result is not finite: 2" in lines
    assert "| nan | 0.5" in (tmp_path / "sweep.md").read_text()


def test_protocol_and_method_are_listed_by_whether_they_differ(tmp_path):
    for job, shots in enumerate((1, 5)):
        folder = tmp_path / str(job)
        write(folder, [f"task.shots={shots}"], 0.7, protocol={"shots": shots})
        results = run_results(folder)
        results["method"] = {"algorithm": "MAML", "options": {"first_order": False}}
        (folder / "results.json").write_text(json.dumps(results))
    write_sweep_report(tmp_path)
    text = (tmp_path / "sweep.md").read_text()
    assert "dataset glyphs.\n\nMethod: algorithm MAML, " in text
    assert "options.first_order false." in text
    assert "Different protocol: shots 1 or 5." in text
    page = Page(tmp_path / "report.html").text
    assert "apart from what is swept. Different protocol: shots 1 or 5." in page
    assert rows(tmp_path)[1]["method.algorithm"] == "MAML"


def test_values_with_a_bar_stay_in_their_cell(tmp_path):
    write(tmp_path / "a", ["dataset.root_pattern=a|b"], 0.7)
    write(tmp_path / "b", ["dataset.root_pattern=c"], 0.7)
    write_sweep_report(tmp_path)
    assert "| a\\|b | 1 |" in (tmp_path / "sweep.md").read_text()


def test_values_and_errors_are_no_html_in_markdown(tmp_path):
    write(tmp_path / "a", ["dataset.root_pattern=<b>"], 0.7)
    write(tmp_path / "b", ["dataset.root_pattern=c"], 0.7)
    failure = {"error": "one\n<i>two</i>\n# three", "overrides": ["dataset.root_pattern=c"]}
    (tmp_path / "b" / "results.json").unlink()
    (tmp_path / "b" / "failure.json").write_text(json.dumps(failure))
    write_sweep_report(tmp_path)
    text = (tmp_path / "sweep.md").read_text()
    assert "| &lt;b&gt; | 1 |" in text
    assert "\n- b: one &lt;i&gt;two&lt;/i&gt; # three\n" in text


@pytest.mark.parametrize(
    ("overrides", "keys"),
    [
        (("logger=console", "logger=jsonl"), ()),
        (("dataset.root=/a", "dataset.root=/b"), ("dataset.root",)),
        (("trainer.keep_checkpoints=1", "trainer.keep_checkpoints=2"), ()),
        (("model.name='a'", "model.name=a"), ()),
        (("model.name=A", "model.name=a"), ("model.name",)),
        (("~model.dropout", "logger=jsonl"), ()),
        (("trainer.profile=TRUE", "trainer.profile=true"), ()),
        (("model.dropout=Null", "model.dropout=null"), ()),
        (("dataset=glyphs", "dataset=omniglot"), ("dataset",)),
        (("+experiment=maml_a", "+experiment=maml_b"), ("experiment",)),
        (("trainer.iterations=1", "trainer.iterations=2"), ("trainer.iterations",)),
    ],
)
def test_which_keys_tell_settings_apart(tmp_path, overrides, keys):
    for job, override in enumerate(overrides):
        directory = tmp_path / str(job)
        write(directory, [override, f"seed={job}"], 0.7)
        # What a chosen group sets differs too, and is no key of its own.
        values = {"classes": job} if keys and "." not in keys[0] else {}
        configuration = {"seed": job, "dataset": values}
        if keys == ("experiment",):
            configuration["optimizer"] = {"lr": job}
        (directory / ".hydra" / "config.yaml").write_text(yaml.safe_dump(configuration))
    found = table(tmp_path)
    assert found.keys == keys and len(found.settings) == 1 + bool(keys)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_metrics_that_are_not_finite_are_read(tmp_path, value):
    write(tmp_path / "a", [], 0.7)
    results = run_results(tmp_path / "a")
    (tmp_path / "a" / "results.json").write_text(json.dumps({**results, "train_loss": value}))
    (setting,) = table(tmp_path).settings
    assert setting.train_loss is not None and str(setting.train_loss.mean) == str(float(value))


def test_keys_that_no_command_line_set_are_columns_too(tmp_path):
    for job, (filters, seed) in enumerate(((4, 0), (8, 1))):
        directory = tmp_path / str(job)
        write(directory, [f"seed={seed}"], 0.7)
        configuration = {"seed": seed, "model": {"filters": filters}, "logger": {"a": job}}
        (directory / ".hydra" / "config.yaml").write_text(yaml.safe_dump(configuration))
    write_sweep_report(tmp_path)
    assert [row["model.filters"] for row in rows(tmp_path)] == ["4", "8"]
    assert [row["runs"] for row in rows(tmp_path)] == ["1", "1"]


def test_results_stay_when_a_job_of_other_options_was_refused(tmp_path):
    write(tmp_path / "0", ["algorithm.inner_lr=0.1"], 0.7)
    write(tmp_path / "1", ["algorithm.inner_lr=0.4"], 0.6)
    failure = {"error": "an earlier run is here", "overrides": ["algorithm.inner_lr=0.2"]}
    (tmp_path / "0" / "failure.json").write_text(json.dumps(failure))
    report = write_sweep_report(tmp_path)
    assert report.failed == ()
    assert [(row["algorithm.inner_lr"], row["best"]) for row in rows(tmp_path)] == [
        ("0.1", "yes"),
        ("0.4", ""),
    ]


def test_copies_of_results_in_a_run_directory_are_no_runs(tmp_path):
    for job, rate in enumerate((0.1, 0.4)):
        write(tmp_path / str(job), [f"algorithm.inner_lr={rate}"], 0.5 + job / 10)
        copies = tmp_path / str(job) / "mlflow_artifacts" / "a"
        copies.mkdir(parents=True)
        (copies / "results.json").write_text((tmp_path / str(job) / "results.json").read_text())
    assert len(table(tmp_path).runs) == 2


def test_an_option_that_is_the_default_is_the_same_setting(tmp_path):
    for job, overrides in enumerate((["seed=0"], ["seed=1", "algorithm=maml"])):
        write(tmp_path / str(job), [*overrides, f"model.hidden=[4,{' ' * job}8]"], 0.7)
        choices = {"hydra": {"runtime": {"choices": {"algorithm": "maml"}}}}
        (tmp_path / str(job) / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(choices))
    (setting,) = table(tmp_path).settings
    assert len(setting.runs) == 2


@pytest.mark.parametrize(
    ("first", "second", "settings"),
    [("[40,40]", "[40, 4e1]", 1), ("[a,0.10]", "['a',0.1]", 1), ("[[1],2]", "[[1], 2]", 1),
     ("[40,40]", "[40,41]", 2)],
)  # fmt: skip
def test_lists_are_equal_however_they_are_written(tmp_path, first, second, settings):
    for job, hidden in enumerate((first, second)):
        write(tmp_path / str(job), [f"model.hidden={hidden}", f"seed={job}"], 0.5)
    assert len(table(tmp_path).settings) == settings


def test_a_group_that_the_choice_of_another_one_sets_is_not_swept(tmp_path):
    for job, (algorithm, optimizer) in enumerate((("maml", "adam"), ("reptile", "sgd"))):
        directory = tmp_path / str(job)
        write(directory, [f"algorithm={algorithm}"], 0.5 + job / 10)
        config = yaml.safe_load((directory / ".hydra" / "config.yaml").read_text())
        config["optimizer"] = {"_target_": optimizer, "lr": job}
        (directory / ".hydra" / "config.yaml").write_text(yaml.safe_dump(config))
        choices = {"algorithm": algorithm, "optimizer@_global_.optimizer": optimizer}
        hydra = {"hydra": {"runtime": {"choices": choices}}}
        (directory / ".hydra" / "hydra.yaml").write_text(yaml.safe_dump(hydra))
    assert table(tmp_path).keys == ("algorithm",)


def test_a_single_test_task_has_no_interval(tmp_path):
    for job, rate in enumerate((0.1, 0.4)):
        write(tmp_path / str(job), [f"algorithm.inner_lr={rate}"], 0.7)
        results = json.loads((tmp_path / str(job) / "results.json").read_text())
        (tmp_path / str(job) / "results.json").write_text(json.dumps({**results, "ci95": "NaN"}))
    report = write_sweep_report(tmp_path)
    assert {row["test_accuracy_ci95"] for row in rows(tmp_path)} == {""}
    assert {row["test_interval"] for row in rows(tmp_path)} == {""}
    assert "nan" not in "".join(report.summary_lines()) + (tmp_path / "sweep.md").read_text()


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("Traceback …\nValueError: no", "failed"),
        ("stopped at iteration 3 of 9", "stopped"),
    ],
)
def test_a_run_has_the_status_of_its_own_report(tmp_path, error, status):
    write(tmp_path / "0", ["seed=0"], 0.7)
    write(tmp_path / "1", ["seed=1"], 0.7)
    (tmp_path / "1" / "results.json").unlink()
    (tmp_path / "1" / "error.txt").write_text(error)
    report = write_sweep_report(tmp_path)
    assert read_run_record(tmp_path / "1").status(0.0) == status
    assert report.failed == (("1",) if status == "failed" else ())
    assert report.unfinished == (("1",) if status == "stopped" else ())
    listed = "- 1: ValueError: no" in (tmp_path / "sweep.md").read_text()
    assert listed == (status == "failed")


def test_a_run_that_failed_at_its_start_counts_as_failed(tmp_path):
    write(tmp_path / "0", ["seed=0"], 0.7)
    write(tmp_path / "1", ["seed=1"], 0.7)
    (tmp_path / "1" / "results.json").unlink()
    (tmp_path / "no run").mkdir()
    for name in ("1", "no run"):
        (tmp_path / name / "error.txt").write_text("ValueError: no")
    report = write_sweep_report(tmp_path)
    assert (report.failed, report.unfinished) == (("1",), ())


def test_protocols_that_differ_in_keys_not_swept_give_a_warning(tmp_path):
    write(tmp_path / "a", ["algorithm.inner_lr=0.1"], 0.7)
    write(tmp_path / "b", ["algorithm.inner_lr=0.4"], 0.9, protocol={"shots": 5})
    report = write_sweep_report(tmp_path)
    (warning,) = report.warnings
    assert "shots" in warning and "Not comparable" in (tmp_path / "sweep.md").read_text()
    assert f"warning: not comparable, {warning}" in report.summary_lines()


def test_differences_among_runs_of_one_choice_of_a_group_give_a_warning(tmp_path):
    for job, (dataset, split) in enumerate((("glyphs", 0), ("glyphs", 1), ("omniglot", 2))):
        protocol = {"dataset": dataset, "split_seed": split}
        write(tmp_path / str(job), [f"dataset={dataset}", f"seed={job}"], 0.7, protocol=protocol)
    (warning,) = write_sweep_report(tmp_path).warnings
    assert warning.startswith("split_seed differs")


def test_differences_that_follow_from_a_swept_group_give_no_warning(tmp_path):
    write(tmp_path / "a", ["dataset=glyphs"], 0.7)
    write(tmp_path / "b", ["dataset=omniglot"], 0.9, protocol={"dataset": "omniglot"})
    assert write_sweep_report(tmp_path).warnings == ()


def test_a_swept_option_of_the_model_is_a_difference_of_the_backbone_on_purpose(tmp_path):
    for filters in (32, 64):
        protocol = {"backbone": f"Conv4, filters={filters}"}
        write(tmp_path / str(filters), [f"model.filters={filters}"], 0.7, protocol=protocol)
    assert write_sweep_report(tmp_path).warnings == ()


def test_lower_mse_is_better_and_failures_are_listed(tmp_path):
    for job, (rate, error) in enumerate((("0.1", 2.0), ("0.4", 1.0))):
        overrides = [f"algorithm.inner_lr={rate}"]
        write(tmp_path / str(job), overrides, error, error, metric="mse")
    (tmp_path / "2").mkdir()
    failure = {"error": "it broke", "overrides": ["algorithm.inner_lr=9"]}
    (tmp_path / "2" / "failure.json").write_text(json.dumps(failure))
    report = write_sweep_report(tmp_path)
    assert [row["best"] for row in rows(tmp_path)] == ["", "yes", ""]
    assert [row["algorithm.inner_lr"] for row in rows(tmp_path)] == ["0.1", "0.4", "9"]
    assert report.failed == ("2",) and "- 2: it broke" in (tmp_path / "sweep.md").read_text()


def test_a_setting_without_a_finite_metric_is_not_the_best(tmp_path):
    write(tmp_path / "0", ["algorithm.inner_lr=0.9"], 0.2, float("nan"))
    write(tmp_path / "1", ["algorithm.inner_lr=0.1"], 0.7, 0.6)
    found = table(tmp_path)
    assert found.best is not None and found.settings[found.best].values == ("0.1",)


def test_without_any_metric_that_is_a_number_no_setting_is_the_best(tmp_path):
    for job, rate in enumerate(("0.9", "0.8")):
        write(tmp_path / str(job), [f"algorithm.inner_lr={rate}"], float("nan"), float("nan"))
    report = write_sweep_report(tmp_path)
    assert "no best setting: no validation metric is a number" in report.summary_lines()
    assert [row["best"] for row in rows(tmp_path)] == ["", ""]


def test_folders_without_a_table_are_refused(tmp_path):
    with pytest.raises(UserError, match="holds no run"):
        write_sweep_report(tmp_path)
    write(tmp_path / "a", [], 0.7)
    write(tmp_path / "b", ["dataset=sinusoid"], 0.9, metric="mse")
    with pytest.raises(UserError, match="regression"):
        write_sweep_report(tmp_path)
    (tmp_path / "b" / "results.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        write_sweep_report(tmp_path)


def test_the_command(tmp_path, monkeypatch, capsys):
    write(tmp_path / "a", [], 0.7)
    for folder, status in ((tmp_path, 0), (tmp_path / "nowhere", 2)):
        monkeypatch.setattr(sys, "argv", ["metadist", "report", str(folder)])
        with pytest.raises(SystemExit) as exit_info:
            runpy.run_module("metadist", run_name="__main__")
        assert exit_info.value.code == status
    printed = capsys.readouterr()
    assert "1 run finished" in printed.out and printed.err.startswith("error: ")


def test_values_that_differ_in_a_late_digit_are_different_settings(tmp_path):
    values = ("20240101", "20240102", "0.1234567", "0.1234568", "1e6", "1000000", "1.0")
    for job, value in enumerate(values):
        write(tmp_path / str(job), [f"dataset.seed={value}"], 0.7)
    write_sweep_report(tmp_path)
    values = [row["dataset.seed"] for row in rows(tmp_path)]
    assert values == ["20240101", "20240102", "0.1234567", "0.1234568", "1000000", "1"]


@pytest.mark.parametrize(("validation", "selected_by"), [(0.8, "validation"), (None, "test")])
def test_plot_names_what_the_best_was_selected_by(tmp_path, monkeypatch, validation, selected_by):
    texts = []

    def savefig(figure, *arguments, **options):
        figure.canvas.draw()
        texts.extend(each.get_text() for each in figure.findobj(Text))

    monkeypatch.setattr(Figure, "savefig", savefig)
    settings = [("algorithm=maml", "algorithm=anil"), ("optimizer.lr=1", "optimizer.lr=0.1")]
    settings.append((*settings[1], "optimizer.lr=0.01"))
    for number, overrides in enumerate(settings):
        for job, override in enumerate(overrides):
            write(tmp_path / f"{number}" / str(job), [override], 0.7 + job / 100, validation)
        write_sweep_report(tmp_path / str(number))
    for rate in ("0.1", "0.4"):
        for steps in ("1", "5"):
            overrides = [f"algorithm.inner_lr={rate}", f"algorithm.inner_steps={steps}"]
            write(tmp_path / "grid" / f"{rate} {steps}", overrides, 0.7, validation)
    write_sweep_report(tmp_path / "grid")
    assert sum(f"best on {selected_by}" in text for text in texts) == 4
