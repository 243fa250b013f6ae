"""The parts of a run: configuration of the trainer, training state, built objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from metadist.algorithms import Learner
from metadist.errors import UserError
from metadist.loggers import Logger
from metadist.metrics import task_metric
from metadist.tasks import TaskDistribution, stack_episodes
from metadist.training.callbacks import Callback
from metadist.training.precision import Precision
from metadist.training.strategies import Strategy
from metadist.training.task_mapper import EvaluateMapper, MetaBatch, TrainMapper

_MAX_TASKS = 1_000_000
"""Upper bound of numbers of tasks, whose keys are held in memory."""


@dataclass(frozen=True)
class TrainerConfig:
    """Lengths and intervals of training, and what it does when.

    Args:
        iterations: outer steps in all, those before a resume counted in.
        meta_batch_size: tasks an outer step.
        eval_every: outer steps between validations; 0 for none.
        validation_tasks: tasks of a validation, the same ones each time.
        eval_tasks: tasks of the test after training.
        eval_seed: keys the tasks of validation and test. It is not the run's seed, so that runs
            of other algorithms and other seeds are evaluated on the same tasks.
        test_checkpoint: what is tested: "last", the state at the end of training, or "best", the
            one that did best in validation.
        checkpoint_every: outer steps between checkpoints; 0 for one at the end only.
        keep_checkpoints: how many of the newest checkpoints to keep, beside the best.
        on_non_finite: what to do when the loss or the gradient of an outer step is NaN or
            infinite, beside reporting which task it comes from: "stop" saves the state before the
            step and ends the run; "skip" leaves parameters, optimizer and running statistics as
            they are and goes on with the next iteration; "continue" takes the step all the same.
        clip_value: the largest size of any element of the gradient; those beyond are cut to it.
        clip_norm: the largest Euclidean norm of the gradient of all parameters together; a
            longer one is shortened to it, after `clip_value`.
        send_tasks: rank zero samples the tasks and sends their tensors; every rank still builds the
            dataset. By default keys are sent and every worker samples its own tasks.
        task_chunk_size: how many tasks a worker computes in one batch, where algorithm and model
            support it: small tasks are then faster. "auto" goes by the tasks' size. Training with
            the engine "ddp", with distributed autograd or with a reducer that is no weighted sum
            computes one task at a time.
        compile: whether to compile the outer step of batched tasks with TorchInductor. "auto" does
            so where launching operations takes most of the time and the run is long enough to
            gain: models without convolutions on CPUs, from 5,000 iterations on. On a GPU the
            compiled step is replayed as a CUDA graph.
        precision: of the tasks' computation, in training and evaluation; parameters, optimizer and
            sums over tasks keep theirs. "float32" leaves PyTorch's settings as they are. "tf32"
            multiplies matrices and convolves in TensorFloat-32 on CUDA, and is float32 on devices
            that have none. "bf16" runs `torch.autocast` to bfloat16, without the C++ kernels.
        profile: run torch.profiler over a few outer steps: a table, printed after training, and a
            trace of every rank, both in `profile/` of the run's directory.
        report: write the plots and `report.html` after the test, which takes about a second.
            `metadist report` writes the report of a run without it later.
    """

    iterations: Annotated[int, Ge(1)] = 200
    meta_batch_size: Annotated[int, Ge(1), Le(_MAX_TASKS)] = 16
    eval_every: Annotated[int, Ge(0)] = 50
    validation_tasks: Annotated[int, Ge(1), Le(_MAX_TASKS)] = 100
    eval_tasks: Annotated[int, Ge(1), Le(_MAX_TASKS)] = 600
    eval_seed: Annotated[int, Ge(0), Lt(2**63)] = 0
    test_checkpoint: Literal["last", "best"] = "last"
    checkpoint_every: Annotated[int, Ge(0)] = 50
    keep_checkpoints: Annotated[int, Ge(1)] = 3
    on_non_finite: Literal["stop", "skip", "continue"] = "stop"
    clip_value: Annotated[float, Gt(0)] | None = None
    clip_norm: Annotated[float, Gt(0)] | None = None
    send_tasks: bool = False
    task_chunk_size: Annotated[int, Ge(1)] | Literal["auto"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    precision: Precision = "float32"
    profile: bool = False
    report: bool = True

    def __post_init__(self) -> None:
        """Check options against each other.

        Raises:
            UserError: the best checkpoint is to be tested, without validations.
        """
        if self.test_checkpoint == "best" and not self.eval_every:
            raise UserError(
                "trainer.test_checkpoint=best needs validations: set "
                "trainer.eval_every, or take trainer.test_checkpoint=last."
            )


@dataclass
class TrainState:
    """What changes as a run goes on, beside parameters and optimizer.

    Attributes:
        iteration: finished outer steps.
        best: the best validation so far, {} before the first: "iteration" and the metric's mean.
        validation: the newest validation's metric, {} before the first.
        validated: finished outer steps at the newest validation.
        train_loss: of the last outer step.
        train_seconds: spent in outer steps, over all parts of a resumed run.
        wall_seconds: of training, validation and test on rank zero, over all parts; of an
            interrupted part, up to the checkpoint that the next one resumed from.
        should_stop: whether a callback has asked to end training after this iteration.
    """

    iteration: int = 0
    best: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    validated: int = 0
    train_loss: float = float("nan")
    train_seconds: float = 0.0
    wall_seconds: float = 0.0
    should_stop: bool = False


@dataclass
class Experiment:
    """Everything that a run needs, built; one on each rank.

    Attributes:
        name: of the experiment, as in its configuration's file.
        title: one line that describes the run.
        directory: the run's directory.
        configuration: the resolved configuration, plain containers.
        seed: keys the tasks and the initial parameters.
        trainer_config: the trainer's configuration.
        tasks: this rank's tasks.
        learner: model and algorithm.
        optimizer: of the learner's parameters.
        scheduler: of the optimizer's learning rate; a step of it follows each outer step.
        strategy: how a meta-batch is computed.
        train_mapper: what a worker does in training.
        evaluate_mapper: what a worker does in evaluation.
        logger: logs metrics; one that does nothing except on rank zero.
        callbacks: by their names in the configuration.
        resume: None, "auto", or a checkpoint's path.
        state: how far the run has come; `resume.restore` sets it.
    """

    name: str
    title: str
    directory: Path
    configuration: dict[str, Any]
    seed: int
    trainer_config: TrainerConfig
    tasks: TaskDistribution
    learner: Learner
    optimizer: torch.optim.Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    strategy: Strategy
    train_mapper: TrainMapper
    evaluate_mapper: EvaluateMapper
    logger: Logger
    callbacks: Mapping[str, Callback] = field(default_factory=dict)
    resume: str | None = None
    state: TrainState = field(default_factory=TrainState)

    @property
    def metric(self) -> str:
        """The metric of validation and test: "mse" for regression, "accuracy" for classes."""
        return task_metric(self.tasks.regression)

    @property
    def evaluated_learner(self) -> Learner:
        """What is validated, tested and saved: the learner, or the one that a callback gives."""
        found = (callback.evaluated_learner() for callback in self.callbacks.values())
        return next((learner for learner in found if learner is not None), self.learner)

    @property
    def split_descriptions(self) -> dict[str, str]:
        """What validation and test measure, where they measure different things."""
        return getattr(self.tasks, "split_descriptions", {})

    def throughput(self, tasks: int, seconds: float) -> dict[str, float]:
        """Tasks per second, and samples per second where tasks are micro-batches."""
        found = {"tasks_per_second": tasks / seconds}
        if samples := getattr(self.tasks, "micro_batch_size", 0):
            found["samples_per_second"] = samples * tasks / seconds
        return found


def make_batch(experiment: Experiment, keys: Tensor) -> MetaBatch:
    """What is sent to workers for some keys, of shape (tasks, 4): the keys, or the tasks."""
    if not experiment.trainer_config.send_tasks:
        return MetaBatch(keys)
    episodes = [experiment.tasks.sample(key) for key in keys]
    shapes = {tuple(each.shape for part in episode for each in part) for episode in episodes}
    if len(shapes) > 1:
        raise UserError(
            "trainer.send_tasks=true needs tasks of equal shapes, and those of a batch have "
            "different ones: leave it out, so that each worker samples its own tasks."
        )
    return MetaBatch(keys, stack_episodes(episodes))
