"""Ray Train's TorchTrainer as it is used here, and its `fit` in a thread."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from metadist.launchers.ray.cluster import load_ray


def torch_trainer(
    function: Callable[[dict[str, Any]], None],
    config: dict[str, Any],
    *,
    num_workers: int,
    use_gpu: bool,
    max_failures: int,
    storage_path: str,
    name: str,
    keep: int,
    callbacks: Sequence[Any] = (),
) -> Any:
    """A TorchTrainer whose workers get the world's environment and open what they need.

    Args:
        function: what every worker runs; it gets `config`.
        config: sent to the workers, by way of Ray's own processes, which must not need metadist
            to read it.
        num_workers: processes, each with a CPU.
        use_gpu: whether each has a GPU as well.
        max_failures: how often workers may be lost; -1 for any number.
        storage_path: directory or URI of Ray Train's storage.
        name: of the folder in it.
        keep: how many checkpoints Ray keeps there.
        callbacks: Ray Train's, such as Tune's TuneReportCallback.
    """
    load_ray()
    from ray.train import (
        CheckpointConfig,
        FailureConfig,
        LoggingConfig,
        RunConfig,
        ScalingConfig,
    )
    from ray.train.torch import TorchTrainer

    from metadist.launchers.ray import backend

    # By value: Ray's own processes then need neither metadist nor torch.
    load_ray("ray.cloudpickle").register_pickle_by_value(backend)
    return TorchTrainer(
        function,
        train_loop_config=config,
        torch_config=backend.WorldConfig(),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
        run_config=RunConfig(
            name=name,
            storage_path=storage_path,
            failure_config=FailureConfig(max_failures=max_failures),
            checkpoint_config=CheckpointConfig(num_to_keep=keep),
            callbacks=list(callbacks),
            logging_config=LoggingConfig(log_level="ERROR"),
        ),
    )


class Fit:
    """A trainer's `fit`, under way in a thread of its own.

    Attributes:
        error: what it raised; None as long as it has not.
    """

    def __init__(self, trainer: Any) -> None:
        self.error: BaseException | None = None
        self._trainer = trainer
        self._thread = threading.Thread(target=self._run, name="metadist-fit", daemon=True)
        self._thread.start()

    def is_running(self) -> bool:
        """Whether it has not returned yet."""
        return self._thread.is_alive()

    def wait(self, seconds: float) -> None:
        """Wait for its end, but no longer."""
        self._thread.join(seconds)

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except BaseException as error:
            self.error = error
