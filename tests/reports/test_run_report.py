"""`report.html` of a run: its data are those of the record, whatever state the run is in."""

import json
import os
from types import SimpleNamespace

import plotly.graph_objects
import pytest
from html_pages import Page
from tiny import compose
from written_runs import finished, write_run

from metadist.errors import UserError
from metadist.plots.run_figures import MAX_POINTS
from metadist.reports import published_comparison, run_report
from metadist.reports.published import load_cells, preset_iterations
from metadist.reports.run_record import read_run_record
from metadist.reports.run_report import write_run_report


def test_the_data_of_a_finished_run_are_those_of_its_record(tmp_path):
    directory = finished(tmp_path / "run")
    path = write_run_report(directory)
    page, figures = Page(path), Page(path).figures
    assert path == directory / "report.html" and path.stat().st_size < 3_000_000
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").open()]
    training = [line for line in lines if "train_loss" in line]
    validation = [line for line in lines if "validation_loss" in line]
    for metric in ("loss", "accuracy"):
        curves = {trace["name"]: trace for trace in figures[f"curve-{metric}"]["data"]}
        training_curve, _, validation_curve = curves.values()
        assert list(curves) == [
            "training (1 inner step)",
            "training (1 inner step), smoothed",
            "validation (3 inner steps)",
        ]
        assert training_curve["x"] == list(range(1, 31))
        assert training_curve["y"] == [line[f"train_{metric}"] for line in training]
        assert validation_curve["x"] == [10, 20, 30]
        assert validation_curve["y"] == [line[f"validation_{metric}"] for line in validation]
    assert "error_y" not in figures["curve-loss"]["data"][-1]
    assert "shapes" not in figures["curve-loss"]["layout"]  # the test is of the accuracy
    scales = [figures[f"curve-{n}"]["layout"]["yaxis"] for n in ("gradient_norm", "learning_rate")]
    assert [axis.get("type") for axis in scales] == ["log", None]
    assert figures["curve-accuracy"]["data"][-1]["error_y"]["array"] == [0.01] * 3
    assert figures["curve-accuracy"]["layout"]["shapes"][0]["y0"] == 0.75  # the test
    (norm,) = figures["curve-gradient_norm"]["data"]
    assert norm["y"] == [line["gradient_norm"] for line in training]
    assert figures["curve-learning_rate"]["data"][0]["y"] == [0.1] * 30
    (steps,) = figures["steps"]["data"]
    assert (steps["x"], steps["y"], steps["error_y"]["array"]) == (
        [0, 1],
        [0.5, 0.75],
        [0.03, 0.02],
    )
    assert sorted(figures["histogram"]["data"][0]["x"]) == [0.0, 0.0, 0.5, 1.0]
    parts = {trace["name"]: trace["x"] for trace in figures["time"]["data"]}
    assert parts == {"training": [15.0], "test": [2.0], "validation and checkpoints": [3.0]}
    (matrix,) = figures["confusions"]["data"]
    assert matrix["x"] == matrix["y"] == ["&lt;i&gt;dog&lt;/i&gt;", "cat"]
    assert matrix["customdata"] == [[1, 3], [2, 2]]
    assert figures["speed"]["data"][0]["y"] == [5.0] * 30
    assert set(figures) <= page.ids()
    for expected in ("75.00% ± 2.00%", "finished", "a <warning>", "torch 2.15.0", "algorithm MAML"):
        assert expected in page.text
    assert ["<i>dog</i>", "cat", "3"] in page.rows  # the most frequent confusion
    assert not [row for row in page.rows if len(row) == 3 and row[0] == row[1]]
    hardest = [row for row in page.rows if row[-1:] and row[-1].startswith("7,test,0,")]
    assert [row[0] for row in hardest] == ["3", "1", "2", "0"]  # equal accuracies by loss
    assert f"metadist replay {directory} --key 7,test,0,3" in page.text
    assert "torchrun --standalone --nproc_per_node=2 -m metadist maml" in page.text
    facts = "iterations 30 of 50 training loss 0.0333 time 0:00:20 strategy rpc, 2 workers seed 3"
    assert facts in page.text and ", 1 of 2" in page.text and ", 2 of 2" not in page.text
    assert (
        "Task 3: accuracy 0.00%" in page.text
        and "A, not B" in page.text
        and "A cat B <i>dog</i>" in page.text
    )


def test_facts_speed_and_profiles_are_those_of_the_run(tmp_path):
    results = {"samples_per_second": 80.0, "tasks_per_second": 5.0, "validation_accuracy": 0.5}
    directory = finished(tmp_path / "a run", ["+experiment=of_my_own"], results=results)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 31, "train_loss": 1.0, "samples_per_second": 80.0}\n')
    (directory / "profile").mkdir()
    for rank in (1, 0):
        (directory / "profile" / f"rank{rank}.txt").write_text(f"table of rank {rank}")
    page = Page(write_run_report(directory))
    for shown in ("speed 80 samples/s", "validation accuracy 50.00%", "preset of_my_own"):
        assert shown in page.text
    assert page.figures["speed"]["data"][0]["y"] == [80.0]
    assert "Profile: rank0 table of rank 0 Profile: rank1 table of rank 1" in page.text
    assert page.text.count(f"metadist replay '{directory}' --key 7,test,0,3") == 2


@pytest.mark.parametrize(("target", "own"), [("metadist.models.MLP", False), ("mine.MLP", True)])
def test_a_run_with_classes_of_ones_own_names_the_option_that_trusts_them(tmp_path, target, own):
    directory = finished(tmp_path / "run")
    (directory / ".hydra" / "config.yaml").write_text(f"model: {{_target_: {target}}}")
    page = Page(write_run_report(directory))
    option = "if you trust them, add --trust-code to metadist replay."
    assert (option in page.text) == own and page.text.count("--trust-code") == own


def test_figures_are_valid_for_plotly(tmp_path):
    figures = Page(write_run_report(finished(tmp_path / "run"))).figures
    for figure in figures.values():
        plotly.graph_objects.Figure(figure)  # raises for a property that does not exist


def test_the_page_is_self_contained_and_texts_are_no_markup(tmp_path):
    page = Page(write_run_report(finished(tmp_path / "run")))
    assert all(address.startswith("data:image/") for address in page.addresses())
    assert page.library == plotly.offline.get_plotlyjs()
    assert not {"b", "i", "warning", "link", "iframe"} & {tag for tag, _ in page.elements}
    assert "<" not in page.scripts["figures"]
    policy = next(a["content"] for _, a in page.elements if "Content-Security" in str(a))
    assert policy.startswith("default-src 'none'") and "http" not in policy


@pytest.mark.parametrize(
    ("file", "text", "age", "status", "shown"),
    [
        (None, "", 1, "running", "30 of 50 training iterations"),
        (None, "", 4000, "ended without results", "No error was recorded"),
        (
            "error.txt",
            "rank 0: failed\nTraceback <x>\nValueError: no",
            1,
            "failed",
            "<x> ValueError",
        ),
        ("error.txt", "stopped at iteration 30 of 50", 1, "stopped", "stopped at iteration 30"),
        ("failure.json", '{"error": "no memory", "exit_status": 1}', 1, "failed", "no memory"),
    ],
)
def test_runs_without_results_say_so(tmp_path, monkeypatch, file, text, age, status, shown):
    directory = write_run(tmp_path / "run")
    if file is not None:
        (directory / file).write_text(text)
    os.utime(directory / "metrics.jsonl", (1e9, 1e9))
    monkeypatch.setattr(run_report, "time", SimpleNamespace(time=lambda: 1e9 + age))
    page = Page(write_run_report(directory))
    assert status in page.text and page.text.count(shown) == 1
    assert {1: ", 0:00:01 ago", 4000: ", 1:06:40 ago"}[age] in page.text
    assert "validation accuracy at iteration 30" in page.text
    assert page.figures["curve-loss"]["data"][0]["x"] == list(range(1, 31))


def test_a_run_that_has_only_started_has_a_report(tmp_path):
    directory = write_run(tmp_path / "run", iterations=0)
    (directory / "metrics.jsonl").unlink()
    path = write_run_report(directory)
    page = Page(path)
    assert "running" in page.text and page.figures == {}
    os.utime(directory / ".hydra" / "config.yaml", (0, 0))
    assert "ended without results" in Page(write_run_report(directory)).text
    assert path.stat().st_size < 100_000  # without plotly.js
    with pytest.raises(UserError, match="holds no run"):
        write_run_report(tmp_path)


def test_values_that_are_not_finite_are_gaps(tmp_path):
    directory = write_run(tmp_path / "run", iterations=3)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 4, "train_loss": "NaN", "gradient_norm": "Infinity"}\n')
        file.write('{"iteration": 4, "validation_accuracy": 0.5}\n')  # without an interval
    page = Page(write_run_report(directory))
    figures = page.figures
    assert "50.00% validation accuracy at iteration 4" in page.text
    assert figures["curve-loss"]["data"][0]["y"][-1] is None
    assert figures["curve-gradient_norm"]["data"][0]["y"][-1] is None


def test_long_curves_keep_their_extremes(tmp_path):
    directory = write_run(tmp_path / "run", iterations=20_000)
    figures = Page(write_run_report(directory)).figures
    curve = figures["curve-loss"]["data"][0]
    assert len(curve["x"]) <= MAX_POINTS and curve["x"] == sorted(curve["x"])
    assert (max(curve["y"]), min(curve["y"])) == (1.0, 1 / 20_000)
    assert all(y == 1 / x for x, y in zip(curve["x"], curve["y"], strict=True))


@pytest.mark.parametrize(
    ("accuracy", "kind", "shown"),
    [
        (0.99, "good", "98.70% ± 0.40%, reached"),
        (0.983, "good", "98.70% ± 0.40%, reached"),  # within the published interval
        (0.9829, "bad", "0.41 points below"),
        (0.90, "bad", "8.70 points below"),
        ("NaN", "bad", "98.70% ± 0.40%, diverged"),
    ],
)
def test_the_result_of_a_preset_is_compared_with_the_published_one(
    tmp_path, monkeypatch, accuracy, kind, shown
):
    monkeypatch.setattr(published_comparison, "preset_iterations", lambda preset: 60)
    overrides = ["+experiment=maml_omniglot_5w1s", "trainer.iterations=500"]
    protocol = {"ways": 5, "shots": 1, "queries": 5, "dataset": "omniglot", "eval_seed": 0}
    results = {"test_accuracy": accuracy, "protocol": protocol}
    directory = finished(tmp_path / "run", overrides=overrides, results=results)
    page = Page(write_run_report(directory))
    assert shown in page.text and "arXiv 1703.03400, table 1" in page.text
    assert ("p", {"class": kind}) in page.elements
    assert "queries: 5 here, 1 in the paper" in page.text
    assert "Overrides beyond the preset: trainer.iterations=500" in page.text


def test_files_of_which_parts_are_missing_have_a_report(tmp_path):
    results = {"test_accuracy": 0.9, "iterations": 12}
    directory = finished(tmp_path / "run", results=results)
    for name in ("metrics.jsonl", "results.json"):
        (directory / name).unlink()
    (directory / "results.json").write_text(json.dumps(results))
    lines = [{"task": 0, "accuracy": 0.5}, {"task": 1}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "test_predictions.jsonl").write_text(text)
    (directory / ".hydra" / "hydra.yaml").write_text("hydra: {runtime: {choices: null}}")
    page = Page(write_run_report(directory))
    assert "90.00%" in page.text and "iterations 12" in page.text


def test_metrics_of_the_users_own_have_curves_and_ci95_has_none(tmp_path):
    directory = write_run(tmp_path / "run", iterations=2)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "train_entropy": 0.5, "validation_ci95": 0.5}\n')
        file.write('{"iteration": 2, "train_note": "slow", "train_entropy": "unknown"}\n')
        file.write(f'{{"iteration": 2, "train_huge": {10**400}}}\n')
    figures = Page(write_run_report(directory)).figures
    assert "curve-entropy" in figures and not {"curve-ci95", "curve-note", "curve-huge"} & {
        *figures
    }
    assert figures["curve-entropy"]["data"][0]["y"] == [0.5]


def test_test_metrics_of_the_users_own_are_facts(tmp_path):
    results = {"test_f1": 0.358, "test_<b>rank</b>": 2.0, "test_loss": 1.25, "last_change": 0.5}
    page = Page(write_run_report(finished(tmp_path / "run", results=results)))
    assert (
        "iterations 30 of 50 test metrics f1 0.3580, <b>rank</b> 2.0000 training loss" in page.text
    )
    assert "test loss" not in page.text


def test_only_the_hardest_tasks_and_confusions_are_listed(tmp_path):
    directory = finished(tmp_path / "run")
    names = [f"c{number:02}" for number in range(41)]
    task = {"labels": [*range(41)], "predictions": [*range(1, 41), 0], "classes": names}
    tasks = [{**task, "task": n, "accuracy": n / 20, "loss": 1.0} for n in range(20)]
    text = "".join(json.dumps(each) + "\n" for each in tasks)
    (directory / "test_predictions.jsonl").write_text(text)
    page = Page(write_run_report(directory))
    assert "confusions" not in page.figures  # of more than 40 classes
    assert len([row for row in page.rows if len(row) == 3 and row[2] == "20"]) == 12
    hardest = [row[0] for row in page.rows if row[-1:] and row[-1].startswith("7,test,0,")]
    assert hardest == [str(n) for n in range(10)]


def test_a_predicted_output_beyond_the_classes_has_its_number(tmp_path):
    directory = finished(tmp_path / "run")  # of train_ways=20, ways=2: 20 outputs
    task = {"task": 3, "labels": [0, 1], "predictions": [0, 7], "classes": ["cat", "dog"]}
    text = json.dumps({**task, "accuracy": 0.5, "loss": 1.0})
    (directory / "test_predictions.jsonl").write_text(text + "\n")
    page = Page(write_run_report(directory))
    assert ["dog", "output 7", "1"] in page.rows
    assert page.figures["confusions"]["data"][0]["x"] == ["cat", "dog", "output 7"]
    assert ("figcaption", {"title": "output 7 predicted, dog is true"}) in page.elements
    assert "H, not B" in page.text


def test_a_short_run_of_a_preset_is_not_compared(tmp_path):
    overrides = ["+experiment=maml_omniglot_5w1s_cosine", "trainer.iterations=30"]
    results = {"test_accuracy": 0.9, "protocol": {}}
    page = Page(write_run_report(finished(tmp_path / "run", overrides=overrides, results=results)))
    assert "Not compared: 30 of the preset's 15,000 iterations." in page.text
    assert "Recipe: 15,000 iterations of 16 tasks, cosine schedule." in page.text
    assert "98.70% ± 0.40%." in page.text and "points below" not in page.text
    assert ("p", {"class": "bad"}) not in page.elements


@pytest.mark.parametrize(
    "preset", ["maml_omniglot_20w1s", "maml_sinusoid_5_points", "anil_omniglot_20w1s_cosine"]
)
def test_the_iterations_of_a_preset_are_those_that_hydra_composes(preset):
    composed = compose(f"+experiment={preset}")
    assert preset_iterations(preset) == composed.trainer.iterations
    assert all(map(preset_iterations, load_cells()))
    assert preset_iterations("no_such_preset") is None


def test_the_last_line_of_a_traceback_stands_above_it(tmp_path):
    directory = write_run(tmp_path / "run")
    (directory / "error.txt").write_text(
        "Traceback …\n  File …\nZeroDivisionError: division by zero\n"
    )
    page = Page(write_run_report(directory))
    assert page.text.count("ZeroDivisionError: division by zero") == 2


@pytest.mark.parametrize("tested", [True, False])
def test_a_single_task_has_no_interval(tmp_path, tested):
    results = {"test_accuracy": 0.75, "ci95": "NaN", "test_tasks": 1, "protocol": {}}
    directory = write_run(tmp_path / "run", results=results if tested else None, iterations=2)
    with (directory / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 2, "validation_accuracy": 0.5, "validation_ci95": "NaN"}\n')
    text = Page(write_run_report(directory)).text
    caption = "test accuracy, mean over 1 tasks" if tested else "validation accuracy at iteration 2"
    assert caption in text and "± nan" not in text


def test_regression_runs_show_their_curves(tmp_path):
    results = {"test_mse": 0.5, "ci95": 0.1, "test_tasks": 2, "protocol": {"shots": 1}}
    directory = write_run(tmp_path / "run", results=results, metric="mse")
    lines = [
        {
            "task": 0,
            "targets": [[1.0], [2.0]],
            "predictions": [[1.5], [2.5]],
            "mse": 0.25,
            "loss": 1,
        },
        {
            "task": 1,
            "targets": [[1.0], [2.0]],
            "predictions": [[0.0], [1.0]],
            "mse": 1.0,
            "loss": 1,
        },
    ]
    (directory / "test_predictions.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    task = {"task": 1, "support": [[0.5], [1.5]], "inputs": [3.0, 1.0], "before": [7.0, 8.0]}
    (directory / "test_tasks.json").write_text(json.dumps({"hardest": [task]}))
    page = Page(write_run_report(directory))
    assert "0.5 ± 0.1" in page.text and "curve-mse" in page.figures
    assert "confusions" not in page.figures and read_run_record(directory).hardest(1) == [1]
    truth, before, after, support = page.figures["task-hardest-1"]["data"]
    assert [truth["x"], truth["y"]] == [[1.0, 3.0], [2.0, 1.0]]  # by input
    assert (before["y"], after["y"]) == ([8.0, 7.0], [1.0, 0.0])
    assert (support["x"], support["y"]) == ([0.5], [1.5])
    for changed in ({}, {"targets": [[1.0]], "predictions": [[0.0]]}):  # not as many as inputs
        text = json.dumps({"task": 1, "mse": 1.0, **changed}) + "\n"
        (directory / "test_predictions.jsonl").write_text(text)
        assert "task-hardest-1" not in Page(write_run_report(directory)).figures


def test_profiles_that_are_links_or_pipes_are_left_out(tmp_path):
    directory = finished(tmp_path / "run")
    (tmp_path / "private").write_text("a private file")
    (directory / "profile").mkdir()
    (directory / "profile" / "rank0.txt").symlink_to(tmp_path / "private")
    (directory / "profile" / "rank1.txt").write_text("table of rank 1")
    os.mkfifo(directory / "profile" / "rank2.txt")
    text = write_run_report(directory).read_text()
    assert "table of rank 1" in text and "a private file" not in text
