"""A replica of a model in a Ray worker, which does what it is told together with the others."""

import contextlib
import io
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray.cloudpickle
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConsistencyMode
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from metadist.distributed import WorkerLostError, get_rank, get_world_size
from metadist.distributed.collectives import (
    all_reduce,
    broadcast,
    destroy_process_group,
    init_process_group,
)
from metadist.distributed.errors import connection_errors_as_worker_lost
from metadist.distributed.partitioners import balanced_bounds
from metadist.errors import UserError
from metadist.launchers.ray.board import Board
from metadist.training.checkpoints import read_checkpoint, write_checkpoint

FAILED, KEPT, NEXT = "failed", "kept", "next"
"""Topics of the board: (kind of the error, its text) of what another attempt would meet again;
orders after which the state was kept; numbers of orders, those before which have been answered.
"""

_STATE = "state.pt"
_WAIT_SECONDS = 10.0
_END_SECONDS = 3.0


@dataclass(frozen=True)
class Contract:
    """What every replica is made of and works by.

    Attributes:
        creators: pickled (model_creator, data_creator, optimizer_creator, loss).
        config: what the creators are called with.
        batch_size: items of an update, on all replicas together.
        backend: "gloo", "nccl", or None for what fits.
        seed: keys the initial parameters and the order of the items.
        board: for orders and answers.
        keeps_state: save the state with Ray after each order that changes it.
        modules: where Python looks for modules where the trainer was made.
    """

    creators: bytes
    config: dict[str, Any]
    batch_size: int
    backend: str | None
    seed: int
    board: Board
    keeps_state: bool
    modules: tuple[str, ...]


def serve(config: dict[str, Any]) -> None:
    """The training function of a TorchTrainer: carry out orders until one says "end".

    Orders and answers lie on the board under `order/0`, `answer/0` and so on; rank zero answers.

    Raises:
        Exception: Ray then starts all workers again; after what `FAILED` tells, they return.
    """
    contract: Contract = ray.cloudpickle.loads(config["contract"])
    board = contract.board
    if board.read(FAILED):
        return
    sys.path += [path for path in contract.modules if path not in sys.path]
    try:
        init_process_group(contract.backend)
        replica = _Replica(contract)
        number = replica.go_on()
        while True:
            number = max([number, *board.read(NEXT)])  # those before are answered
            for order, argument in board.read(f"order/{number}", seconds=_WAIT_SECONDS):
                if order == "end":
                    return
                answer = getattr(replica, order)(*argument)
                if order in ("train", "set_state"):
                    replica.keep(number, answer)
                if get_rank() == 0:
                    board.post(f"answer/{number}", answer)
                number += 1
    except WorkerLostError:
        if not board.read(FAILED, seconds=_END_SECONDS):
            raise
    except Exception as error:
        kind = "user" if isinstance(error, UserError) else "program"
        text = str(error) if kind == "user" else traceback.format_exc().strip()
        board.post(FAILED, (kind, text))
        raise  # Ray then ends the others too, which may be waiting for this one
    finally:
        with contextlib.suppress(RuntimeError):
            destroy_process_group()


class _Replica:
    """Model, data and optimizer of one worker. All replicas are called alike."""

    def __init__(self, contract: Contract) -> None:
        self.contract = contract
        self.config = dict(contract.config)
        model_creator, data_creator, optimizer_creator, loss = ray.cloudpickle.loads(
            contract.creators
        )
        torch.manual_seed(contract.seed)
        self.device = ray.train.torch.get_device()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.module: nn.Module = model_creator(self.config).to(self.device)
        with connection_errors_as_worker_lost():
            self.model = DistributedDataParallel(self.module)
        self.training, self.validation = _two_sets(data_creator(self.config))
        self.loss, self.optimizer = _loss_and_optimizer(
            optimizer_creator(self.module, self.config), loss
        )
        self.epoch = 0

    def ready(self) -> dict[str, Any]:
        """Nothing but an answer, when all replicas have been made."""
        return {"num_replicas": all_reduce(1)}

    def train(self) -> dict[str, Any]:
        """One pass over the training set."""
        started = time.perf_counter()
        self.model.train()
        generator = torch.Generator().manual_seed(self.contract.seed + self.epoch)
        order = torch.randperm(len(self.training), generator=generator).tolist()
        size = self.contract.batch_size
        batches = [order[start : start + size] for start in range(0, len(order), size)]
        total = torch.zeros((), dtype=torch.float64)
        for batch, (*inputs, targets) in zip(batches, self._shards(batches), strict=True):
            held = len(_share(batch))
            self.optimizer.zero_grad()
            with connection_errors_as_worker_lost():
                loss = self.loss(self.model(*inputs), targets)
                # The ranks' gradients are averaged: each counts by the items that it holds.
                (loss * (held * get_world_size() / len(batch))).backward()
            self.optimizer.step()
            total += loss.detach().double().cpu() * held
        self.epoch += 1
        return {
            "epoch": self.epoch,
            "train_loss": all_reduce(total.item()) / len(order),
            "batches": len(batches),
            "items": len(order),
            "seconds": time.perf_counter() - started,
        }

    def validate(self) -> dict[str, Any]:
        """Loss, and accuracy where outputs are scores of classes, over the validation set."""
        if self.validation is None:
            raise UserError(
                "validate() needs a validation set: data_creator must return two datasets, the "
                "training set and the validation set."
            )
        self.module.eval()
        # A training step leaves each replica with the running statistics of its own items.
        for buffer in self.module.buffers():
            buffer.copy_(broadcast(buffer))
        mine = _share(range(len(self.validation)))
        size = max(1, self.contract.batch_size // get_world_size())
        batches = [mine[start : start + size] for start in range(0, len(mine), size)]
        loss, right, classes = 0.0, 0, False
        with torch.no_grad():
            for *inputs, targets in self._load(self.validation, batches):
                outputs = self.module(*inputs)
                loss += self.loss(outputs, targets).item() * len(targets)
                if outputs.dim() == 2 and targets.dim() == 1 and not targets.is_floating_point():
                    classes = True
                    right += int((outputs.argmax(1) == targets).sum())
        items, loss, right, classes = all_reduce((len(mine), loss, right, int(classes)))
        accuracy = {"validation_accuracy": right / items} if classes else {}
        return {"validation_loss": loss / items, **accuracy, "validation_items": items}

    def get_state(self) -> bytes:
        """Parameters, optimizer and epoch, as `torch.save` writes them."""
        file = io.BytesIO()
        torch.save(self._state(), file)
        return file.getvalue()

    def set_state(self, state: bytes) -> dict[str, Any]:
        """Go on from what `get_state` gave."""
        self._set_state(torch.load(io.BytesIO(state), self.device, weights_only=True))
        return {"epoch": self.epoch}

    # --- over restarts ---------------------------------------------------------------------------

    def keep(self, number: int, answer: dict[str, Any]) -> None:
        """Report to Ray, with the state after order `number`, so that a restart goes on there."""
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if self.contract.keeps_state and get_rank() == 0:
                about = {"number": number, "answer": answer}
                write_checkpoint(Path(folder) / _STATE, about | self._state())
                checkpoint = Checkpoint.from_directory(folder)
            ray.train.report(answer, checkpoint)
        if checkpoint is not None:  # until Ray's controller has it, it would die with this worker
            ray.train.get_all_reported_checkpoints(
                consistency_mode=CheckpointConsistencyMode.COMMITTED
            )
            self.contract.board.post(KEPT, number)

    def go_on(self) -> int:
        """Take up the state that was kept last, if any; the number of the next order."""
        newest = ray.train.get_checkpoint()
        if newest is None:
            if self.contract.board.read(KEPT):
                raise RuntimeError("Ray has lost the state that it was given to keep")
            return 0
        with newest.as_directory() as folder:
            kept = read_checkpoint(Path(folder) / _STATE)
        self._set_state(kept)
        board, number = self.contract.board, kept["number"]
        # The worker may have died with its answer on its lips.
        if get_rank() == 0 and not board.read(f"answer/{number}"):
            board.post(f"answer/{number}", kept["answer"])
        return number + 1

    def _state(self) -> dict[str, Any]:
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "epoch": self.epoch,
        }

    def _set_state(self, state: dict[str, Any]) -> None:
        try:
            self.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError, KeyError) as error:
            raise UserError(
                "the state is of another model or optimizer than the creators make "
                f"({' '.join(str(error).split())[:200]}): restore what a trainer with these "
                "creators saved."
            ) from None
        self.epoch = int(state["epoch"])

    def _shards(self, batches: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
        """This rank's part of each batch; one item, which will not count, where it has none."""
        return self._load(self.training, [_share(batch) or list(batch[:1]) for batch in batches])

    def _load(self, dataset: Dataset, batches: list[list[int]]) -> Iterator[list[Tensor]]:
        pinned = self.device.type == "cuda"
        for batch in DataLoader(dataset, batch_sampler=batches, pin_memory=pinned):
            yield [each.to(self.device, non_blocking=pinned) for each in batch]


def _share(items: Sequence[int]) -> list[int]:
    """This rank's items of a whole."""
    start, stop = balanced_bounds(len(items), get_world_size())[get_rank()]
    return list(items[start:stop])


def _two_sets(made: Any) -> tuple[Dataset, Dataset | None]:
    pair = tuple(made) if isinstance(made, tuple | list) else (made, None)
    for each in pair[:2]:
        if each is not None and not (hasattr(each, "__getitem__") and hasattr(each, "__len__")):
            raise UserError(
                "data_creator must return datasets that have a length and items by number (the "
                f"training set, or it and the validation set), not {type(each).__name__}: batches "
                "and shards are made here."
            )
    if len(pair) != 2 or pair[0] is None or not all(len(each) for each in pair if each is not None):
        raise UserError(
            "data_creator must return the training set, or a pair of it and the validation set, "
            "with at least one item in each."
        )
    return pair


def _loss_and_optimizer(made: Any, loss: Any) -> tuple[Callable[..., Tensor], Any]:
    """What optimizer_creator made, alone or with a loss in front as Ray once had it."""
    if isinstance(made, tuple | list) and len(made) == 2:
        loss, made = made
    loss = loss() if isinstance(loss, type) else loss
    if not isinstance(made, torch.optim.Optimizer) or not callable(loss):
        raise UserError(
            "optimizer_creator must return an optimizer, or a pair (loss, optimizer); it returned "
            f"{type(made).__name__}."
        )
    return loss, made
