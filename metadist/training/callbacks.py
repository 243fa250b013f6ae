"""Callbacks: code that the trainer calls at fixed points, with early stopping and averaging."""

import inspect
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge, Lt
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from metadist.algorithms import Learner
from metadist.distributed import get_rank
from metadist.errors import UserError, did_you_mean
from metadist.metrics import METRIC_MODES, counted, is_user_metric
from metadist.tasks import task_keys
from metadist.training.batching import REAL_TYPES
from metadist.training.task_mapper import MetaBatch

if TYPE_CHECKING:
    from metadist.training.experiment import Experiment, TrainState
    from metadist.training.trainer import StepOutput, Trainer

_log = logging.getLogger(__name__)

_Tensors = tuple[Tensor, ...] | list[Tensor]


class Callback:
    """Base class of callbacks. Every method does nothing; a subclass overrides what it needs.

    Every rank makes the configured callbacks and calls `on_build`. The other hooks are called on
    the drivers, the ranks that run the training loop: rank zero with `strategy=rpc` and `local`,
    every rank with `allreduce`. With `allreduce`, hooks get equal values on every rank and must
    change the learner in the same way on every rank; `metadist.distributed.get_rank()` is the rank,
    for example to write a file on rank zero only.

    Hooks get the trainer: `trainer.experiment` (learner, optimizer, tasks, logger, directory),
    `trainer.config`, and `trainer.state` with the number of finished iterations. If a hook sets
    `trainer.state.should_stop = True` in `on_iteration_end` or `on_validation_end` on any rank,
    training ends after this iteration: a last validation, a checkpoint and the test follow.

    Callbacks are called in the order of the configuration. An exception in a hook ends the run.

    Raises:
        TypeError: a subclass defines a method `on_…` that is not a hook, or a hook that takes other
            arguments.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        hooks = [name for name in vars(Callback) if name.startswith("on_")]
        for name in dir(cls):
            if name.startswith("on_") and name not in hooks:
                raise TypeError(
                    f"{cls.__qualname__}.{name} is no hook of Callback"
                    f"{did_you_mean(name, hooks)}: the hooks are {', '.join(hooks)}."
                )
            if name in hooks and inspect.isfunction(hook := inspect.getattr_static(cls, name)):
                expected = inspect.signature(getattr(Callback, name)).parameters
                try:
                    inspect.signature(hook, follow_wrapped=False).bind(*expected)
                except TypeError:
                    raise TypeError(
                        f"{cls.__qualname__}.{name} does not take the hook's arguments: define it "
                        f"as {name}({', '.join(expected)})."
                    ) from None

    def on_build(self, experiment: "Experiment") -> None:
        """Called on every rank once the experiment is built, before its checkpoint is read. The
        place to raise `UserError` if the callback does not fit the run.

        Args:
            experiment: the run's experiment.
        """

    def on_train_start(self, trainer: "Trainer") -> None:
        """Called before the first outer step, also of a resumed run, after `load_state_dict`.

        Args:
            trainer: the run's trainer.
        """

    def on_iteration_end(self, trainer: "Trainer", output: "StepOutput") -> None:
        """Called after each outer step, before a validation and a checkpoint of that iteration.

        Args:
            trainer: the run's trainer.
            output: loss, gradient norm and metrics of the step.
        """

    def on_validation_end(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        """Called after each validation, before its checkpoint is written. It must not call
        `trainer.validate`.

        Args:
            trainer: the run's trainer.
            metrics: "validation_loss", "validation_accuracy" or "validation_mse",
                "validation_ci95" and the learner's own metrics, as they are logged.
        """

    def on_test_end(self, trainer: "Trainer", results: dict[str, Any]) -> None:
        """Called after the test, before `results.json` is written. It must not call `test`, nor
        `validate` or `save_checkpoint` if the best checkpoint was tested, whose weights are still
        loaded.

        Args:
            trainer: the run's trainer.
            results: the results that will be written; entries may be added, of any type that
                `metadist.loggers.json_value` converts.
        """

    def on_checkpoint(self, trainer: "Trainer", path: Path) -> None:
        """Called after a checkpoint has been written, also the best checkpoint by validation. It
        must not call `trainer.save_checkpoint`, nor `trainer.validate`, which saves the best one.

        Args:
            trainer: the run's trainer.
            path: the file, which rank zero wrote.
        """

    def evaluated_learner(self) -> Learner | None:
        """The learner to validate, to test and to save for later use instead of the trained one.

        The first learner that a callback returns is used. Default: None.
        """
        return None

    def state_dict(self) -> dict[str, Any]:
        """The state for resuming: tensors, numbers, strings, None and containers of them."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state. Called before `on_train_start` if the run resumes.

        Args:
            state: the value of `state_dict` in the checkpoint, with tensors on the CPU.
        """

    def reset_validations(self, state: "TrainState") -> None:
        """Forget the earlier validations. Called after `load_state_dict` if the resumed run has
        other validation tasks than before.

        Args:
            state: the run's state.
        """


class EarlyStopping(Callback):
    """Stop when a validation metric has not improved for some validations in a row.

    The test evaluates the last state, or the best one with `trainer.test_checkpoint=best`.

    Args:
        metric: a validation metric, without the prefix: "loss", "accuracy" or one of the learner's
            own metrics. Default: "accuracy", for regression "mse".
        mode: whether the metric is to be minimized ("min") or maximized ("max"). Default: "max" for
            accuracy, "min" for loss and MSE.
        patience: number of validations in a row without improvement after which training stops.
        min_delta: an improvement is larger than this.
    """

    def __init__(
        self,
        metric: str | None = None,
        mode: Literal["min", "max"] | None = None,
        patience: Annotated[int, Ge(1)] = 5,
        min_delta: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        self.metric = metric
        self.mode = mode
        self.patience = patience
        self.min_delta = min_delta
        self.best: float | None = None
        self.validations_since_best = 0

    def on_build(self, experiment: "Experiment") -> None:
        """See `Callback`. Sets `metric` and `mode` if they are None.

        Raises:
            UserError: the run has no validations, they have no such metric, or `mode` is missing
                for one of the learner's own metrics.
        """
        if not experiment.trainer_config.eval_every:
            raise UserError(
                "early stopping needs validations: set trainer.eval_every, or leave the callback "
                "out."
            )
        self.metric = self.metric or experiment.metric
        if self.metric not in ("loss", experiment.metric):
            names = ["loss", *_metrics_of_a_task(experiment)]
            if self.metric not in names:
                raise UserError(
                    f"early stopping found no validation metric {self.metric}"
                    f"{did_you_mean(self.metric, names)}: choose one of {', '.join(names)}."
                )
        self.mode = self.mode or METRIC_MODES.get(self.metric)
        if self.mode is None:
            raise UserError(
                f"early stopping by {self.metric} needs a mode: set mode to min or max beside "
                "metric."
            )

    def on_train_start(self, trainer: "Trainer") -> None:
        """Check again: the callback may have been added to the experiment in Python."""
        self.on_build(trainer.experiment)

    def on_validation_end(self, trainer: "Trainer", metrics: Mapping[str, float]) -> None:
        """Compare the metric with the best so far. NaN is no improvement."""
        value = metrics[f"validation_{self.metric}"]
        sign = 1 if self.mode == "max" else -1
        best = self.best
        if not math.isnan(value) and (best is None or sign * (value - best) > self.min_delta):
            self.best, self.validations_since_best = value, 0
            return
        self.validations_since_best += 1
        if self.validations_since_best >= self.patience:
            trainer.state.should_stop = True
            if get_rank() == 0:
                _log.info(
                    "early stopping after iteration %d: validation_%s has not improved on %s for "
                    "%s",
                    trainer.state.iteration,
                    self.metric,
                    None if best is None else f"{best:.4g}",
                    counted(self.validations_since_best, "validation"),
                )

    def state_dict(self) -> dict[str, Any]:
        """The best value, and the number of validations since."""
        return {"best": self.best, "validations_since_best": self.validations_since_best}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Callback`."""
        self.best = state["best"]
        self.validations_since_best = state["validations_since_best"]

    def reset_validations(self, state: "TrainState") -> None:
        """See `Callback`. A stop that this callback may have asked for is withdrawn, too."""
        self.best, self.validations_since_best = None, 0
        state.should_stop = False


class WeightAveraging(Callback):
    """Validate, test and save an exponential moving average of the weights.

    After the first iteration the average is the learner's weights θ, afterwards

        average ← decay · average + (1 - decay) · θ

    after each iteration (Polyak and Juditsky 1992, doi 10.1137/0330046, average with equal
    weights). Running statistics are averaged in the same way; buffers of other types than float16,
    bfloat16, float32 and float64, such as step counts, and infinite elements, such as those of
    attention masks, are copied from the last iteration. Training itself does not change. A
    checkpoint holds the average as its learner, which `init_from`, `metadist evaluate` and
    `FewShotClassifier` load, and also the trained weights, from which a resumed run continues.

    Args:
        decay: weight of the previous average, from 0 (no averaging) to below 1; about 1 - 1/n for
            an average over n iterations.
    """

    def __init__(self, decay: Annotated[float, Ge(0), Lt(1)] = 0.999) -> None:
        self.decay = decay
        self._learner: Learner | None = None
        self._averaged: AveragedModel | None = None
        self._loaded: Mapping[str, Any] | None = None

    def on_train_start(self, trainer: "Trainer") -> None:
        """Copy the learner, or restore the average. If the learner has been trained before in this
        process, the average continues.
        """
        learner = trainer.experiment.learner
        if self._averaged is None or self._learner is not learner:
            self._learner = learner
            self._averaged = AveragedModel(
                learner, multi_avg_fn=_update_averages(self.decay), use_buffers=True
            )
        if self._loaded is not None:
            with torch.no_grad():
                for name, tensor in _named_tensors(self._averaged).items():
                    tensor.copy_(self._loaded[name])
            self._loaded = None
        self._copy_requires_grad(learner)

    def on_iteration_end(self, trainer: "Trainer", output: "StepOutput") -> None:
        """Update the average."""
        assert self._averaged is not None, "on_iteration_end() before on_train_start()"
        self._averaged.update_parameters(trainer.experiment.learner)
        for mean, buffer in zip(
            self._averaged.module.buffers(), trainer.experiment.learner.buffers(), strict=True
        ):
            if buffer.dtype in REAL_TYPES:
                # The average of two infinite numbers, as of attention masks, would be NaN.
                mean.copy_(torch.where(mean.isfinite(), mean, buffer))
        self._copy_requires_grad(trainer.experiment.learner)

    def _copy_requires_grad(self, learner: Learner) -> None:
        """Freeze or unfreeze the averages like the learner's parameters: both adapt the same."""
        assert self._averaged is not None
        averages = self._averaged.module.parameters()
        for average, parameter in zip(averages, learner.parameters(), strict=True):
            average.requires_grad_(parameter.requires_grad)

    def evaluated_learner(self) -> Learner | None:
        """The average, once training has started."""
        learner: Any = None if self._averaged is None else self._averaged.module
        return learner

    def state_dict(self) -> dict[str, Any]:
        """The average, and the number of averaged iterations."""
        return {} if self._averaged is None else _named_tensors(self._averaged)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Store the average until `on_train_start`."""
        self._loaded = state


def _update_averages(decay: float) -> Callable[[_Tensors, _Tensors, int | Tensor], None]:
    """A function that updates averages of one type: integers, for example, are copied."""
    update = get_ema_multi_avg_fn(decay)

    def update_or_copy(averages: _Tensors, values: _Tensors, number: int | Tensor) -> None:
        if averages[0].dtype in REAL_TYPES:
            update(averages, values, number)
        else:
            for average, value in zip(averages, values, strict=True):
                average.copy_(value)

    return update_or_copy


def _metrics_of_a_task(experiment: "Experiment") -> list[str]:
    """The names of the metrics of a validation task."""
    batch = MetaBatch(task_keys(0, "validation", 0, range(1)))
    with torch.no_grad():
        (result,) = experiment.evaluate_mapper.run_each(experiment.learner.eval(), batch)
    return [name for name in result.metrics if name in METRIC_MODES or is_user_metric(name)]


def _named_tensors(module: torch.nn.Module) -> dict[str, Tensor]:
    """Parameters and all buffers by name, detached; they share memory with the module."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach() for name, tensor in named}
