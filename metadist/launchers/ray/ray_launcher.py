"""`launcher=ray`: Ray Train starts the workers, and restarts them when one dies."""

import contextlib
import hashlib
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge
from omegaconf import DictConfig, OmegaConf

from metadist.distributed.world import usable_cpus
from metadist.errors import UserError, one_line
from metadist.launchers.error_reporting import wants_traceback
from metadist.launchers.launcher import Launcher
from metadist.launchers.ray.cluster import (
    check_resources,
    init_ray,
    load_ray,
    max_concurrent_trials,
)
from metadist.launchers.run_spec import RunSpec
from metadist.metrics import counted
from metadist.reports import WORKER_ERROR_FILE

_POLL_SECONDS = 0.3
_STOP_TIMEOUT = 60.0
_RESOURCES_TIMEOUT = 90.0
_RESOURCES_INTERVAL = 30.0
_FORWARDING_SECONDS = 1.0


@dataclass(eq=False)
class RayLauncher(Launcher):
    """Runs jobs in Ray Train workers.

    The newest checkpoints are saved in Ray's storage as well as in the run's directory. If a worker
    dies, or its heartbeats stop for `timeout_seconds`, Ray Train restarts all workers, and the run
    resumes from its newest checkpoint. Errors that would recur after a restart end the run.

    Args:
        num_workers: the number of workers of a run, with one CPU each, and one GPU each if GPUs are
            used.
        address: the "IP:PORT" of a running cluster's head, or "auto". Default: RAY_ADDRESS, or a
            local node that ends with the command.
        use_gpu: whether each worker gets a GPU; "auto" if the cluster has enough GPUs.
        max_failures: the number of times that the run may lose workers and resume.
        storage_path: the directory or URI (s3://…) of Ray's storage. Default: `ray/` in the run's
            directory, with hard links to the run's checkpoints.
        jobs: the number of concurrent runs of a sweep; "auto" for as many as fit on the cluster.
    """

    num_workers: Annotated[int, Ge(1)] = 2
    address: str | None = None
    use_gpu: bool | Literal["auto"] = "auto"
    max_failures: Annotated[int, Ge(0)] = 3
    storage_path: str | None = None
    jobs: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    _signal: int = field(default=0, init=False)

    def check(self, configuration: DictConfig) -> None:
        """See `Launcher`. It initializes Ray.

        Raises:
            UserError: Ray is not installed, is unreachable, or has too few CPUs or GPUs.
        """
        ray = load_ray()
        is_local = not (self.address or os.environ.get("RAY_ADDRESS") or ray.is_initialized())
        if is_local and self.num_workers > usable_cpus():
            raise UserError(
                f"launcher.num_workers={self.num_workers} workers need a CPU each, and this "
                f"machine has {usable_cpus()}: ask for fewer, or give the launcher.address of a "
                "Ray cluster."
            )
        init_ray(self.address)
        check_resources(
            self.num_workers, self.use_gpu is True, f"launcher.num_workers={self.num_workers}"
        )

    def max_concurrent_jobs(self, configuration: DictConfig) -> int:
        """See `Launcher`. The cluster's CPUs or GPUs limit the number of jobs."""
        if self.jobs != "auto":
            return self.jobs
        return max_concurrent_trials(self.num_workers, self._uses_gpus(configuration))

    def run(self, spec: RunSpec) -> int:
        """See `Launcher`."""
        init_ray(self.address)
        run = TrainRun(
            spec,
            num_workers=self.num_workers,
            use_gpu=self._uses_gpus(spec.configuration),
            max_failures=self.max_failures,
            storage_path=self.storage_path,
        )
        with contextlib.closing(run):
            while not run.wait(_POLL_SECONDS):
                if self._signal:
                    run.signal(self._signal)
            return run.finish()

    def stop(self, number: int) -> None:
        """See `Launcher`."""
        self._signal = number

    def _uses_gpus(self, configuration: DictConfig) -> bool:
        if self.use_gpu != "auto":
            return self.use_gpu
        gpus: float = load_ray().cluster_resources().get("GPU", 0)
        return configuration.get("device") != "cpu" and gpus >= self.num_workers


class TrainRun:
    """Starts the workers of a run with Ray Train. Ray must be initialized. Always call `close`.

    Args:
        run: the run, whose directory exists.
        num_workers: the number of workers of the run, with one CPU each.
        use_gpu: whether each worker has a GPU too.
        max_failures: the number of times that the run may lose workers and resume.
        storage_path: the storage of Ray Train. Default: `ray/` in the run's directory.
        callbacks: callbacks of Ray Train, such as Tune's `TuneReportCallback`. With callbacks, only
            reports with validation metrics are made.
    """

    def __init__(
        self,
        run: RunSpec,
        *,
        num_workers: int,
        use_gpu: bool,
        max_failures: int,
        storage_path: str | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        ray = load_ray()
        from metadist.launchers.ray.train_worker import WorkerPayload, run_worker

        dumps = load_ray("ray.cloudpickle").dumps
        self._run = run
        self._max_failures = max_failures
        self._signal = 0
        self._deadline = float("inf")
        self._num_workers = num_workers
        self._check_at = time.monotonic() + _RESOURCES_TIMEOUT
        self._waiting = False
        self._error: BaseException | None = None
        # On this node: the state must not be lost with another one.
        affinity = load_ray("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        actor = ray.remote(num_cpus=0, scheduling_strategy=affinity)(_state_class())
        self._state = actor.remote()
        payload = WorkerPayload(
            spec=run.to_yaml(),
            state=self._state,
            working_directory=str(Path.cwd()),
            tracebacks=wants_traceback(),
            validations_only=bool(callbacks),
        )
        name, path = "ray", str(run.directory)
        if storage_path is not None:
            digest = hashlib.sha256(path.encode()).hexdigest()[:8]
            name, path = f"{run.directory.name}-{digest}", storage_path
        train = load_ray("ray.train")
        self._trainer = load_ray("ray.train.torch").TorchTrainer(
            run_worker,
            # Bytes: Ray's controller gets a copy, and thus imports neither metadist nor torch.
            train_loop_config={"payload": dumps(payload)},
            torch_config=_torch_config(),
            scaling_config=train.ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
            run_config=train.RunConfig(
                name=name,
                storage_path=path,
                failure_config=train.FailureConfig(max_failures=max_failures),
                checkpoint_config=train.CheckpointConfig(
                    num_to_keep=OmegaConf.select(
                        run.configuration, "trainer.keep_checkpoints", default=3
                    )
                ),
                callbacks=list(callbacks),
                logging_config=train.LoggingConfig(log_level="ERROR"),
            ),
        )
        # In a thread, so that the main thread can pass signals on.
        self._thread = threading.Thread(target=self._fit, name="metadist-ray-train", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Wait until the run has ended, for at most `seconds`.

        Returns:
            Whether the run has ended, or, after a signal, has taken too long to end.
        """
        self._thread.join(seconds)
        if time.monotonic() > self._check_at and self._thread.is_alive():
            self._check_at = time.monotonic() + _RESOURCES_INTERVAL
            self._warn_if_waiting()
        return not self._thread.is_alive() or time.monotonic() > self._deadline

    def signal(self, number: int) -> None:
        """Make the run save a checkpoint and end. A run that has not started is abandoned."""
        if self._signal:
            return
        self._signal = number
        load_ray().get(self._state.add.remote("stop_signal", number))
        started = bool(self._get("attempts"))
        self._deadline = time.monotonic() + (_STOP_TIMEOUT if started else 0.0)
        if not started:
            _print("stopped before the workers had started: nothing new to save")

    def finish(self) -> int:
        """Print the error of a run that failed.

        Returns:
            The exit status: 1 if workers were lost too often or Ray itself failed.
        """
        outcomes: list[tuple[int, str]] = self._get("outcomes")
        if not self._run.concurrent:
            time.sleep(_FORWARDING_SECONDS)  # Ray forwards output asynchronously
        if outcomes:
            for _, message in outcomes:
                self._print_error(message)
            return max(status for status, _ in outcomes)
        if self._signal:
            return 128 + self._signal
        reason = "Ray Train failed"
        if isinstance(self._error, load_ray("ray.train").WorkerGroupError):
            reason = f"workers were lost more than launcher.max_failures={self._max_failures} times"
        details = "no error was reported"
        if self._error is not None:
            details = f"{type(self._error).__name__}: {one_line(self._error)}"
        _print(f"error: {reason} ({details}); resume=auto resumes from the newest checkpoint")
        return 1

    def close(self) -> None:
        """End the actor that stores the shared state."""
        load_ray().kill(self._state)

    def _warn_if_waiting(self) -> None:
        """Print why the run waits, once: at its start, or after a node was lost."""
        reason = ""
        cpus = int(load_ray().cluster_resources().get("CPU", 0))
        if cpus < self._num_workers:
            reason = f"it has {counted(cpus, 'CPU')}, and the run needs {self._num_workers}"
        elif not self._get("attempts"):
            reason = "its CPUs or GPUs are in use, or it is slow"
        if reason and not self._waiting:
            _print(f"waiting for the Ray cluster: {reason}")
        self._waiting = bool(reason)

    def _fit(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self._error = error

    def _get(self, name: str) -> list[Any]:
        return load_ray().get(self._state.get.remote(name))

    def _print_error(self, message: str) -> None:
        if not message:
            return
        _print(message.rstrip())
        if self._run.in_sweep and not self._signal:  # for the record of the sweep's job
            text = message.rstrip().removeprefix("error: ")
            (self._run.directory / WORKER_ERROR_FILE).write_text(text, encoding="utf-8")


def _print(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _state_class() -> type:
    """The class of the actor with the state that the driver and the workers of a run share:
    `attempts`, `outcomes` (exit status, error message) and `stop_signal`. A local class is pickled
    by value, so the actor's process does not import torch.
    """

    class RunState:
        def __init__(self) -> None:
            self.values: dict[str, list[Any]] = {}

        def add(self, name: str, value: Any) -> None:
            self.values.setdefault(name, []).append(value)

        def get(self, name: str) -> list[Any]:
            return self.values.get(name, [])

    return RunState


def _torch_config() -> Any:
    """A replacement of Ray's TorchConfig that opens no process group, because strategies open what
    they need. As with TorchConfig, the workers of a node see all its GPUs, and LOCAL_RANK selects
    one.
    """
    backend = load_ray("ray.train.backend")
    backend_base: Any = backend.Backend
    config_base: Any = backend.BackendConfig

    class SharedDevices(backend_base):  # type: ignore[misc]  # Ray is optional
        share_cuda_visible_devices = True

    class SharedDevicesConfig(config_base):  # type: ignore[misc]  # Ray is optional
        backend_cls = SharedDevices
        backend = "gloo"  # unused, but without it TorchTrainer would choose one

    return SharedDevicesConfig()
