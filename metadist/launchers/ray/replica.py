"""Ray actor of `PyTorchTrainer`: one replica of a model, trained by DistributedDataParallel."""

import io
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.cloudpickle
import ray.util
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader

from metadist.distributed import get_rank, get_world_size
from metadist.distributed.collectives import all_reduce, broadcast, init_process_group
from metadist.distributed.errors import connection_errors_as_worker_lost
from metadist.distributed.partitioners import balanced_bounds
from metadist.errors import UserError, one_line
from metadist.launchers.ray.cluster import reserve_port
from metadist.tasks import seed_from


@dataclass(frozen=True)
class ReplicaConfig:
    """The options from which every replica is created.

    Attributes:
        creators: the pickled tuple (model_creator, data_creator, optimizer_creator, loss).
        config: the configuration that is passed to the creators.
        batch_size: the number of items of an update, over all replicas.
        backend: "gloo", or "nccl" for NCCL on GPUs and Gloo on CPUs.
        seed: the seed of the initial parameters and of the order of the items.
        sys_path: the module search path of the driver.
    """

    creators: bytes
    config: dict[str, Any]
    batch_size: int
    backend: str
    seed: int
    sys_path: tuple[str, ...]


class Replica:
    """The model, data and optimizer of one worker. The methods from `set_up` on are collective: the
    driver calls them on all replicas.
    """

    def node_id(self) -> str:
        """The ID of the node on which the replica runs."""
        return ray.get_runtime_context().get_node_id()

    def reserve_address(self) -> tuple[str, int]:
        """The host and port for rank zero's store. Called on rank zero."""
        return ray.util.get_node_ip_address(), reserve_port()

    @ray.method(concurrency_group="ping")
    def ping(self) -> None:
        """Return at once, also while another method runs, to show that the process is alive."""

    def set_up(self, options: ReplicaConfig, environment: dict[str, str]) -> None:
        """Open the process group, and create model, data and optimizer.

        Args:
            options: the options, equal on all replicas.
            environment: the environment variables that torchrun would set.
        """
        os.environ.update(environment)
        sys.path += [path for path in options.sys_path if path not in sys.path]
        backend = "cpu:gloo,cuda:nccl" if options.backend == "nccl" else options.backend
        init_process_group(backend)
        self.batch_size, self.seed = options.batch_size, options.seed
        creators = ray.cloudpickle.loads(options.creators)
        model_creator, data_creator, optimizer_creator, loss = creators
        torch.manual_seed(self.seed)
        # Ray makes one GPU visible to an actor that requests one.
        self.device = torch.device("cuda:0" if ray.get_gpu_ids() else "cpu")
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.module: nn.Module = model_creator(options.config).to(self.device)
        with connection_errors_as_worker_lost():
            self.model = DistributedDataParallel(self.module)
        self.training_set, self.validation_set = check_datasets(data_creator(options.config))
        self.loss, self.optimizer = _check_optimizer(
            optimizer_creator(self.module, options.config), loss
        )
        self.epoch = 0
        all_reduce(1)  # all replicas are ready

    def train(self) -> dict[str, Any]:
        """Train for one epoch; see `PyTorchTrainer.train`."""
        start_time = time.perf_counter()
        self.model.train()
        torch.manual_seed(seed_from(self.seed, self.epoch, 1 + get_rank()))
        generator = torch.Generator().manual_seed(seed_from(self.seed, self.epoch))
        order = torch.randperm(len(self.training_set), generator=generator).tolist()
        batches = list(BatchSampler(order, self.batch_size, drop_last=False))
        # A rank without a share of a batch computes one item, with weight zero.
        shards = [_shard(batch) or batch[:1] for batch in batches]
        total = torch.zeros((), dtype=torch.float64)
        for batch, (*inputs, targets) in zip(
            batches, self._load(self.training_set, shards), strict=True
        ):
            num_items = len(_shard(batch))
            self.optimizer.zero_grad()
            with connection_errors_as_worker_lost():
                loss = self.loss(self.model(*inputs), targets)
                # DistributedDataParallel averages over ranks, so weight by this rank's items.
                (loss * (num_items * get_world_size() / len(batch))).backward()
            self.optimizer.step()
            total += loss.detach().double().cpu() * num_items
        self.epoch += 1
        return {
            "epoch": self.epoch,
            "train_loss": all_reduce(total.item()) / len(order),
            "batches": len(batches),
            "items": len(order),
            "seconds": time.perf_counter() - start_time,
        }

    def validate(self) -> dict[str, Any]:
        """Evaluate on the validation set; see `PyTorchTrainer.validate`."""
        if self.validation_set is None:
            raise UserError(
                "validate() needs a validation set: data_creator must return two datasets, the "
                "training set and the validation set."
            )
        self.module.eval()
        # The running statistics of each replica are those of its own items: use rank zero's.
        buffers = list(self.module.buffers())
        for buffer, copy in zip(buffers, broadcast(buffers), strict=True):
            buffer.copy_(copy)
        shard = _shard(range(len(self.validation_set)))
        size = max(1, self.batch_size // get_world_size())
        batches = list(BatchSampler(shard, size, drop_last=False))
        loss, correct, is_classification = 0.0, 0, False
        with torch.no_grad():
            for *inputs, targets in self._load(self.validation_set, batches):
                outputs = self.module(*inputs)
                loss += self.loss(outputs, targets).item() * len(targets)
                if outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
                    is_classification = True
                    correct += int((outputs.argmax(1) == targets).sum())
        items, loss, correct, classifiers = all_reduce(
            (len(shard), loss, correct, int(is_classification))
        )
        accuracy = {"validation_accuracy": correct / items} if classifiers else {}
        return {"validation_loss": loss / items, **accuracy, "validation_items": items}

    def get_state(self) -> bytes:
        """The parameters, optimizer state and epoch, as bytes of `torch.save`; b"" on ranks other
        than zero.
        """
        if get_rank() != 0:
            return b""
        state = {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
        }
        file = io.BytesIO()
        torch.save(state, file)
        return file.getvalue()

    def set_state(self, content: bytes) -> None:
        """Load a state that `get_state` returned.

        Raises:
            UserError: the state is of another model or optimizer.
        """
        # Adam counts its steps on the CPU, and an optimizer leaves loaded counts where they are.
        state = torch.load(io.BytesIO(content), "cpu", weights_only=True)
        try:
            self.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                "the state is of another model or optimizer than the creators make "
                f"({one_line(error)}): restore what a trainer with these creators saved."
            ) from None
        self.epoch = int(state["epoch"])

    def _load(self, dataset: Any, batches: list[list[int]]) -> Iterator[list[Tensor]]:
        pinned = self.device.type == "cuda"
        for batch in DataLoader(dataset, batch_sampler=batches, pin_memory=pinned):
            yield [tensor.to(self.device, non_blocking=pinned) for tensor in batch]


def check_datasets(created: Any) -> tuple[Any, Any]:
    """The training set and the validation set, if any, that `data_creator` returned.

    Raises:
        UserError: `data_creator` returned something else, or an empty dataset.
    """
    pair = tuple(created) if isinstance(created, tuple | list) else (created, None)
    datasets = [dataset for dataset in pair[:2] if dataset is not None]
    for dataset in datasets:
        if not (hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")):
            raise UserError(
                "data_creator must return map-style datasets, with a length and items by index "
                f"(the training set, or it and the validation set), not {type(dataset).__name__}: "
                "batches and shards are made here."
            )
    if len(pair) != 2 or pair[0] is None or not all(map(len, datasets)):
        raise UserError(
            "data_creator must return the training set, or a pair of it and the validation set, "
            "with at least one item in each."
        )
    return pair


def _check_optimizer(created: Any, loss: Any) -> tuple[Callable[..., Tensor], Any]:
    """The loss and the optimizer; `optimizer_creator` may return both or only the optimizer."""
    if isinstance(created, tuple | list) and len(created) == 2:
        loss, created = created
    loss = loss() if isinstance(loss, type) else loss
    if not isinstance(created, torch.optim.Optimizer) or not callable(loss):
        raise UserError(
            "optimizer_creator must return an optimizer, or a pair (loss, optimizer); it returned "
            f"{type(created).__name__}."
        )
    return loss, created


def _shard(items: Sequence[int]) -> list[int]:
    """This rank's share of the items."""
    start, stop = balanced_bounds(len(items), get_world_size())[get_rank()]
    return list(items[start:stop])
