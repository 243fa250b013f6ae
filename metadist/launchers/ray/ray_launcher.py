"""`launcher=ray`: Ray Train starts the workers, and restarts them when one dies."""

import os
from typing import Annotated, Literal

from annotated_types import Ge
from omegaconf import DictConfig

from metadist.distributed.world import usable_cpus
from metadist.errors import UserError
from metadist.launchers.launcher import Launcher, PlannedRun
from metadist.launchers.ray.cluster import (
    check_resources,
    init_ray,
    load_ray,
    max_concurrent_trials,
)
from metadist.launchers.ray.train_run import TrainRun

_POLL_SECONDS = 0.3


class RayLauncher(Launcher):
    """Runs jobs in Ray Train workers.

    Ray's storage gets the newest checkpoints besides the run's directory. When a worker dies, or
    its heartbeat is missing for `timeout_seconds`, Ray Train restarts all workers, and the run
    resumes from its newest checkpoint. Errors that a restart would meet again end the run.

    Args:
        num_workers: worker processes of a run, one CPU each, and one GPU each where GPUs are used.
        address: of a running cluster's head, "auto" or "IP:PORT". Default: RAY_ADDRESS, or a local
            node that ends with the command.
        use_gpu: one GPU per worker; "auto" if the cluster has enough.
        max_failures: how often the run may lose workers and resume.
        storage_path: directory or URI (s3://…) of Ray's storage. Default: `ray/` in the run's
            directory, with hard links to the run's checkpoints.
        jobs: concurrent runs of a sweep; "auto" is as many as fit on the cluster.
    """

    def __init__(
        self,
        num_workers: Annotated[int, Ge(1)] = 2,
        address: str | None = None,
        use_gpu: bool | Literal["auto"] = "auto",
        max_failures: Annotated[int, Ge(0)] = 3,
        storage_path: str | None = None,
        jobs: Annotated[int, Ge(1)] | Literal["auto"] = "auto",
    ) -> None:
        self.num_workers = num_workers
        self.address = address
        self.use_gpu = use_gpu
        self.max_failures = max_failures
        self.storage_path = storage_path
        self.jobs = jobs
        self._signal = 0

    def check(self, configuration: DictConfig) -> None:
        """See `Launcher`. It initializes Ray.

        Raises:
            UserError: Ray is not installed, is unreachable, or has too few CPUs or GPUs.
        """
        ray = load_ray()
        local = not (self.address or os.environ.get("RAY_ADDRESS") or ray.is_initialized())
        if local and self.num_workers > usable_cpus():
            raise UserError(
                f"launcher.num_workers={self.num_workers} workers need a CPU each, and this "
                f"machine has {usable_cpus()}: ask for fewer, or give the launcher.address of a "
                "Ray cluster."
            )
        init_ray(self.address)
        check_resources(
            self.num_workers, self.use_gpu is True, f"launcher.num_workers={self.num_workers}"
        )

    def jobs_at_once(self, configuration: DictConfig) -> int:
        """See `Launcher`: as many as the cluster has CPUs, or GPUs, for."""
        if self.jobs != "auto":
            return self.jobs
        return max_concurrent_trials(self.num_workers, self._uses_gpus(configuration))

    def run(self, planned: PlannedRun) -> int:
        """See `Launcher`."""
        init_ray(self.address)
        run = TrainRun(
            planned,
            num_workers=self.num_workers,
            use_gpu=self._uses_gpus(planned.configuration),
            max_failures=self.max_failures,
            storage_path=self.storage_path,
        )
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
        gpus = load_ray().cluster_resources().get("GPU", 0)
        return configuration.get("device") != "cpu" and gpus >= self.num_workers
