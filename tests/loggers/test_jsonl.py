"""`metrics.jsonl`: precision, resuming, truncated lines, full disks."""

import json
import math
import os
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from example_runs import example_run

from metadist.errors import UserError
from metadist.loggers import JsonlLogger, json_value, read_metrics


def write(directory, iterations, start_iteration=0):
    logger = JsonlLogger()
    logger.start(example_run(directory, start_iteration))
    for iteration in iterations:
        logger.log_metrics({"iteration": iteration, "train_loss": 1 / iteration})
    logger.close()
    return directory / "metrics.jsonl"


def iterations_of(path):
    return [record["iteration"] for record in read_metrics(path)]


def test_floats_are_read_back_with_identical_bits(tmp_path):
    values = [0.1 + 0.2, 1e-300, math.pi * 1e17, -0.0]
    logger = JsonlLogger()
    logger.start(example_run(tmp_path))
    logger.log_metrics(
        {"iteration": 1, **{f"v{index}": value for index, value in enumerate(values)}}
    )
    read = json.loads((tmp_path / "metrics.jsonl").read_text())  # there before close()
    logger.close()
    assert [read[f"v{index}"].hex() for index in range(4)] == [value.hex() for value in values]


def test_scalars_of_numpy_and_torch_keep_their_value(tmp_path):
    logger = JsonlLogger()
    logger.start(example_run(tmp_path))
    logger.log_metrics({"iteration": np.int64(3), "a": np.float32(0.1), "b": torch.tensor(0.1)})
    logger.close()
    exact = float(np.float32(0.1))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"iteration": 3, "a": exact, "b": exact}]


def test_what_json_has_no_type_for_is_written_all_the_same():
    values = {
        "array": np.array([[1, 2]]),
        "tensor": torch.tensor([0.5, math.nan]),
        "path": Path("a/b"),
        3: None,
        "truth": True,
    }
    expected = {"array": [[1, 2]], "tensor": [0.5, "NaN"], "path": "a/b", "3": None, "truth": True}
    assert json_value(values) == expected
    json.dumps(json_value(values), allow_nan=False)


def test_non_finite_numbers_are_valid_json_and_are_read_back(tmp_path):
    logger = JsonlLogger()
    logger.start(example_run(tmp_path))
    logger.log_metrics(
        {"iteration": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "note": "text"}
    )
    logger.close()
    path = tmp_path / "metrics.jsonl"

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_metrics(path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["note"]) == (math.inf, -math.inf, "text")


def test_resumed_run_has_each_line_once(tmp_path):
    path = write(tmp_path, range(1, 8))
    before = path.read_bytes().splitlines()[:5]
    write(tmp_path, range(6, 11), start_iteration=5)
    assert iterations_of(path) == list(range(1, 11))
    assert path.read_bytes().splitlines()[:5] == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_truncated_last_line_is_dropped_wherever_it_was_cut(tmp_path):
    path = write(tmp_path, range(1, 5))
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        complete = cut == len(whole) - 1  # all but the newline
        assert iterations_of(path) == ([1, 2, 3, 4] if complete else [1, 2, 3])
        write(tmp_path, [4], start_iteration=3)
        assert path.read_bytes() == whole


def test_last_line_of_zeros_after_a_power_failure_is_dropped(tmp_path):
    path = write(tmp_path, range(1, 4))
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    write(tmp_path, [4], start_iteration=3)
    assert iterations_of(path) == [1, 2, 3, 4]


def test_nested_line_is_an_error(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"[" * 100_000 + b'\n{"iteration": 2}\n')
    with pytest.raises(UserError, match=r"line 1 of .* is not a JSON object"):
        read_metrics(path)


def test_invalid_line_in_the_middle_is_an_error(tmp_path):
    path = write(tmp_path, range(1, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"iteration": 2, "tr\n' + lines[2])
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl"):
        read_metrics(path)
    with pytest.raises(UserError, match="line 2"):
        write(tmp_path, [4], start_iteration=3)


def test_new_run_renames_old_files(tmp_path):
    for iterations in ([1], [1, 2], [1, 2, 3]):
        write(tmp_path, iterations)
    assert iterations_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert iterations_of(tmp_path / "metrics.jsonl.1") == [1]
    assert iterations_of(tmp_path / "metrics.jsonl.2") == [1, 2]


def test_run_resumed_into_a_new_directory_creates_a_file(tmp_path):
    assert iterations_of(write(tmp_path, [6], start_iteration=5)) == [6]


def test_unwritable_directory_is_a_user_error(tmp_path):
    (tmp_path / "file").touch()
    logger = JsonlLogger()
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl \(Not a directory\)"):
        logger.start(example_run(tmp_path / "file"))
    logger.close()
    logger.close()


def test_full_disk_is_a_user_error_and_the_run_can_be_resumed(tmp_path):
    logger = JsonlLogger()
    logger.start(example_run(tmp_path))
    logger.log_metrics({"iteration": 1, "train_loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl \(File too large\)"):
            logger.log_metrics({"iteration": 2, "train_loss": 0.5})
        logger.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert iterations_of(path) == [1]
    write(tmp_path, [2], start_iteration=1)
    assert iterations_of(path) == [1, 2]


def test_reading_a_missing_file_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")


def test_flush_syncs_the_file_to_disk(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    logger = JsonlLogger()
    logger.start(example_run(tmp_path))
    logger.log_metrics({"iteration": 1})
    logger.flush()
    logger.close()
    assert synced == [(tmp_path / "metrics.jsonl").stat().st_ino]


def test_a_file_that_was_moved_is_an_error(tmp_path):
    logger = JsonlLogger()
    logger.start(example_run(tmp_path))
    (tmp_path / "metrics.jsonl").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"metrics\.jsonl was moved or deleted during the run"):
        logger.flush()
    logger.close()
