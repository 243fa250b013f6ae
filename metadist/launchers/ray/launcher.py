"""`launcher=ray`: Ray Train starts the workers, and starts them again when one dies."""

import os
from contextlib import ExitStack
from typing import Annotated, Literal

from annotated_types import Ge
from omegaconf import DictConfig

from metadist.distributed.world import usable_cpus
from metadist.errors import UserError
from metadist.launchers.job import CONSOLE_FILE, RunSpec
from metadist.launchers.launcher import Launcher
from metadist.launchers.ray.cluster import (
    load_ray,
    open_ray,
    require_workers,
    trials_at_once,
)
from metadist.launchers.ray.run import RayRun

_TURN_SECONDS = 0.3


class RayLauncher(Launcher):
    """Worlds of Ray workers, by Ray Train's TorchTrainer.

    The run's directory holds the truth; Ray's storage gets each newest checkpoint as well. A
    worker that dies, or is not heard of for `timeout_seconds`, makes Ray start all workers anew,
    and the run goes on from its newest checkpoint. Errors that another attempt would meet again
    end the run at once.

    Args:
        num_workers: processes of the world, each with a CPU, and a GPU where they are used.
        address: of a running cluster's head, "auto" or "IP:PORT". Default: as RAY_ADDRESS says,
            or a Ray of this machine alone, which ends with the command.
        use_gpu: give each worker a GPU of its own; "auto" does where the cluster has enough.
        max_failures: how often the run may lose workers and go on.
        storage_path: a directory or URI (s3://…) for Ray's storage. Default: `ray/` in the run's
            directory, where checkpoints are hard links to the run's own.
        jobs: runs of a sweep at a time; "auto" is as many as the cluster has room for.
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
        """See `Launcher`. It starts Ray, or joins the cluster.

        Raises:
            UserError: Ray is not installed, cannot be reached, or has too few CPUs or GPUs.
        """
        ray = load_ray()
        here = not (self.address or os.environ.get("RAY_ADDRESS") or ray.is_initialized())
        if here and self.num_workers > usable_cpus():
            raise UserError(
                f"launcher.num_workers={self.num_workers} workers need a CPU each, and this "
                f"machine has {usable_cpus()}: ask for fewer, or give the launcher.address of a "
                "Ray cluster."
            )
        open_ray(self.address)
        require_workers(
            self.num_workers, self.use_gpu is True, f"launcher.num_workers={self.num_workers}"
        )

    def max_concurrent_jobs(self, configuration: DictConfig) -> int:
        """See `Launcher`: as many as the cluster's CPUs, or GPUs, have room for."""
        if self.jobs != "auto":
            return self.jobs
        return trials_at_once(self.num_workers, self._gives_gpus(configuration))

    def run(self, planned: RunSpec) -> int:
        """See `Launcher`."""
        open_ray(self.address)
        with ExitStack() as stack:
            output = None
            if planned.concurrent:
                path = planned.directory / CONSOLE_FILE
                output = stack.enter_context(path.open("a", encoding="utf-8"))
            run = RayRun(
                planned,
                num_workers=self.num_workers,
                use_gpu=self._gives_gpus(planned.configuration),
                max_failures=self.max_failures,
                storage_path=self.storage_path,
                output=output,
            )
            stack.callback(run.close)
            while run.attend(_TURN_SECONDS):
                if self._signal:
                    run.signal(self._signal)
            return run.status()

    def stop(self, number: int) -> None:
        """See `Launcher`."""
        self._signal = number

    def _gives_gpus(self, configuration: DictConfig) -> bool:
        if self.use_gpu != "auto":
            return self.use_gpu
        there = load_ray().cluster_resources().get("GPU", 0)
        return configuration.get("device") != "cpu" and there >= self.num_workers
