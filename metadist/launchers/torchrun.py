"""`launcher=torchrun`: starts torchrun for each job."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal, cast

import torch
from annotated_types import Ge
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from metadist.distributed.world import usable_cpus
from metadist.errors import FAILURE_STATUS, UserError
from metadist.launchers.gpu_slots import acquire_slot
from metadist.launchers.launcher import Launcher
from metadist.launchers.run_spec import CONSOLE_FILE, RunSpec
from metadist.reports import WORKER_ERROR_FILE


@dataclass(eq=False)
class TorchrunLauncher(Launcher):
    """Starts torchrun. Arguments with the name of a torchrun option have its meaning.

    Args:
        nproc_per_node: the number of workers on each node.
        nnodes: the number of nodes. With more than one, start the same command on each node, with
            the same `hydra.run.dir` on a shared file system, and an `rdzv_endpoint`.
        node_rank: the rank of this node; None if the rendezvous is to assign it.
        rdzv_endpoint: the HOST:PORT of the rendezvous; HOST is one of the nodes.
        rdzv_id: the run's identifier, the same on all nodes.
        max_restarts: the number of times that a run is restarted from its newest checkpoint after a
            worker died.
        jobs: the number of jobs of a sweep that run at the same time; "auto" for as many as the
            GPUs, or without GPUs the cores, allow.
        oversubscribe: whether more workers than cores or GPUs are allowed.
    """

    nproc_per_node: Annotated[int, Ge(1)] = 2
    nnodes: Annotated[int, Ge(1)] = 1
    node_rank: Annotated[int, Ge(0)] | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | int | None = None
    max_restarts: Annotated[int, Ge(0)] = 0
    jobs: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    oversubscribe: bool = False

    def __post_init__(self) -> None:
        self._agents: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def check(self, configuration: DictConfig) -> None:
        """See `Launcher.check`."""
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise UserError(
                f"launcher.nnodes={self.nnodes} needs launcher.rdzv_endpoint=HOST:PORT, the same "
                "on all nodes, for the rendezvous."
            )
        if self.nnodes > 1 and (key := _directory_by_time()):
            raise UserError(
                f"each node would make a run directory of its own, with the time of its start: "
                f"with launcher.nnodes={self.nnodes}, give {key}=DIR, the same on all nodes, on a "
                "file system that they share."
            )
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            raise UserError(
                f"launcher.node_rank={self.node_rank} does not fit: with launcher.nnodes="
                f"{self.nnodes} it must be from 0 to {self.nnodes - 1}."
            )
        available, unit = available_workers(configuration)
        workers = self.nproc_per_node
        if workers > available and not self.oversubscribe:
            raise UserError(
                f"launcher.nproc_per_node={workers} is more than this machine's {available} "
                f"{unit}: choose fewer workers, or add launcher.oversubscribe=true."
            )
        if self.jobs != "auto" and workers * self.jobs > available and not self.oversubscribe:
            raise UserError(
                f"launcher.jobs={self.jobs} times launcher.nproc_per_node={workers} is more than "
                f"this machine's {available} {unit}: choose fewer, or add "
                "launcher.oversubscribe=true."
            )
        if self.nnodes > 1 and self.jobs not in (1, "auto"):
            raise UserError(
                "launcher.jobs must be 1 with several nodes: they run the same job at a time."
            )

    def max_concurrent_jobs(self, configuration: DictConfig) -> int:
        """See `Launcher.max_concurrent_jobs`."""
        if self.jobs != "auto":
            return self.jobs
        if self.nnodes > 1:
            return 1
        return max(1, available_workers(configuration)[0] // self.nproc_per_node)

    def run(self, spec: RunSpec) -> int:
        """See `Launcher.run`."""
        with ExitStack() as stack:
            slot = acquire_slot(self._slots(spec), stack)
            output = None
            if spec.concurrent:
                output = stack.enter_context((spec.directory / CONSOLE_FILE).open("ab"))
            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="metadist-"))
            # Only this user can read the file. Its name is different on each node.
            file = stack.enter_context(
                tempfile.NamedTemporaryFile(
                    "w", encoding="utf-8", dir=spec.directory, prefix=".job-", suffix=".yaml"
                )
            )
            file.write(replace(spec, launched=True).to_yaml())
            file.flush()
            command = self.command(spec, Path(file.name), Path(scratch) / "rendezvous")
            environment = self.environment(spec, slot)
            with self._lock:  # `stop` runs before the agent has started, or finds it
                if self._stopped:
                    return 128 + signal.SIGTERM
                agent = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.PIPE,  # closed when this process dies, which stops the agent
                    stdout=output,
                    start_new_session=True,  # Ctrl-C reaches it only through `stop`
                )
                self._agents.add(agent)
            try:
                status = agent.wait()
                return FAILURE_STATUS if status < 0 else status  # a signal killed the agent
            finally:
                with self._lock:
                    self._agents.discard(agent)
                assert agent.stdin is not None
                agent.stdin.close()

    def stop(self, number: int) -> None:
        """See `Launcher.stop`. A job that has not started yet does not start."""
        with self._lock:
            self._stopped = True
            for agent in self._agents:
                agent.send_signal(signal.SIGTERM)  # SIGINT would kill a starting Python

    def command(self, spec: RunSpec, spec_file: Path, rendezvous_file: Path) -> list[str]:
        """The command line that starts the job's workers.

        Args:
            spec: the job.
            spec_file: the file with the specification, which the workers read.
            rendezvous_file: the file for the rendezvous of a single node, whose agent then opens no
                port.
        """
        rendezvous = []
        if not self.rdzv_endpoint:
            rendezvous = ["--rdzv-conf=store_type=file", "--local-addr=127.0.0.1"]
        elif self.node_rank is not None:
            rendezvous = [f"--node-rank={self.node_rank}"]
        rendezvous_id = "metadist" if self.rdzv_id is None else self.rdzv_id
        return [
            *(sys.executable, "-m", "metadist.distributed.torchrun_agent"),
            f"--nnodes={self.nnodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={self.rdzv_endpoint or rendezvous_file}",
            f"--rdzv-id={rendezvous_id}-{spec.directory.name}",
            *rendezvous,
            f"--nproc-per-node={self.nproc_per_node}",
            f"--max-restarts={self.max_restarts}",
            f"--log-dir={rendezvous_file.parent}",  # it is removed with the job
            *("-m", "metadist.launchers.worker", str(spec_file)),
        ]

    def environment(self, spec: RunSpec, slot: int) -> dict[str, str]:
        """The workers' environment: the environment of this process, with the job's threads and
        GPUs.

        Args:
            spec: the job.
            slot: the index of the job's GPUs; see `acquire_slot`.
        """
        # PET_…: defaults of torchrun's options, which `command` chooses.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
        environment.setdefault("OMP_NUM_THREADS", str(spec.configuration.get("threads", 1)))
        if not self.rdzv_endpoint:
            environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the agent hosts no store
        # Modules of the working directory come after installed ones, as in this process.
        environment["PYTHONSAFEPATH"] = "1"
        if spec.in_sweep:
            environment["METADIST_ERROR_FILE"] = str(spec.directory / WORKER_ERROR_FILE)
        slots = self._slots(spec)
        if slot < len(slots):
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(slots[slot])
        return environment

    def _slots(self, spec: RunSpec) -> list[list[str]]:
        """The GPUs of each job that can run beside others."""
        gpus, size = visible_gpus(spec.configuration), self.nproc_per_node
        return [gpus[index * size :][:size] for index in range(len(gpus) // size)]


def _directory_by_time() -> str | None:
    """The key of the directory of this process's run or sweep, if its name depends on the time."""
    if not HydraConfig.initialized():
        return None
    node = cast(DictConfig, HydraConfig.instance().cfg).hydra
    mode = "sweep" if node.mode == RunMode.MULTIRUN else "run"
    directory = str(OmegaConf.to_container(node[mode], resolve=False))
    by_time = any(resolver in directory for resolver in ("${run_stamp", "${now"))
    return f"hydra.{mode}.dir" if by_time else None


def available_workers(configuration: DictConfig) -> tuple[int, str]:
    """The number of workers that this machine can run, one per GPU or core, and the unit's name."""
    gpus = visible_gpus(configuration)
    if gpus:
        return len(gpus), "GPUs" if len(gpus) > 1 else "GPU"
    cores = usable_cpus()
    return cores, "cores" if cores > 1 else "core"


def visible_gpus(configuration: DictConfig) -> list[str]:
    """The names of the GPUs that jobs are distributed over, as in CUDA_VISIBLE_DEVICES.

    Empty if `device` is the CPU or one specific GPU.
    """
    if str(configuration.get("device")) not in ("auto", "cuda") or not torch.cuda.is_available():
        return []
    names = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names or [str(index) for index in range(torch.cuda.device_count())]
