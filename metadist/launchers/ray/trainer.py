"""Distributed training of any PyTorch model from Python, on Ray Train, with state between calls.

The shape is that of the `PyTorchTrainer` and `PyTorchTrainable` that Ray once had. Ray Train's
TorchTrainer runs one function from beginning to end; here that function, on every worker, waits
for orders, so that one `fit` lasts as long as the trainer does.
"""

import io
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import nn

from metadist.errors import UserError
from metadist.launchers.ray.board import Board
from metadist.launchers.ray.cluster import (
    close_ray,
    load_ray,
    open_ray,
    require_workers,
    trial_resources,
)
from metadist.launchers.ray.fit import Fit, torch_trainer
from metadist.training.checkpoints import read_checkpoint, write_checkpoint

ray = load_ray("ray")
load_ray("ray.cloudpickle")
tune = load_ray("ray.tune")

_TURN_SECONDS = 1.0
_END_SECONDS = 20.0


class PyTorchTrainer:
    """Trains replicas of a model on Ray workers, as torch's DistributedDataParallel does.

    Each update is of `batch_size` items, whatever the number of replicas: they split it evenly,
    sizes differ by at most one, and every item counts alike in the gradient and in the figures.
    The order of the items in an epoch is keyed by (seed, epoch). The model's parameters after an
    epoch are therefore those of one replica, up to rounding; what looks at a batch as a whole
    (batch norm) sees each replica's part.

    A worker that dies is started again, with all others, and the call under way is done anew from
    the state before it. A call that is interrupted (Ctrl-C) is carried out all the same: the next
    one waits for its end.

    Args:
        model_creator: config -> the model.
        data_creator: config -> the training set, or a pair of it and the validation set. Items
            are `(input, …, target)`. It is called on every worker.
        optimizer_creator: (model, config) -> an optimizer, or a pair (loss, optimizer). Default:
            SGD with the config's `lr`, 0.0001 where it has none.
        config: what the creators get.
        num_replicas: workers, each with a CPU, or with a CPU and a GPU.
        use_gpu: whether replicas live on GPUs.
        batch_size: items of an update, on all replicas together.
        backend: "gloo", "nccl", or "auto": NCCL for GPUs.
        loss: (outputs, targets) -> the mean over items; a class such as `nn.MSELoss` is made an
            object of. Default: the mean squared error. A loss from `optimizer_creator` wins.
        seed: keys the initial parameters and the order of the items.
        max_failures: how often workers may be lost.
        storage_path: a directory or URI for Ray Train's storage, through which the state outlives
            a worker; on a cluster, one that all machines reach. Each trainer has a folder of its
            own there, which stays; none goes on from another's. Default: a temporary directory.
        address: of a running cluster, as in `ray.init`. Default: the Ray that this process has
            (`ray.init`), or one of this machine that ends with the trainer.

    Raises:
        UserError: Ray is not there, too few CPUs or GPUs, creators that return something else.
        RuntimeError: a creator raised; its traceback is in the message.
    """

    def __init__(
        self,
        model_creator: Callable[[dict[str, Any]], nn.Module],
        data_creator: Callable[[dict[str, Any]], Any],
        optimizer_creator: Callable[[nn.Module, dict[str, Any]], Any] | None = None,
        config: dict[str, Any] | None = None,
        num_replicas: int = 1,
        use_gpu: bool = False,
        batch_size: int = 16,
        backend: Literal["gloo", "nccl", "auto"] = "auto",
        *,
        loss: Callable[..., torch.Tensor] | type[nn.Module] = nn.MSELoss,
        seed: int = 0,
        max_failures: int = 3,
        storage_path: str | Path | None = None,
        address: str | None = None,
    ) -> None:
        for name, value in {"num_replicas": num_replicas, "batch_size": batch_size}.items():
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError(f"{name}={value!r} does not fit: it must be a whole number from 1.")
        if backend not in ("gloo", "nccl", "auto"):
            raise UserError(f'backend={backend!r} is unknown: choose "gloo", "nccl" or "auto".')
        self.config = dict(config or {})
        self._model_creator = model_creator
        self._number = 0
        self._fit: Fit | None = None
        self._folder: str | None = None
        self._owns_ray = open_ray(address)
        try:
            require_workers(num_replicas, use_gpu, f"num_replicas={num_replicas}")
            self._board = Board()
            if storage_path is None:
                storage_path = self._folder = tempfile.mkdtemp(prefix="metadist-ray-")
            creators = (model_creator, data_creator, optimizer_creator or _sgd, loss)
            self._start(
                {
                    "creators": ray.cloudpickle.dumps(creators),
                    "batch_size": batch_size,
                    "backend": None if backend == "auto" else backend,
                    "seed": seed,
                    "keeps_state": max_failures != 0,
                },
                num_workers=num_replicas,
                use_gpu=use_gpu,
                max_failures=max_failures,
                storage_path=str(storage_path),
            )
            self._ask("ready")
        except BaseException:
            self.shutdown()
            raise

    def train(self) -> dict[str, Any]:
        """Train for one epoch: one pass over the training set.

        Returns:
            `epoch` (epochs done), `train_loss` (mean over the epoch's items, each at the
            parameters it met), `batches` (updates), `items`, `seconds`.
        """
        return self._ask("train")

    def validate(self) -> dict[str, Any]:
        """Evaluate on the validation set.

        Returns:
            `validation_loss` (mean over items), `validation_accuracy` (0 to 1, where outputs are
            scores of classes and targets are classes) and `validation_items`.
        """
        return self._ask("validate")

    def save(self, path: str | Path) -> str:
        """Write parameters, optimizer and epoch to a file, whole or not at all; its path."""
        write_checkpoint(Path(path), self._state())
        return str(path)

    def restore(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote, with as many replicas as there are now.

        Raises:
            UserError: it is not there, damaged, or of another model.
        """
        saved = read_checkpoint(Path(path))
        state = {name: saved[name] for name in ("model", "optimizer", "epoch") if name in saved}
        if len(state) < 3:
            raise UserError(f"{path} was not written by PyTorchTrainer.save: restore another file.")
        _check_fits(self.get_model(), state["model"], path)
        file = io.BytesIO()
        torch.save(state, file)
        self._ask("set_state", file.getvalue())

    def get_model(self) -> nn.Module:
        """The model as it is now, on the CPU of this process."""
        model = self._model_creator(dict(self.config))
        model.load_state_dict(self._state()["model"])
        return model

    def shutdown(self) -> None:
        """End the workers, and Ray if the trainer started it. Once more does nothing."""
        fit, self._fit = self._fit, None
        if fit is not None:
            if fit.is_running():
                self._give("end")
                fit.wait(_END_SECONDS)
            self._board.remove()
        if self._owns_ray:
            self._owns_ray = False
            close_ray()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> "PyTorchTrainer":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _start(self, terms: dict[str, Any], **workers: Any) -> None:
        from metadist.launchers.ray.replica import Contract, serve

        contract = Contract(config=self.config, board=self._board, modules=tuple(sys.path), **terms)
        config = {"contract": ray.cloudpickle.dumps(contract)}
        # Under a name that was there before, Ray Train would go on with that trainer's state.
        name = f"trainer-{secrets.token_hex(4)}"
        self._fit = Fit(torch_trainer(serve, config, name=name, keep=2, **workers))

    def _state(self) -> dict[str, Any]:
        return torch.load(io.BytesIO(self._ask("get_state")), "cpu", weights_only=True)

    def _give(self, order: str, *argument: Any) -> int:
        """Put an order on the board; its number, which no other order gets."""
        if self._board.read(f"order/{self._number}"):  # a call was interrupted as it was posted
            self._number += 1
        number = self._number
        self._board.post(f"order/{number}", (order, argument))
        self._number = number + 1
        return number

    def _ask(self, order: str, *argument: Any) -> Any:
        """Give all replicas an order and wait for the answer."""
        from metadist.launchers.ray.replica import FAILED, NEXT

        if self._fit is None:
            raise UserError("this PyTorchTrainer has been shut down: make a new one.")
        number, board = self._give(order, *argument), self._board
        while True:
            running = self._fit.is_running()
            answers = board.take(f"answer/{number}", _TURN_SECONDS)
            if answers:
                board.post(NEXT, number + 1)
                if argument:  # large, and all replicas have it: they met to report
                    board.take(f"order/{number}")
                return answers[0]
            for kind, text in board.read(FAILED):
                self.shutdown()
                if kind == "user":
                    raise UserError(text)
                raise RuntimeError(f"a replica failed:\n{text}")
            if not running:
                error = self._fit.error
                self.shutdown()
                raise RuntimeError(f"the replicas were lost: {error}") from error


class PyTorchTrainable(tune.Trainable):
    """A `PyTorchTrainer` as a trial of Ray Tune: an iteration is an epoch and a validation.

    The search space has the trainer's arguments, as in `PyTorchTrainer(**config)`; what is
    searched over is mostly in its `config`: `{"config": {"lr": tune.grid_search([...])}, …}`.
    Trials report `train_loss`, `validation_loss` and the like. Tune does not count a trial's
    workers: set `max_concurrent_trials=trials_at_once(num_replicas)`.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        """A trial itself needs no CPU: its workers do."""
        return trial_resources()

    def setup(self, config: dict[str, Any]) -> None:
        """Start the trial's workers."""
        self.trainer = PyTorchTrainer(**config)

    def step(self) -> dict[str, Any]:
        """Train for an epoch, and validate."""
        return self.trainer.train() | self.trainer.validate()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the trainer's state in a directory."""
        self.trainer.save(Path(checkpoint_dir) / "trainer.pt")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Go on from what `save_checkpoint` wrote."""
        self.trainer.restore(Path(checkpoint_dir) / "trainer.pt")

    def cleanup(self) -> None:
        """End the trial's workers."""
        self.trainer.shutdown()


def _sgd(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-4))


def _check_fits(model: nn.Module, state: dict[str, Any], path: str | Path) -> None:
    """Find what does not fit here, where nothing is lost by it."""
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UserError(
            f"{path} is of another model than model_creator makes "
            f"({' '.join(str(error).split())[:200]}): restore what was saved from this model."
        ) from None
