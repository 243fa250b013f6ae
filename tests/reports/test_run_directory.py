"""The files in a run directory: what is written is read back, and damaged files are refused."""

import json
import math
import os
import shlex
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from metadist.errors import UserError
from metadist.files import locked_directory
from metadist.reports import (
    ENVIRONMENT_FILE,
    FAILURE_FILE,
    RESULTS_FILE,
    TEST_PREDICTIONS_FILE,
    WORKER_ERROR_FILE,
    directory_override,
    pop_worker_error,
    read_config,
    read_failure,
    read_overrides,
    read_results,
    read_test_predictions,
    trust_option,
    write_failure,
    write_json,
    write_results,
    write_test_predictions,
)


def test_results_are_read_back_and_are_valid_json(tmp_path):
    assert read_results(tmp_path) is None
    write_results(tmp_path, {"test_mse": math.nan, "ci95": 0.1})
    text = (tmp_path / RESULTS_FILE).read_text()
    assert text.endswith("}\n") and "NaN" in json.loads(text)["test_mse"]
    assert read_results(tmp_path) == {"test_mse": "NaN", "ci95": 0.1}
    assert [path.name for path in tmp_path.iterdir()] == [RESULTS_FILE]


def test_unwritable_results_are_a_user_error(tmp_path):
    message = r"cannot write .*results\.json \(No such file.*resume=auto"
    with pytest.raises(UserError, match=message):
        write_results(tmp_path / "missing", {})


def test_failures_are_read_back(tmp_path):
    directory = tmp_path / "new" / "0"
    write_failure(directory, ["seed=0"], "it broke", 2)
    assert read_failure(directory) == {
        "error": "it broke",
        "exit_status": 2,
        "overrides": ["seed=0"],
    }
    assert read_failure(tmp_path) is None


def test_a_directory_to_which_another_run_writes_gets_no_failure(tmp_path):
    with locked_directory(tmp_path):
        write_failure(tmp_path, [], "another run is writing", 2)
    assert read_failure(tmp_path) is None


def test_a_directory_with_results_gets_no_failure(tmp_path):
    write_results(tmp_path, {"test_accuracy": 0.5})
    write_failure(tmp_path, ["algorithm.inner_lr=0.2"], "an earlier run is here", 2)
    assert read_failure(tmp_path) is None


def test_a_full_disk_leaves_the_old_files(tmp_path, monkeypatch):
    def no_space(file):
        raise OSError(28, "No space left on device")

    write_failure(tmp_path, [], "the first error", 2)
    write_json(tmp_path / ENVIRONMENT_FILE, {"python": "3.11"})
    before = (tmp_path / ENVIRONMENT_FILE).read_bytes()
    monkeypatch.setattr(os, "fsync", no_space)
    write_failure(tmp_path, [], "another error", 2)
    with pytest.raises(UserError, match=r"environment\.json \(No space left"):
        write_json(tmp_path / ENVIRONMENT_FILE, {"python": "3.12"})
    assert (read_failure(tmp_path) or {})["error"] == "the first error"
    assert (tmp_path / ENVIRONMENT_FILE).read_bytes() == before


def test_failure_in_an_unwritable_directory_is_ignored(tmp_path):
    (tmp_path / "file").touch()
    write_failure(tmp_path / "file", [], "it broke", 1)


@pytest.mark.parametrize("content", ["{", "[]", "\udcff", "[" * 100_000])
def test_damaged_files_are_refused(tmp_path, content):
    for name, read in ((RESULTS_FILE, read_results), (FAILURE_FILE, read_failure)):
        (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
        with pytest.raises(UserError, match=rf"{name} (cannot be read|is not a JSON object)"):
            read(tmp_path)


def test_predictions_are_read_back(tmp_path):
    assert read_test_predictions(tmp_path) is None
    records = [{"task": 0, "classes": ["kana/か\u2028", "b\udcff"], "labels": [0, 1], "loss": 0.25}]
    write_test_predictions(tmp_path / TEST_PREDICTIONS_FILE, [*records, {"task": 1}])
    assert read_test_predictions(tmp_path) == [*records, {"task": 1}]
    assert [path.name for path in tmp_path.iterdir()] == [TEST_PREDICTIONS_FILE]
    for damaged in ("{", "[]\n", "[" * 100_000):
        (tmp_path / TEST_PREDICTIONS_FILE).write_text(damaged)
        with pytest.raises(UserError, match=r"test_predictions\.jsonl cannot be read"):
            read_test_predictions(tmp_path)


def test_worker_error_is_read_once(tmp_path):
    assert pop_worker_error(tmp_path) == ""
    (tmp_path / WORKER_ERROR_FILE).write_text("warning: slow\nonly 12 classes.\n")
    assert pop_worker_error(tmp_path) == "only 12 classes."
    assert pop_worker_error(tmp_path) == "" and not list(tmp_path.iterdir())


def test_config_and_overrides(tmp_path):
    assert read_config(tmp_path) == {} and read_overrides(tmp_path) == []
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "config.yaml").write_text("seed: 3\nroot: ${oc.env:HOME}\n")
    (tmp_path / ".hydra" / "overrides.yaml").write_text("- seed=3\n- a.b=1\n")
    assert read_config(tmp_path) == {"seed": 3, "root": "${oc.env:HOME}"}
    assert read_overrides(tmp_path) == ["seed=3", "a.b=1"]
    for damaged in ("a: [", "[" * 20_000):
        (tmp_path / ".hydra" / "config.yaml").write_text(damaged)
        with pytest.raises(UserError, match=r"config\.yaml cannot be read"):
            read_config(tmp_path)


@pytest.mark.parametrize("name", ["a/b-1.0", "with space", "ü", "a=1,b=2", "it's", "(x) [y] #&;~!"])
def test_the_override_of_a_directory_can_be_pasted(name):
    (argument,) = shlex.split(directory_override("hydra.run.dir", Path(name)))
    (override,) = OverridesParser.create().parse_overrides([argument])
    assert override.key_or_group == "hydra.run.dir" and str(override.value()) == name


def test_yaml_that_stands_for_any_number_of_values_is_refused(tmp_path):
    (tmp_path / ".hydra").mkdir()
    path = tmp_path / ".hydra" / "config.yaml"
    path.write_text("a: '*b'\nc: 2 * 3\n")
    assert read_config(tmp_path) == {"a": "*b", "c": "2 * 3"}
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    path.write_text("\n".join(["a0: &a0 [1]", *levels]))
    with pytest.raises(UserError, match="it has an alias"):
        read_config(tmp_path)


@pytest.mark.parametrize("name", ["results.json", ".hydra/config.yaml", "test_predictions.jsonl"])
def test_a_pipe_in_a_run_directory_is_not_waited_for(tmp_path, name):
    (tmp_path / ".hydra").mkdir()
    os.mkfifo(tmp_path / name)
    readers = [read_results, read_config, read_test_predictions]
    reader = readers[["results.json", ".hydra/config.yaml", "test_predictions.jsonl"].index(name)]
    with pytest.raises(UserError, match="cannot be read"):
        reader(tmp_path)


@pytest.mark.parametrize(
    ("node", "trusted"),
    [
        ({"model": {"_target_": "metadist.models.Conv4"}, "logger": {"_target_": "a.B"}}, True),
        ({"optimizer": {"_target_": "torch.optim.Adam"}}, True),
        ({"scheduler": {"_target_": "torch.optim.swa_utils.SWALR"}}, False),
        ({"algorithm": {"_target_": "mine.MAML"}}, False),
        ({"dataset": {"transforms": [{"_target_": "mine.Noise"}]}}, False),
    ],
)
def test_commands_on_runs_with_classes_of_the_user_trust_them(node, trusted):
    assert trust_option(node) == ("" if trusted else " --trust-code")
