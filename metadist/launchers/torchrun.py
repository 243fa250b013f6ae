"""`launcher=torchrun`: a world of torchrun's for each run, started by a process that is in none."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from omegaconf import DictConfig

from metadist.distributed.world import usable_cpus
from metadist.errors import UserError
from metadist.launchers.launcher import Launcher, PlannedRun
from metadist.launchers.places import Places
from metadist.launchers.speaking import FAILURE_STATUS
from metadist.reports import WORKER_ERROR_FILE

_places = Places()


class TorchrunLauncher(Launcher):
    """Starts torchrun.

    Args:
        nproc_per_node: worker processes of a run on each node.
        nnodes: nodes of a run. With more than one the same command starts on each node, with the
            same `hydra.run.dir` on a file system that they share, and an `rdzv_endpoint`.
        node_rank: this node's number; None to let the nodes settle it when they meet.
        rdzv_endpoint: HOST:PORT where the nodes meet, HOST being one of them.
        rdzv_id: a name that the nodes of one run have in common.
        max_restarts: how often a run whose worker died starts again, from its newest checkpoint.
        jobs: runs of a sweep at a time. "auto" for as many as the cores, or the GPUs where there
            are some, have room for.
        oversubscribe: allow more workers than there are cores or GPUs.
    """

    def __init__(
        self,
        nproc_per_node: Annotated[int, Ge(1)] = 2,
        nnodes: Annotated[int, Ge(1)] = 1,
        node_rank: Annotated[int, Ge(0)] | None = None,
        rdzv_endpoint: str | None = None,
        rdzv_id: str | int | None = None,
        max_restarts: Annotated[int, Ge(0)] = 0,
        jobs: Annotated[int, Ge(1)] | Literal["auto"] = "auto",
        oversubscribe: bool = False,
    ) -> None:
        self.nproc_per_node = nproc_per_node
        self.nnodes = nnodes
        self.node_rank = node_rank
        self.rdzv_endpoint = rdzv_endpoint
        self.rdzv_id = rdzv_id
        self.max_restarts = max_restarts
        self.jobs = jobs
        self.oversubscribe = oversubscribe
        self._agents: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._lock = threading.Lock()

    def check(self, configuration: DictConfig) -> None:
        """See `Launcher.check`."""
        if self.nnodes > 1 and not self.rdzv_endpoint:
            raise UserError(
                f"launcher.nnodes={self.nnodes} needs launcher.rdzv_endpoint=HOST:PORT, the same "
                "on all nodes, where they meet."
            )
        if self.node_rank is not None and self.node_rank >= self.nnodes:
            raise UserError(
                f"launcher.node_rank={self.node_rank} does not fit: with launcher.nnodes="
                f"{self.nnodes} it is a number from 0 to {self.nnodes - 1}."
            )
        has, what = room(configuration)
        workers = self.nproc_per_node
        if workers > has and not self.oversubscribe:
            raise UserError(
                f"launcher.nproc_per_node={workers} is more than this machine's {has} {what}: ask "
                "for fewer workers, or add launcher.oversubscribe=true."
            )
        if self.jobs != "auto" and workers * self.jobs > has and not self.oversubscribe:
            raise UserError(
                f"launcher.jobs={self.jobs} times launcher.nproc_per_node={workers} is more than "
                f"this machine's {has} {what}: ask for fewer, or add launcher.oversubscribe=true."
            )
        if self.nnodes > 1 and self.jobs not in (1, "auto"):
            raise UserError("launcher.jobs must be 1 with several nodes, which meet job by job.")

    def jobs_at_once(self, configuration: DictConfig) -> int:
        """See `Launcher.jobs_at_once`."""
        if self.jobs != "auto":
            return self.jobs
        if self.nnodes > 1:
            return 1
        return max(1, room(configuration)[0] // self.nproc_per_node)

    def run(self, planned: PlannedRun) -> int:
        """See `Launcher.run`."""
        with ExitStack() as stack:
            place = stack.enter_context(_places.one())
            output = None
            if planned.quiet:
                output = stack.enter_context((planned.directory / "console.log").open("ab"))
            environment = self._environment(planned, place)
            with self._lock:  # `stop` comes before the agent is there, or finds it
                if self._stopped:
                    return 128 + signal.SIGTERM
                agent = subprocess.Popen(
                    self.command(planned),
                    env=environment,
                    stdin=subprocess.PIPE,  # its end ends the world, however this process dies
                    stdout=output,
                    start_new_session=True,  # Ctrl-C comes through `stop` alone
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
        """See `Launcher.stop`. A run that has not begun by then does not begin."""
        with self._lock:
            self._stopped = True
            for agent in self._agents:
                agent.send_signal(signal.SIGTERM)  # Python would die of SIGINT while it starts

    def command(self, planned: PlannedRun) -> list[str]:
        """The command line that starts a run's world."""
        if self.rdzv_endpoint:
            meeting = [
                f"--nnodes={self.nnodes}",
                "--rdzv-backend=c10d",
                f"--rdzv-endpoint={self.rdzv_endpoint}",
                f"--rdzv-id={self.rdzv_id or 'metadist'}-{planned.directory.name}",
                *([] if self.node_rank is None else [f"--node-rank={self.node_rank}"]),
            ]
        else:
            meeting = ["--standalone"]
        return [
            *(sys.executable, "-m", "metadist.distributed.torchrun"),
            *meeting,
            f"--nproc-per-node={self.nproc_per_node}",
            f"--max-restarts={self.max_restarts}",
            str(planned.script),
            *planned.words(),
        ]

    def _environment(self, planned: PlannedRun, place: int) -> dict[str, str]:
        """This process's, with the threads of a worker, and the GPUs that are this run's own."""
        environment = dict(os.environ)
        environment.setdefault("OMP_NUM_THREADS", str(planned.configuration.get("threads", 1)))
        if planned.in_sweep:
            environment["METADIST_LAST_WORDS"] = str(planned.directory / WORKER_ERROR_FILE)
        gpus = visible_gpus(planned.configuration)
        mine = gpus[place * self.nproc_per_node :][: self.nproc_per_node]
        if len(mine) == self.nproc_per_node:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
        return environment


def room(configuration: DictConfig) -> tuple[int, str]:
    """How many workers this machine has room for, and of what: one a GPU, or one a core."""
    gpus = visible_gpus(configuration)
    if gpus:
        return len(gpus), "GPUs" if len(gpus) > 1 else "GPU"
    cores = usable_cpus()
    return cores, "cores" if cores > 1 else "core"


def visible_gpus(configuration: DictConfig) -> list[str]:
    """The GPUs that runs of a configuration are spread over, as CUDA_VISIBLE_DEVICES names them.

    None where `device` is the CPU, or one certain GPU.
    """
    if str(configuration.get("device")) not in ("auto", "cuda") or not torch.cuda.is_available():
        return []
    named = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return named or [str(number) for number in range(torch.cuda.device_count())]
