"""`PyTorchTrainer`: distributed training of any PyTorch model from Python, with Ray actors.

It has the interface of Ray's former `PyTorchTrainer` and `PyTorchTrainable`. Each replica is a Ray
actor, and a method of the trainer calls the same method on all replicas.
"""

import io
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from metadist.deadlines import call_within
from metadist.distributed import WorkerLostError
from metadist.errors import UserError, one_line
from metadist.launchers.ray.cluster import (
    check_resources,
    init_ray,
    load_ray,
    shutdown_ray,
    trial_resources,
)
from metadist.training.checkpoints import read_checkpoint, write_checkpoint

ray = load_ray("ray")
cloudpickle = load_ray("ray.cloudpickle")
placement = load_ray("ray.util.placement_group")
Trainable: Any = load_ray("ray.tune").Trainable

_PING_SECONDS = 1.0


class _ReplicaLostError(Exception):
    """A replica died or does not respond."""


class PyTorchTrainer:
    """Trains replicas of a model in Ray actors with DistributedDataParallel.

    Each update uses `batch_size` items for any number of replicas: shards differ in size by at most
    one, and every item has the same weight in the gradient and in the metrics. The order of the
    items is keyed by (seed, epoch). After an epoch, the parameters are therefore the same as with a
    single replica, up to rounding, except with layers that depend on the whole batch (batch norm),
    which see one replica's shard, and with random layers (dropout), keyed by (seed, epoch, rank).

    If a replica dies or freezes, all replicas are restarted from the state before the current call,
    and the call is repeated. A call that is interrupted (Ctrl-C) continues in the background; the
    next call waits for it.

    Args:
        model_creator: a function from the config to the model.
        data_creator: a function from the config to the training set, or to a pair of the training
            set and the validation set. Items are `(input, …, target)`. It is called on every
            worker.
        optimizer_creator: a function from (model, config) to an optimizer, or to a pair (loss,
            optimizer). Default: SGD with the config's `lr`, or 0.0001.
        config: the configuration that is passed to the creators.
        num_replicas: the number of workers, with one CPU each, or one CPU and one GPU each.
        use_gpu: whether replicas are on GPUs.
        batch_size: the number of items of an update, over all replicas.
        backend: "gloo", "nccl", or "auto" for NCCL on GPUs and Gloo on CPUs.
        loss: a function from (outputs, targets) to the mean over items, or a class of such
            functions, like `nn.MSELoss`. Default: the mean squared error. A loss from
            `optimizer_creator` takes precedence.
        seed: the seed of the initial parameters and of the order of the items, not negative.
        max_failures: the number of times that replicas may be lost; -1 for any number. With 0 no
            state is kept.
        timeout_seconds: seconds after which a replica that does not respond is lost, because its
            process is stopped or its node is unreachable. Replicas respond during long
            computations.
        address: the address of a running cluster, as in `ray.init`. Default: the Ray of this
            process (`ray.init`), or a local node that ends with the trainer.

    Raises:
        UserError: Ray is not installed or unreachable, there are too few CPUs or GPUs, or a creator
            returned an invalid object.
        RuntimeError: a creator raised an error; the message contains its traceback.
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
        timeout_seconds: float = 30.0,
        address: str | None = None,
    ) -> None:
        from metadist.launchers.ray.replica import ReplicaConfig

        numbers = [
            ("num_replicas", num_replicas, 1),
            ("batch_size", batch_size, 1),
            ("seed", seed, 0),
        ]
        for name, value, minimum in numbers:
            if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
                raise UserError(
                    f"{name}={value!r} does not fit: it must be a whole number from {minimum}."
                )
        if backend not in ("gloo", "nccl", "auto"):
            raise UserError(f'backend={backend!r} is unknown: choose "gloo", "nccl" or "auto".')
        self.config = dict(config or {})
        self._model_creator = model_creator
        self._options = ReplicaConfig(
            creators=cloudpickle.dumps(
                (model_creator, data_creator, optimizer_creator or _sgd, loss)
            ),
            config=self.config,
            batch_size=batch_size,
            backend=("nccl" if use_gpu else "gloo") if backend == "auto" else backend,
            seed=seed,
            sys_path=tuple(sys.path),
        )
        self._resources = {"CPU": 1, "GPU": 1} if use_gpu else {"CPU": 1}
        self._num_replicas = num_replicas
        self._failures_left = max_failures
        self._timeout = timeout_seconds
        self._replicas: list[Any] = []
        self._placement_group: Any = None
        self._state = b""
        self._closed = False
        self._last_call: Future[Any] | None = None
        self._owns_ray = init_ray(address)
        try:
            check_resources(num_replicas, use_gpu, f"num_replicas={num_replicas}")
            self._call()
        except BaseException:
            self.shutdown()
            raise

    def train(self) -> dict[str, Any]:
        """Train for one epoch, a pass over the training set.

        Returns:
            A dictionary of `epoch` (finished epochs), `train_loss` (mean over the epoch's items,
            each with the parameters before its update), `batches` (updates), `items` and `seconds`.
        """
        return self._call("train")

    def validate(self) -> dict[str, Any]:
        """Evaluate on the validation set.

        Returns:
            A dictionary of `validation_loss` (mean over items), `validation_accuracy` (0 to 1, if
            outputs are class scores and targets are classes) and `validation_items`.
        """
        return self._call("validate")

    def save(self, path: str | Path) -> str:
        """Write the parameters, optimizer and epoch to a file atomically; returns its path."""
        write_checkpoint(Path(path), self._get_state())
        return str(path)

    def restore(self, path: str | Path) -> None:
        """Load a file that `save` wrote with any number of replicas.

        Raises:
            UserError: the file is missing, corrupt, or of another model.
        """
        saved = read_checkpoint(Path(path))
        state = {name: saved[name] for name in ("model", "optimizer", "epoch") if name in saved}
        if len(state) < 3:
            raise UserError(f"{path} was not written by PyTorchTrainer.save: restore another file.")
        model = self.get_model()
        try:  # refuses a state of another model before it reaches the replicas
            model.load_state_dict(state["model"])
        except RuntimeError as error:
            raise UserError(
                f"{path} is of another model than model_creator makes "
                f"({one_line(error)}): restore what was saved from this model."
            ) from None
        file = io.BytesIO()
        torch.save(state, file)
        self._call("set_state", ray.put(file.getvalue()))

    def get_model(self) -> nn.Module:
        """The current model, on the CPU of this process."""
        model = self._model_creator(dict(self.config))
        model.load_state_dict(self._get_state()["model"])
        return model

    def shutdown(self) -> None:
        """End the replicas, and Ray if the trainer started it. May be called twice."""
        self._closed = True
        self._kill_replicas()
        if self._owns_ray:
            self._owns_ray = False
            shutdown_ray()

    def __enter__(self) -> "PyTorchTrainer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _get_state(self) -> dict[str, Any]:
        return torch.load(io.BytesIO(self._call("get_state")), "cpu", weights_only=True)

    # --- calls of all replicas -------------------------------------------------------------------

    def _call(self, method: str = "", *args: Any) -> Any:
        """Call a method on all replicas, in a thread, so that Ctrl-C interrupts only the wait.

        Returns:
            Rank zero's result; None without a method, after the replicas have been set up.
        """
        if self._closed:
            raise UserError("this PyTorchTrainer has been shut down: make a new one.")
        previous = self._last_call

        def run() -> Any:
            if previous is not None:
                wait([previous])
            return self._call_with_restarts(method, *args)

        self._last_call = call_within(0.0, run)
        return self._last_call.result()

    def _call_with_restarts(self, method: str, *args: Any) -> Any:
        while True:
            try:
                if not self._replicas:
                    self._start_replicas()
                result = self._call_replicas(method, *args)[0] if method else None
                if method in ("train", "set_state") and self._failures_left:
                    self._state = self._call_replicas("get_state")[0]
                return result
            except _ReplicaLostError as error:
                self._kill_replicas()
                if self._closed or self._failures_left == 0:
                    self.shutdown()
                    raise RuntimeError(f"the replicas were lost: {error}") from error
                self._failures_left -= 1
            except BaseException:
                self.shutdown()
                raise

    def _start_replicas(self) -> None:
        from metadist.launchers.ray.replica import Replica

        # A placement group reserves the resources of all replicas at once.
        self._placement_group = placement.placement_group([self._resources] * self._num_replicas)
        strategy = load_ray("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        actor = ray.remote(
            num_cpus=1, num_gpus=self._resources.get("GPU", 0), concurrency_groups={"ping": 1}
        )(Replica)
        self._replicas = [
            actor.options(scheduling_strategy=strategy(self._placement_group, index)).remote()
            for index in range(self._num_replicas)
        ]
        node_ids = [replica.node_id.remote() for replica in self._replicas]
        nodes = self._wait(node_ids, starting=True)
        host, port = self._wait([self._replicas[0].reserve_address.remote()])[0]
        local_sizes, local_ranks = Counter(nodes), Counter[str]()
        calls = []
        for rank, (replica, node) in enumerate(zip(self._replicas, nodes, strict=True)):
            environment = {
                "RANK": rank,
                "WORLD_SIZE": self._num_replicas,
                "LOCAL_RANK": local_ranks[node],
                "LOCAL_WORLD_SIZE": local_sizes[node],
                "MASTER_ADDR": host,
                "MASTER_PORT": port,
            }
            local_ranks[node] += 1
            variables = {name: str(value) for name, value in environment.items()}
            calls.append(replica.set_up.remote(self._options, variables))
        self._wait(calls)
        if self._state:
            self._call_replicas("set_state", ray.put(self._state))

    def _kill_replicas(self) -> None:
        replicas, self._replicas = self._replicas, []
        group, self._placement_group = self._placement_group, None
        if not ray.is_initialized():
            return
        for replica in replicas:
            ray.kill(replica)
        if group is not None:
            placement.remove_placement_group(group)

    def _call_replicas(self, method: str, *args: Any) -> list[Any]:
        return self._wait([getattr(replica, method).remote(*args) for replica in self._replicas])

    def _wait(self, calls: Sequence[Any], starting: bool = False) -> list[Any]:
        """Wait for the results of calls to replicas, and ping the replicas meanwhile.

        Args:
            calls: the object references of the calls.
            starting: whether replicas may still wait for resources before they respond.

        Raises:
            _ReplicaLostError: a replica died or does not respond.
            UserError: a replica raised this error.
            RuntimeError: a replica raised another error.
        """
        pending = list(calls)
        try:
            while pending:
                done, pending = ray.wait(pending, timeout=_PING_SECONDS)
                ray.get(done)  # raises an error at once: other replicas may wait for this one
                if pending and not starting and not self._all_respond():
                    raise _ReplicaLostError(f"no response within {self._timeout:g} s")
            return ray.get(list(calls))
        except ray.exceptions.RayActorError as error:
            raise _ReplicaLostError(one_line(error)) from error
        except ray.exceptions.RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError):
                raise UserError(str(cause)) from None
            if isinstance(cause, WorkerLostError) and not self._all_respond():
                raise _ReplicaLostError(str(cause)) from error
            raise RuntimeError(f"a replica failed:\n{error}") from None

    def _all_respond(self) -> bool:
        """Whether all replicas respond to a ping. If they do, a program error is the reason why a
        collective failed.
        """
        pings = [replica.ping.remote() for replica in self._replicas]
        responses, missing = ray.wait(pings, num_returns=len(pings), timeout=self._timeout)
        try:
            ray.get(responses)
        except ray.exceptions.RayActorError:
            return False
        return not missing


class PyTorchTrainable(Trainable):  # type: ignore[misc]  # Ray is optional
    """A `PyTorchTrainer` as a trial of Ray Tune: an iteration is an epoch and a validation.

    The search space contains the trainer's arguments, as in `PyTorchTrainer(**config)`; most
    searched values are in its `config`: `{"config": {"lr": tune.grid_search([...])}, …}`. Trials
    report the results of `train` and `validate`, such as `validation_loss`. Tune does not count the
    workers of a trial: pass `max_concurrent_trials(num_replicas)` of
    `metadist.launchers.ray.cluster`.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> Any:
        """The resources of the trial itself, which needs no CPU; its workers do."""
        return trial_resources()

    def setup(self, config: dict[str, Any]) -> None:
        """Start the trial's workers."""
        self.trainer = PyTorchTrainer(**config)

    def step(self) -> dict[str, Any]:
        """Train for an epoch and validate."""
        return self.trainer.train() | self.trainer.validate()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Save the trainer's state in a directory."""
        self.trainer.save(Path(checkpoint_dir) / "trainer.pt")

    def load_checkpoint(self, checkpoint_dir: str) -> None:
        """Load a state that `save_checkpoint` wrote."""
        self.trainer.restore(Path(checkpoint_dir) / "trainer.pt")

    def cleanup(self) -> None:
        """End the trial's workers."""
        self.trainer.shutdown()


def _sgd(model: nn.Module, config: dict[str, Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=config.get("lr", 1e-4))
