"""The MLflow logger."""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metadist.errors import UserError, one_line
from metadist.files import atomic_write
from metadist.loggers.jsonl import json_value
from metadist.loggers.logger import (
    Logger,
    Metrics,
    Run,
    flatten_values,
    grouped_name,
    grouped_test_metrics,
    saved_run_id,
)

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

RUN_ID_FILE = "mlflow_run_id"

_MAX_METRICS = 500  # metrics that are sent in one request; the service accepts 1000
_MAX_PARAMETERS = 100  # parameters that are sent in one request
_MAX_VALUE = 500  # characters of a parameter


class MlflowLogger(Logger):
    """Logs the run to MLflow: options as parameters, metrics, plots and `results.json`.

    A resumed run continues its MLflow run; the run id is stored in `mlflow_run_id`. MLflow cannot
    delete metrics: the iterations between the checkpoint and the interruption are logged twice,
    with equal values. Metrics are sent in batches, and before each checkpoint.

    Args:
        tracking_uri: the tracking server (`http://…`) or database (`sqlite:///…`). Default:
            `MLFLOW_TRACKING_URI`, else the SQLite file `mlflow.db` in the run directory.
        experiment: the name of the experiment, which is created if it does not exist.
        tags: the tags of the run.
    """

    def __init__(
        self,
        tracking_uri: str | None = None,
        experiment: str = "metadist",
        tags: dict[str, str] | None = None,
    ) -> None:
        self._tracking_uri = tracking_uri
        self._experiment = experiment
        self._tags = tags or {}
        self._client: MlflowClient | None = None
        self._run_id = ""
        self._metrics: list[Metric] = []
        self._status = "FAILED"

    def start(self, run: Run) -> None:
        """Creates the MLflow run, or continues the run of the same directory.

        Raises:
            UserError: MLflow is not installed, or its server or database cannot be used.
        """
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        try:
            from mlflow import MlflowClient
        except ImportError:
            raise UserError(
                "logger=mlflow needs MLflow, which is not installed: pip install -e '.[mlflow]' in "
                "metadist's folder."
            ) from None
        for name in ("mlflow", "alembic"):  # they log the creation of the database
            logging.getLogger(name).setLevel(logging.WARNING)
        uri = self._tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        artifacts = None if uri else (run.directory.resolve() / "mlflow_artifacts").as_uri()
        with self._wrap_errors():
            client = MlflowClient(uri or f"sqlite:///{run.directory / 'mlflow.db'}")
            self._client = client
            self._run_id = self._resumed_run(run, client) or self._new_run(run, client, artifacts)

    def _resumed_run(self, run: Run, client: "MlflowClient") -> str:
        """The id of the MLflow run that is resumed; "" without one."""
        if saved := saved_run_id(run, RUN_ID_FILE, digits=32):
            client.update_run(saved, status="RUNNING")
        return saved

    def _new_run(self, run: Run, client: "MlflowClient", artifacts: str | None) -> str:
        from mlflow.entities import Param

        experiment = client.get_experiment_by_name(self._experiment)
        experiment_id = (
            client.create_experiment(self._experiment, artifact_location=artifacts)
            if experiment is None
            else experiment.experiment_id
        )
        tags = {"mlflow.note.content": run.title, **self._tags}
        run_id: str = client.create_run(experiment_id, run_name=run.name, tags=tags).info.run_id
        values = flatten_values(run.configuration)
        parameters = [Param(key, str(value)[:_MAX_VALUE]) for key, value in values.items()]
        for first in range(0, len(parameters), _MAX_PARAMETERS):
            client.log_batch(run_id, params=parameters[first : first + _MAX_PARAMETERS])
        atomic_write(run.directory / RUN_ID_FILE, f"{run_id}\n".encode())
        return run_id

    def log_metrics(self, metrics: Metrics) -> None:
        """Collects the metrics; several hundred are sent together."""
        self._collect(
            {
                grouped_name(name): float(value)
                for name, value in metrics.items()
                if name != "iteration" and not isinstance(value, str | bool)
            },
            int(metrics["iteration"]),
        )
        if len(self._metrics) >= _MAX_METRICS:
            self.flush()

    def _collect(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        self._metrics += [Metric(name, value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        """Sends the collected metrics."""
        assert self._client is not None, "flush() before start()"
        metrics, self._metrics = self._metrics, []
        if metrics:
            with self._wrap_errors():
                self._client.log_batch(self._run_id, metrics=metrics)

    def finish(self, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
        """Logs test metrics, plots and `results.json`."""
        assert self._client is not None, "finish() before start()"
        values: Any = json_value(results)
        self._collect(grouped_test_metrics(results), int(results["iterations"]))
        self.flush()
        with self._wrap_errors():
            for plot in plots:
                self._client.log_artifact(self._run_id, str(plot))
            self._client.log_dict(self._run_id, values, "results.json")
        self._status = "FINISHED"

    def close(self) -> None:
        """Ends the run, as failed unless `finish` was called."""
        client = self._client
        if client is not None and self._run_id:
            with contextlib.suppress(Exception):
                self.flush()
            with contextlib.suppress(Exception):
                client.set_terminated(self._run_id, self._status)
        self._client = None

    @contextlib.contextmanager
    def _wrap_errors(self) -> Iterator[None]:
        from mlflow.exceptions import MlflowException

        try:
            yield
        except (MlflowException, OSError) as error:
            raise UserError(
                f"MLflow could not log the run ({one_line(error).rstrip('.')}): check "
                "logger.mlflow.tracking_uri and the network, or leave the logger out."
            ) from error
