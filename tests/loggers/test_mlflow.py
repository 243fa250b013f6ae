"""MLflow: a run in a SQLite file, read back through MLflow's own client."""

import sys

import pytest
from example_runs import example_run, log_run

from metadist.errors import UserError
from metadist.loggers import MlflowLogger


def test_without_mlflow_the_logger_is_refused(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    logger = MlflowLogger()
    with pytest.raises(UserError, match=r"pip install -e '\.\[mlflow\]'"):
        logger.start(example_run(tmp_path))
    logger.close()


@pytest.mark.slow
def test_a_resumed_run_is_one_run_with_all_metrics(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.chdir(tmp_path)
    directory = tmp_path / "run"
    directory.mkdir()
    configuration = {"task": {"ways": 5}, "model": {"hidden": [8, 8]}, "text": "x" * 9000}
    configuration |= {f"option{i}": i for i in range(150)}
    log_run(MlflowLogger(tags={"a": "b"}), directory, 0, 4, configuration)
    log_run(MlflowLogger(), directory, 2, 6, configuration, True)

    client = mlflow.MlflowClient(f"sqlite:///{directory / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("metadist")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "maml"
    assert run.info.run_id == (directory / "mlflow_run_id").read_text().strip()
    assert run.data.tags["a"] == "b" and run.data.tags["mlflow.note.content"] == "MAML on glyphs"
    assert run.data.params["task.ways"] == "5" and run.data.params["model.hidden"] == "[8, 8]"
    assert run.data.params["option149"] == "149" and len(run.data.params["text"]) == 500
    assert run.data.metrics["test/accuracy"] == 0.75
    losses = client.get_metric_history(run.info.run_id, "train/loss")
    assert [each.step for each in losses] == [1, 2, 3, 4, 3, 4, 5, 6]
    assert "train/s" not in run.data.metrics
    names = {each.path for each in client.list_artifacts(run.info.run_id)}
    assert names == {"learning_curves.png", "results.json"}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.slow
def test_a_run_without_results_has_failed_and_a_wrong_server_is_one_sentence(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'shared.db'}"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    log_run(MlflowLogger(experiment="mine"), tmp_path, 0, 2)
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert run.info.status == "FAILED" and run.data.metrics["validation/accuracy"] == 0.5
    (tmp_path / "file").touch()
    logger = MlflowLogger(tracking_uri=f"sqlite:///{tmp_path / 'file' / 'a.db'}")
    with pytest.raises(UserError, match=r"MLflow could not log the run .*tracking_uri"):
        logger.start(example_run(tmp_path))
    logger.close()
