"""Files of a run with valid syntax and values of other types are refused in one sentence."""

import json
import math

import pytest

from metadist.errors import UserError
from metadist.loggers import read_metrics
from metadist.reports import read_overrides, read_results, read_test_predictions
from metadist.reports.file_schema import Contents, Evaluation, ExampleTasks, Results, mismatch
from metadist.reports.run_directory import read_hydra, read_json

IMAGE_TASK = {
    "task": 0,
    "support": {"labels": [0], "images": ["data:"]},
    "query": {"indices": [3], "images": ["data:"]},
}
FUNCTION = {"task": 1, "support": [[0.0], [1.0]], "inputs": [0.5], "before": []}


def test_what_metadist_writes_is_accepted():
    results = {"test_mse": "NaN", "ci95": None, "iterations": 4, "wall_seconds": 3.5, "own": [1]}
    assert mismatch(results, Results) == ""
    assert mismatch({**results, "iterations": [4, 8]}, Evaluation) == ""
    assert mismatch({"hardest": [IMAGE_TASK], "typical": [FUNCTION]}, ExampleTasks) == ""


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"protocol": [1]}, "protocol is [1]: input should be"),
        ({"wall_seconds": math.nan}, "wall_seconds is nan: "),
        ({"test_accuracy": None}, "test_accuracy is None: "),
        ({"iterations": 10**400}, "iterations is 1000"),
        ({"seed": [1]}, "seed is [1]: "),
        ({"test_mse_by_steps": [{"mean": 0.5}]}, "test_mse_by_steps.0.steps is {'mean': 0.5}: "),
        ({"method": "\x1b[31m"}, r"method is '\x1b[31m'"),
    ],
)
def test_results_of_other_types_are_refused(tmp_path, values, expected):
    (tmp_path / "results.json").write_text(json.dumps(values))
    with pytest.raises(UserError) as error:
        read_results(tmp_path)
    assert f"results.json is damaged ({expected}" in str(error.value)
    assert len(str(error.value)) < 300 + len(str(tmp_path)) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change",
    [
        {"support": None},
        {"support": {"labels": [0, 1], "images": ["data:"]}},
        {"query": {"images": ["data:"]}},
        {"task": -1},
    ],
)
def test_example_tasks_of_other_types_are_refused(tmp_path, change):
    path = tmp_path / "test_tasks.json"
    path.write_text(json.dumps({"hardest": [{**IMAGE_TASK, **change}]}))
    with pytest.raises(UserError, match=r"test_tasks\.json is damaged \(hardest\.0\."):
        read_json(path, ExampleTasks)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"before": [0.5]}, "it has 2 inputs and 1 predictions"),
        ({"inputs": [0.0, float("nan")]}, "finite number"),
        ({"support": []}, "at least 2 items"),
    ],
)
def test_functions_that_do_not_fit_are_refused(tmp_path, change, message):
    task = {"task": 0, "support": [[0.5], [1.0]], "inputs": [0.0, 1.0], "before": [], **change}
    path = tmp_path / "test_tasks.json"
    path.write_text(json.dumps({"hardest": [task]}))
    with pytest.raises(UserError, match=r"test_tasks\.json is damaged \(hardest\.0\.") as error:
        read_json(path, ExampleTasks)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "change", [{"labels": [None]}, {"predictions": [0, 1]}, {"loss": 10**400}, {"classes": 3}]
)
def test_predictions_of_other_types_are_refused(tmp_path, change):
    record = {"task": 0, "labels": [0], "predictions": [0], "accuracy": 1.0, **change}
    (tmp_path / "test_predictions.jsonl").write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"test_predictions\.jsonl cannot be read \(0"):
        read_test_predictions(tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"iteration": 1, "train_loss": []}',
        '{"train_loss": 1.0}',
        '{"iteration": 1, "seconds": NaN}',
        '{"iteration": 1, "seconds": Infinity}',
        f'{{"iteration": {10**20}}}',
        f'{{"iteration": 1, "train_loss": {10**400}}}',
    ],
)
def test_lines_without_numbers_are_refused(tmp_path, text):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{text}\n{{"iteration": 1}}\n')
    with pytest.raises(UserError, match=r"line 1 of .*metrics\.jsonl"):
        read_metrics(path)


def test_yaml_files_of_other_types_are_refused(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/overrides.yaml").write_text("1.5\n")
    (tmp_path / ".hydra/hydra.yaml").write_text("hydra: {runtime: {config_sources: [1]}}\n")
    with pytest.raises(UserError, match=r"overrides\.yaml is damaged"):
        read_overrides(tmp_path)
    with pytest.raises(UserError, match=r"hydra\.yaml is damaged \(runtime\.config_sources\.0 is"):
        read_hydra(tmp_path)


@pytest.mark.parametrize(
    "values", [{"protocol": []}, {"learner": None}, {"configuration": {"dataset": 1}}]
)
def test_checkpoints_of_other_types_are_refused(values):
    assert mismatch(values, Contents)


def test_the_refusal_of_a_huge_or_long_value_is_short(tmp_path):
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra/overrides.yaml").write_text(f"0x{'f' * 6000}\n")
    with pytest.raises(UserError, match=r"overrides\.yaml is damaged \(the whole is <?int"):
        read_overrides(tmp_path)
    path = tmp_path / "test_tasks.json"
    path.write_text(json.dumps({"\x1b[31m\n" * 200: 3}))
    with pytest.raises(UserError) as error:
        read_json(path, ExampleTasks)
    assert "\x1b" not in str(error.value) and len(str(error.value)) < 400 + len(str(path))
