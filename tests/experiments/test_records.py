"""The records of the reproduction, and the table made from them."""

import json

import pytest
from omegaconf import OmegaConf, open_dict
from reproduction.cells import compose, load_cells
from reproduction.command import documents
from reproduction.records import README, TABLE, add_record, read_records
from reproduction_folders import PROTOCOL, create_run
from tiny import run_results

from metadist.errors import UserError

CELLS = load_cells()


@pytest.fixture
def run(tmp_path):
    """A run of the recipe that was started as the plain preset with overrides."""
    directory = tmp_path / "run"
    results = {"test_accuracy": 0.96, "protocol": PROTOCOL, "seed": 3, "iterations": 15000}
    results["environment"] = {"torch": "2.15.0", "host": "node1", "directory": "/somewhere"}
    overrides = ("scheduler=cosine", "trainer.iterations=15000")
    create_run(directory, "anil_omniglot_20w1s", 3, *overrides, **results)
    config = compose(["+experiment=anil_omniglot_20w1s", *overrides, "seed=3"])
    with open_dict(config):
        config.dataset.root = "/somewhere"
    OmegaConf.save(config, directory / ".hydra" / "config.yaml")
    lines = [{"iteration": i, "train_loss": float(i)} for i in range(1, 1001)]
    lines += [
        {"iteration": 1000, "validation_accuracy": 0.9},
        {"iteration": 999, "x": float("nan")},
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines).replace("NaN", '"NaN"')
    (directory / "metrics.jsonl").write_text(text)
    return directory


def test_a_record_holds_results_and_thinned_metrics(run, tmp_path):
    cell = CELLS["anil_omniglot_20w1s_cosine"]
    record = add_record(cell, run, tmp_path / "records")
    assert record == tmp_path / "records" / cell.preset / "15000" / "seed3"
    results = run_results(run)
    assert run_results(record) == {
        **results,
        "environment": {"torch": "2.15.0"},
    }
    lines = [json.loads(line) for line in (record / "metrics.jsonl").read_text().splitlines()]
    assert [line for line in lines if "train_loss" not in line] == [
        {"iteration": 1000, "validation_accuracy": 0.9},
        {"iteration": 999, "x": "NaN"},
    ]
    kept = [line["iteration"] for line in lines if "train_loss" in line]
    assert kept == list(range(5, 1001, 5))
    (found,) = read_records(CELLS, tmp_path / "records")
    assert (found.cell, found.seed, found.iterations, found.options) == (cell, 3, 15000, ())


def test_the_test_of_an_evaluation_may_be_recorded(run, tmp_path):
    cell, records = CELLS["anil_omniglot_20w1s_cosine"], tmp_path / "records"
    own = run_results(run)
    own["method"]["callbacks"] = {"ema": {"decay": 0.99}}
    (run / "results.json").write_text(json.dumps({**own, "test_accuracy_before": 0.05}))
    method = {"algorithm": "MAML", "options": {"inner_lr": 0.1}}
    tested = {"test_accuracy": 0.97, "ci95": 0.01, "protocol": {**PROTOCOL, "ensemble": 2}}
    trained = {"trained_protocol": PROTOCOL, "trained_method": own["method"], "seed": 3}
    evaluation = {**tested, "method": method, **trained, "wall_seconds": 1.0}
    file = tmp_path / "ensemble.json"
    file.write_text(json.dumps(evaluation))
    record = add_record(cell, run, records, evaluation=file)
    assert run_results(record) == {
        **own,
        **tested,
        "method": {**method, "callbacks": {"ema": {"decay": 0.99}}},
        "environment": {"torch": "2.15.0"},
    }
    others = {"trained_protocol": {**PROTOCOL, "ways": 20}, "trained_method": method, "seed": 4}
    for content in ({"test_accuracy": 0.97}, *({**evaluation, k: v} for k, v in others.items())):
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match="is no result of metadist evaluate"):
            add_record(cell, run, records, evaluation=file)


def test_only_finished_runs_of_the_cell_are_recorded(run, tmp_path):
    with pytest.raises(UserError, match=r"no run of anil_omniglot_20w1s: .*scheduler"):
        add_record(CELLS["anil_omniglot_20w1s"], run, tmp_path / "records")
    (run / "results.json").unlink()
    with pytest.raises(UserError, match="record runs that have finished"):
        add_record(CELLS["anil_omniglot_20w1s_cosine"], run, tmp_path / "records")
    assert not (tmp_path / "records").exists()


@pytest.mark.parametrize("path", [README, TABLE], ids=lambda path: path.name)
def test_the_tables_in_the_documentation_are_current(path):
    assert path.read_text(encoding="utf-8") == documents(CELLS)[path], (
        "run python experiments/reproduce.py --update-docs"
    )


@pytest.mark.parametrize("marker", ["<!-- end -->", "<!-- python experiments/reproduce.py"])
def test_a_missing_marker_of_the_table_is_refused(tmp_path, monkeypatch, marker):
    readme = tmp_path / "README.md"
    readme.write_text(README.read_text(encoding="utf-8").replace(marker, ""), encoding="utf-8")
    monkeypatch.setattr("reproduction.command.README", readme)
    with pytest.raises(UserError, match=f"README.md has no line {marker}"):
        documents(CELLS)
