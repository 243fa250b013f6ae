"""The training function of Ray Train's workers: run one job, report metrics and checkpoints."""

import contextlib
import io
import logging
import os
import pickle
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray.train
import ray.util
from ray.exceptions import RayActorError
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.collective import broadcast_from_rank_zero

from metadist.deadlines import wait_until
from metadist.distributed import WorkerLostError, get_rank
from metadist.distributed.job import current_job
from metadist.distributed.world import host_name, restart_count
from metadist.errors import USER_ERROR_STATUS
from metadist.files import atomic_writer
from metadist.launchers.error_reporting import report_error
from metadist.launchers.job import JobFailure, attempt_job
from metadist.launchers.ray.cluster import reserve_port
from metadist.launchers.run_spec import CONSOLE_FILE, RunSpec
from metadist.launchers.worker import set_up_process
from metadist.loggers import Logger, LoggerCollection, Metrics, Run
from metadist.training import Experiment
from metadist.training.checkpoints import Checkpoints

_OUTCOME_TIMEOUT = 3.0


@dataclass(frozen=True)
class WorkerPayload:
    """The data that every worker of a run gets.

    Attributes:
        spec: the specification of the run; see `RunSpec.to_yaml`.
        state: the Ray actor with the state that the driver and the workers share
            (`ray_launcher.TrainRun`).
        working_directory: the working directory of the driver.
        tracebacks: whether to print the tracebacks of user errors too.
        validations_only: whether to report checkpoints only together with validation metrics (for
            Ray Tune, which needs its metric in each report).
    """

    spec: str
    state: Any
    working_directory: str
    tracebacks: bool = False
    validations_only: bool = False


def run_worker(config: dict[str, Any]) -> None:
    """Run the job of `config["payload"]`, a pickled `WorkerPayload`, on this worker.

    It returns when the job has ended, also after an error that would recur after a restart. The
    shared state then contains the exit status and the error message.

    Raises:
        WorkerLostError: a worker died, froze or is unreachable; Ray Train restarts all workers.
    """
    payload: WorkerPayload = pickle.loads(config["payload"])
    _set_environment(len(_get(payload, "attempts")))
    if _get(payload, "outcomes") or _get(payload, "stop_signal"):
        return  # the previous attempt ended with an error that is not retried, or was stopped
    if get_rank() == 0:
        ray.get(payload.state.add.remote("attempts", restart_count()))
        threading.Thread(target=_forward_stop_signal, args=[payload], daemon=True).start()
    run = RunSpec.from_yaml(payload.spec)
    if not broadcast_from_rank_zero(run.directory.is_dir()):  # the driver has made it
        if get_rank() == 0:
            message = (
                f"error: {run.directory} does not exist on {host_name()}: put hydra.run.dir or "
                "hydra.sweep.dir on a file system that all nodes share."
            )
            ray.get(payload.state.add.remote("outcomes", (USER_ERROR_STATUS, message)))
        return
    with contextlib.suppress(OSError):
        os.chdir(payload.working_directory)
    with _output(run):
        if restart_count() and get_rank() == 0:
            print(f"a worker was lost: attempt {restart_count() + 1} of the run", file=sys.stderr)
        status, message = _run_job(run, payload)
    if status or get_rank() == 0:
        ray.get(payload.state.add.remote("outcomes", (status, message)))


def _run_job(run: RunSpec, payload: WorkerPayload) -> tuple[int, str]:
    """Run the job; returns the exit status, and the error message if this rank must report it.

    Raises:
        WorkerLostError: a worker was lost; see `run_worker`.
    """
    message = io.StringIO()
    try:
        _train(run, payload)
    except Exception as error:
        failure = JobFailure(error, in_job=True)
    except JobFailure as job_failure:
        failure = job_failure
    else:
        return 0, ""
    with contextlib.redirect_stderr(message):  # the driver prints it
        status = report_error(failure.error, payload.tracebacks, failure.in_job)
    if isinstance(failure.error, WorkerLostError) and not _failed_on_another_rank(payload):
        print(message.getvalue(), end="", file=sys.stderr, flush=True)
        raise WorkerLostError(str(failure.error)) from None
    return status, message.getvalue()


def _train(run: RunSpec, payload: WorkerPayload) -> None:
    set_up_process(run)
    _set_up_logging(run)
    if restart_count() or run.configuration.get("resume") == "auto":
        restore_checkpoint(run.directory)
    participant = threading.Thread(target=_join_reports, daemon=True)

    def add_logger(experiment: Experiment) -> None:
        if get_rank() == 0:
            logger = RayTrainLogger(payload.validations_only)
            experiment.logger = LoggerCollection([experiment.logger, logger])
        else:
            participant.start()

    attempt_job(replace(run, launched=True), on_built=add_logger)
    if get_rank() == 0:
        broadcast_from_rank_zero(False)
    while participant.is_alive() and not _get(payload, "outcomes"):
        participant.join(0.5)


def _join_reports() -> None:
    """Join rank zero's reports: Ray Train waits for every worker, and only rank zero logs."""
    # Ray Train may end the actor for broadcasts of a stopped run before it ends this worker.
    with contextlib.suppress(RayActorError):
        while broadcast_from_rank_zero(None):
            ray.train.report({})


class RayTrainLogger(Logger):
    """Reports validations and checkpoints to Ray Train. Used on rank zero.

    A checkpoint is written after the metrics of the same iteration, so it is reported with the next
    training metrics or at the end of the run. The storage of Ray Train gets hard links to the
    checkpoints if it is on the same file system, else copies.

    Args:
        validations_only: whether to report checkpoints only together with validation metrics.
    """

    def __init__(self, validations_only: bool = False) -> None:
        self._validations_only = validations_only
        self._train_metrics: dict[str, Any] = {}
        self._validation: dict[str, Any] = {}
        self._checkpoint_due = False

    def start(self, run: Run) -> None:
        """Store the run's directory. Its existing checkpoints are not reported again."""
        self._directory: Path = run.directory
        self._checkpoints = Checkpoints(run.directory)
        self._reported = self._checkpoints.newest()

    def log_metrics(self, metrics: Metrics) -> None:
        """Store validation metrics for the next report, which is made with training metrics."""
        if "validation_loss" in metrics:
            values = {name: float(value) for name, value in metrics.items()}
            self._validation = values | {"iteration": int(metrics["iteration"])}
            return
        self._report()
        if "train_loss" in metrics:
            self._train_metrics = {
                "iteration": int(metrics["iteration"]),
                "train_loss": float(metrics["train_loss"]),
            }

    def flush(self) -> None:
        """Called before a checkpoint is written."""
        self._checkpoint_due = True

    def finish(self, results: Mapping[str, Any], plots: Sequence[Path]) -> None:
        """Report the last validation and the last checkpoint; `results.json` has been written."""
        self._report()

    def _report(self) -> None:
        checkpoint = self._checkpoints.newest() if self._checkpoint_due else self._reported
        new_checkpoint = None if checkpoint == self._reported else checkpoint
        if not self._validation and (new_checkpoint is None or self._validations_only):
            return
        metrics = self._train_metrics | self._validation | {"run_directory": str(self._directory)}
        self._validation, self._checkpoint_due, self._reported = {}, False, checkpoint
        broadcast_from_rank_zero(True)
        _report_to_ray(metrics, new_checkpoint, self._checkpoints.best)


def _report_to_ray(metrics: dict[str, Any], path: Path | None, best: Path | None) -> None:
    if path is None:
        ray.train.report(metrics)
        return
    files = [path] if best is None else [path, best]
    storage = ray.train.get_context().get_storage()
    name = f"checkpoint_{path.stem}"
    if storage.storage_filesystem.type_name == "local":
        directory = Path(storage.experiment_fs_path) / name
        directory.mkdir(parents=True, exist_ok=True)
        for file in files:
            _link_or_copy(file, directory / file.name)
        checkpoint = Checkpoint(str(directory), storage.storage_filesystem)
        ray.train.report(metrics, checkpoint, checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD)
        return
    with tempfile.TemporaryDirectory() as directory_name:
        for file in files:
            _link_or_copy(file, Path(directory_name) / file.name)
        checkpoint = Checkpoint.from_directory(directory_name)
        ray.train.report(metrics, checkpoint, checkpoint_dir_name=name)


def _link_or_copy(path: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    try:
        os.link(path, target)
    except OSError:  # another file system
        shutil.copy2(path, target)


def restore_checkpoint(directory: Path) -> None:
    """Copy the newest and the best checkpoint of Ray Train to a run directory without checkpoints.

    Any rank may call it, when it restarts on a machine that does not have the run directory.
    Existing checkpoints take precedence, because the run may have rolled back Ray's checkpoint.
    """
    newest = ray.train.get_checkpoint()
    checkpoints = Checkpoints(directory)
    if newest is None or checkpoints.newest() is not None:
        return
    checkpoints.directory.mkdir(parents=True, exist_ok=True)
    with newest.as_directory() as source:
        for path in Path(source).glob("*.pt"):
            target = checkpoints.directory / path.name
            with path.open("rb") as copied, atomic_writer(target) as file:
                shutil.copyfileobj(copied, file)


def _set_environment(restarts: int) -> None:
    """Set torchrun's environment variables. Every worker calls it."""
    context = ray.train.get_context()
    rank = context.get_world_rank()
    address = None
    if rank == 0:
        address = (ray.util.get_node_ip_address(), reserve_port(), restarts)
    host, port, restarts = broadcast_from_rank_zero(address)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        MASTER_ADDR=host,
        MASTER_PORT=str(port),
        TORCHELASTIC_RESTART_COUNT=str(restarts),  # a restarted run resumes
    )


def _get(payload: WorkerPayload, name: str) -> list[Any]:
    return ray.get(payload.state.get.remote(name))


def _failed_on_another_rank(payload: WorkerPayload) -> bool:
    """Whether another rank has ended with an error that would recur after a restart."""
    seconds = 0.0 if current_job().owns_first_failure else _OUTCOME_TIMEOUT
    return wait_until(lambda: _get(payload, "outcomes"), seconds, pause=0.1)


def _forward_stop_signal(payload: WorkerPayload) -> None:
    """Pass signals that the driver received to the job, also if it starts later."""
    while True:
        for number in _get(payload, "stop_signal"):
            current_job().request_stop(number)
        time.sleep(0.5)


@contextlib.contextmanager
def _output(run: RunSpec) -> Any:
    """Redirect a concurrent run's output to a file. Ray forwards other output to the driver."""
    if not run.concurrent:
        yield
        return
    with (
        (run.directory / CONSOLE_FILE).open("a", encoding="utf-8", buffering=1) as file,
        contextlib.redirect_stdout(file),
        contextlib.redirect_stderr(file),
    ):
        yield


def _set_up_logging(run: RunSpec) -> None:
    """Configure logging as in the run's configuration, for metadist only and on rank zero."""
    root, logger = logging.getLogger(), logging.getLogger("metadist")
    handlers, level = list(root.handlers), root.level
    if run.hydra is None:  # a trial of Ray Tune
        handlers, level = [logging.StreamHandler(sys.stdout)], logging.INFO
        handlers[0].setFormatter(logging.Formatter("[%(asctime)s][%(levelname)s] - %(message)s"))
    logger.handlers, logger.propagate = handlers, False
    logger.setLevel(level if get_rank() == 0 else max(level, logging.WARNING))
    # Ray Train logs every report at level INFO, to a logger whose name is a file name.
    root.setLevel(logging.WARNING)
