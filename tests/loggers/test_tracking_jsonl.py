"""`metrics.jsonl`: precision, resuming, torn lines, full disks."""

import json
import math
import resource

import numpy as np
import pytest
import torch

from metadist.errors import UserError
from metadist.loggers import JsonLines, Run, read_metrics


def run(directory, start_iteration=0):
    return Run(directory, "maml", {}, 10, start_iteration, "MAML on glyphs")


def write(directory, iterations, start_iteration=0):
    tracker = JsonLines()
    tracker.start(run(directory, start_iteration))
    for iteration in iterations:
        tracker.record({"iteration": iteration, "train_loss": 1 / iteration})
    tracker.close()
    return directory / "metrics.jsonl"


def iterations_of(path):
    return [record["iteration"] for record in read_metrics(path)]


def test_floats_come_back_bit_for_bit(tmp_path):
    values = [0.1 + 0.2, 1e-300, math.pi * 1e17, -0.0]
    tracker = JsonLines()
    tracker.start(run(tmp_path))
    tracker.record({"iteration": 1, **{f"v{place}": value for place, value in enumerate(values)}})
    read = json.loads((tmp_path / "metrics.jsonl").read_text())  # there before close()
    tracker.close()
    assert [read[f"v{place}"].hex() for place in range(4)] == [value.hex() for value in values]


def test_scalars_of_numpy_and_torch_keep_their_value(tmp_path):
    tracker = JsonLines()
    tracker.start(run(tmp_path))
    tracker.record({"iteration": np.int64(3), "a": np.float32(0.1), "b": torch.tensor(0.1)})
    tracker.close()
    exact = float(np.float32(0.1))
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"iteration": 3, "a": exact, "b": exact}]


def test_what_is_not_finite_is_valid_json_and_comes_back(tmp_path):
    tracker = JsonLines()
    tracker.start(run(tmp_path))
    tracker.record({"iteration": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "note": "text"})
    tracker.close()
    path = tmp_path / "metrics.jsonl"

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    json.loads(path.read_text(), parse_constant=refuse)
    (record,) = read_metrics(path)
    assert math.isnan(record["a"])
    assert (record["b"], record["c"], record["note"]) == (math.inf, -math.inf, "text")


def test_a_resumed_run_has_each_record_once(tmp_path):
    path = write(tmp_path, range(1, 8))
    before = path.read_bytes().splitlines()[:5]
    write(tmp_path, range(6, 11), start_iteration=5)
    assert iterations_of(path) == list(range(1, 11))
    assert path.read_bytes().splitlines()[:5] == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_torn_last_line_is_dropped_wherever_it_was_torn(tmp_path):
    path = write(tmp_path, range(1, 5))
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for cut in range(last, len(whole)):
        path.write_bytes(whole[:cut])
        complete = cut == len(whole) - 1  # all but the newline
        assert iterations_of(path) == ([1, 2, 3, 4] if complete else [1, 2, 3])
        write(tmp_path, [4], start_iteration=3)
        assert path.read_bytes() == whole


def test_a_last_line_of_zeros_after_a_power_cut_is_dropped(tmp_path):
    path = write(tmp_path, range(1, 4))
    path.write_bytes(path.read_bytes() + b"\0" * 100)
    write(tmp_path, [4], start_iteration=3)
    assert iterations_of(path) == [1, 2, 3, 4]


def test_a_broken_line_in_the_middle_is_not_passed_over(tmp_path):
    path = write(tmp_path, range(1, 4))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b'{"iteration": 2, "tr\n' + lines[2])
    with pytest.raises(UserError, match=r"line 2 of .*metrics\.jsonl"):
        read_metrics(path)
    with pytest.raises(UserError, match="line 2"):
        write(tmp_path, [4], start_iteration=3)


def test_a_new_run_moves_old_files_aside(tmp_path):
    for iterations in ([1], [1, 2], [1, 2, 3]):
        write(tmp_path, iterations)
    assert iterations_of(tmp_path / "metrics.jsonl") == [1, 2, 3]
    assert iterations_of(tmp_path / "metrics.jsonl.1") == [1]
    assert iterations_of(tmp_path / "metrics.jsonl.2") == [1, 2]


def test_a_run_resumed_into_a_new_directory_begins_a_file(tmp_path):
    assert iterations_of(write(tmp_path, [6], start_iteration=5)) == [6]


def test_a_directory_that_cannot_be_written_is_said_in_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    tracker = JsonLines()
    with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl \(Not a directory\)"):
        tracker.start(run(tmp_path / "file"))
    tracker.close()
    tracker.close()


def test_a_full_disk_is_said_and_the_run_can_be_resumed(tmp_path):
    tracker = JsonLines()
    tracker.start(run(tmp_path))
    tracker.record({"iteration": 1, "train_loss": 1.0})
    path = tmp_path / "metrics.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 9, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*metrics\.jsonl \(File too large\)"):
            tracker.record({"iteration": 2, "train_loss": 0.5})
        tracker.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert iterations_of(path) == [1]
    write(tmp_path, [2], start_iteration=1)
    assert iterations_of(path) == [1, 2]


def test_reading_what_is_not_there_is_a_user_error(tmp_path):
    with pytest.raises(UserError, match=r"cannot read .*metrics\.jsonl"):
        read_metrics(tmp_path / "metrics.jsonl")
