"""A run beside the published result of its preset."""

import pytest
from written_runs import finished, write_run

from metadist.reports.published_comparison import compare_with_published
from metadist.reports.run_record import read_run_record


@pytest.mark.parametrize(
    ("shots", "notes"),
    [
        ({"shots": 5, "train_shots": 10}, []),
        ({"shots": 5}, ["train shots: 5 here, 10 in the paper."]),
    ],
)
def test_an_error_is_compared_with_the_published_one_after_each_number_of_steps(
    tmp_path, shots, notes
):
    rows = [{"steps": k, "mean": mse, "ci95": 0.1} for k, mse in ((0, 3.0), (1, 0.6), (5, 0.5))]
    results = {"test_mse": 0.4, "ci95": 0.1, "test_mse_by_steps": rows, "protocol": shots}
    results["iterations"] = 70_000
    overrides = ["+experiment=maml_sinusoid_5_points"]
    directory = write_run(tmp_path / "run", overrides, results, metric="mse")
    found = compare_with_published(read_run_record(directory))
    assert found["kind"] == "bad" and found["notes"] == notes
    assert found["sentence"].endswith(
        ": 0.67 after 1 step, reached (0.6 here); "
        "0.38 after 5 steps, 0.120 above (0.5 here); 0.35 after 10 steps."
    )


def test_another_task_is_not_compared_with_the_published_result(tmp_path):
    protocol = {"ways": 5, "shots": 5, "queries": 1}
    results = {"test_accuracy": 0.995, "protocol": protocol}
    directory = finished(
        tmp_path / "run", overrides=["+experiment=maml_omniglot_5w1s"], results=results
    )
    found = compare_with_published(read_run_record(directory))
    assert found["kind"] == "muted" and "reached" not in found["sentence"]
    assert "shots: 5 here, 1 in the paper." in found["notes"]
    assert "Not compared: another task than the published one." in found["notes"]


def test_the_remark_of_a_published_result_is_a_note(tmp_path):
    directory = write_run(tmp_path / "run", ["+experiment=fomaml_omniglot_5w1s"])
    notes = compare_with_published(read_run_record(directory))["notes"]
    assert "Remark: run by the authors of Reptile with MAML's code and settings." in notes


def test_a_preset_without_a_published_result_is_not_compared(tmp_path):
    for preset in ("maml_sinusoid", "of_my_own"):
        directory = write_run(tmp_path / preset, [f"+experiment={preset}"])
        assert compare_with_published(read_run_record(directory)) is None


def test_an_option_that_is_off_and_not_recorded_is_a_difference(tmp_path):
    protocol = {"ways": 20, "shots": 1, "class_split": "alphabets", "within_alphabet": True}
    preset = "+experiment=prototypical_omniglot_lake_20w1s"
    for drawers, kind in (({}, "muted"), ({"test_drawers": True}, "good")):
        results = {"test_accuracy": 0.90, "protocol": {**protocol, **drawers}}
        directory = finished(tmp_path / kind, overrides=[preset], results=results)
        found = compare_with_published(read_run_record(directory))
        assert found["kind"] == kind
        assert ("test drawers: False here, True in the paper." in found["notes"]) == (not drawers)


def test_a_run_without_results_has_no_differences(tmp_path):
    preset = "+experiment=prototypical_omniglot_lake_20w1s"
    found = compare_with_published(read_run_record(write_run(tmp_path / "run", [preset])))
    assert not any("in the paper" in note or "another task" in note for note in found["notes"])
