"""Two runs on the same test tasks, against SciPy's paired t-test."""

import math

import numpy as np
import pytest

from metadist.errors import UserError
from metadist.reports import (
    TEST_PREDICTIONS_FILE,
    compare_runs,
    write_results,
    write_test_predictions,
)


def write_run(directory, values, metric="accuracy", protocol=None, labels=(0, 1), **more):
    directory.mkdir()
    protocol = {"ways": 2, "backbone": "Conv4"} | (protocol or {})
    write_results(directory, {f"test_{metric}": float(np.mean(values)), "protocol": protocol})
    records = [
        {"task": i, "classes": ["a", f"b{i}"], "labels": list(labels), metric: value, **more}
        for i, value in enumerate(values)
    ]
    write_test_predictions(directory / TEST_PREDICTIONS_FILE, records)
    return directory


@pytest.mark.parametrize("metric", ["accuracy", "mse"])
def test_difference_and_interval_against_scipy(tmp_path, metric):
    rng = np.random.default_rng(0)
    hard = rng.random(50)
    first, second = hard + 0.01 * rng.random(50), hard + 0.02 * rng.random(50)
    runs = [
        write_run(tmp_path / name, values.tolist(), metric)
        for name, values in (("a", first), ("b", second))
    ]
    found = compare_runs(*runs)
    from scipy import stats  # takes a second to import

    interval = stats.ttest_rel(second, first).confidence_interval(0.95)
    assert found.difference == pytest.approx((interval.low + interval.high) / 2, rel=1e-9)
    assert found.ci95 == pytest.approx((interval.high - interval.low) / 2, rel=1e-9)
    assert found.means == pytest.approx((first.mean(), second.mean()), rel=1e-12)
    assert (found.metric, found.tasks) == (metric, 50)


def test_values_that_are_not_finite_have_no_interval(tmp_path):
    first = write_run(tmp_path / "a", [0.5, math.nan], "mse")
    second = write_run(tmp_path / "b", [0.5, 0.25], "mse")
    assert compare_runs(str(first), str(second)).ci95 is None


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    first = write_run(tmp_path / "a", [0.5, 0.75])
    other = write_run(tmp_path / "b", [0.5, 0.75], protocol={"backbone": "MLP"})
    with pytest.raises(UserError, match=r"backbone differs: Conv4 \(first\), MLP \(second\)"):
        compare_runs(first, other)
    assert compare_runs(first, other, ["backbone"]).difference == 0
    message = "were not tested on the same tasks"
    with pytest.raises(UserError, match=message):
        compare_runs(first, write_run(tmp_path / "c", [0.5, 0.75], labels=(1, 0)))
    with pytest.raises(UserError, match=message):
        compare_runs(first, write_run(tmp_path / "d", [0.5, 0.75, 1.0]))
    for name, task in (("images", {"query_images": [3]}), ("points", {"targets": [[0.5], [1.5]]})):
        with pytest.raises(UserError, match=message):
            compare_runs(first, write_run(tmp_path / name, [0.5, 0.75], **task))
    with pytest.raises(UserError, match=message):
        compare_runs(first, write_run(tmp_path / "mse", [0.5, 0.75], "mse"))
    # What differs in the protocol can only be left out of account where the tasks are the same.
    with pytest.raises(UserError, match=r"what you compare, add --ignore backbone\."):
        compare_runs(first, other)
    fewer = write_run(tmp_path / "e", [0.5], protocol={"backbone": "MLP"})
    with pytest.raises(UserError, match=r"test both under the same one\."):
        compare_runs(first, fewer)
    (other / TEST_PREDICTIONS_FILE).unlink()
    with pytest.raises(UserError, match=r"b has no predictions, because"):
        compare_runs(first, other, ["backbone"])
    with pytest.raises(UserError, match="none does not exist: give the directory"):
        compare_runs(first, tmp_path / "none")


def test_labels_alone_do_not_tell_tasks_apart(tmp_path):
    runs = [
        write_run(tmp_path / name, [0.5, 0.75], protocol={"eval_seed": seed}, classes=None)
        for seed, name in enumerate("bc")
    ]
    with pytest.raises(UserError, match=r"eval_seed differs.* test both under the same one\."):
        compare_runs(*runs)
    with pytest.raises(UserError, match="were not tested on the same tasks"):
        compare_runs(*runs, ["eval_seed"])


def test_tasks_of_other_classes_are_not_the_same_even_if_their_division_is_ignored(tmp_path):
    runs = [
        write_run(tmp_path / name, [0.5, 0.75], protocol={"split_seed": seed}, classes=["a", name])
        for seed, name in enumerate("bc")
    ]
    with pytest.raises(UserError, match="were not tested on the same tasks"):
        compare_runs(*runs, ["split_seed"])
