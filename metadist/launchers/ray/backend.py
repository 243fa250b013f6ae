"""What of metadist runs inside Ray Train's controller: the world's environment, and reports.

Ray's own setup for torch opens a process group at once, on the machine's outer address. Here each
worker only learns its place and where rank zero is, as under torchrun; what is opened then is the
strategy's business, and bound to loopback on one node.

The controller gets these classes by value (see `fit`), so this file imports nothing of
metadist and nothing that imports torch: that would take seconds at each start.
"""

import os
import socket
from dataclasses import dataclass
from typing import Any

import ray
import ray.train
from ray.train import Checkpoint, UserCallback
from ray.train.backend import Backend, BackendConfig


class _WorldBackend(Backend):
    """Sets RANK, WORLD_SIZE and the like in every worker, in each attempt anew."""

    share_cuda_visible_devices = True  # the local rank then picks the GPU
    attempt = -1

    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        """Ray's controller calls it, before the training function runs."""
        self.attempt += 1
        address, port = worker_group.execute_single(0, _free_address)
        worker_group.execute(_set_environment, address, port, self.attempt)


@dataclass
class WorldConfig(BackendConfig):
    """`torch_config` of a TorchTrainer whose workers open what they need themselves.

    Args:
        backend: what TorchTrainer would choose by itself; nothing is opened for it here.
    """

    backend: str = "gloo"

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train calls when a group of workers has started."""
        return _WorldBackend


class PostReports(UserCallback):
    """Ray Train's callback: what has been reported goes on a board.

    Args:
        actor: the board's.
        topic: on it.
    """

    def __init__(self, actor: Any, topic: str) -> None:
        self.actor = actor
        self.topic = topic

    def after_report(
        self,
        run_context: Any,
        metrics: list[dict[str, Any]],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Every rank has reported the same figures."""
        ray.get(self.actor.post.remote(self.topic, metrics[0]))


def _free_address() -> tuple[str, int]:
    address = ray.util.get_node_ip_address()
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]


def _set_environment(address: str, port: int, attempt: int) -> None:
    context = ray.train.get_context()
    os.environ.update(
        RANK=str(context.get_world_rank()),
        WORLD_SIZE=str(context.get_world_size()),
        LOCAL_RANK=str(context.get_local_rank()),
        LOCAL_WORLD_SIZE=str(context.get_local_world_size()),
        MASTER_ADDR=address,
        MASTER_PORT=str(port),
        # Where torchrun counts restarts as well, so that a run knows it is to go on.
        TORCHELASTIC_RESTART_COUNT=str(attempt),
    )
