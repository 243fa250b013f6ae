"""The parts of a run: configuration of the trainer, training state, built objects."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from metadist.algorithms import Learner
from metadist.distributed.partitioners import as_shards
from metadist.errors import UserError
from metadist.loggers import Logger
from metadist.metrics import task_metric
from metadist.tasks import TaskDistribution, stack_episodes, task_keys
from metadist.training.callbacks import Callback
from metadist.training.precision import Precision
from metadist.training.profiling import PROFILED_STEPS
from metadist.training.strategies.strategy import Strategy
from metadist.training.task_mapper import EvaluateMapper, MetaBatch, TrainMapper

if TYPE_CHECKING:
    from metadist.training.step_blocks import StepBlocks

_MAX_TASKS = 1_000_000
"""Upper bound of numbers of tasks, whose keys are held in memory."""


@dataclass(frozen=True)
class TrainerConfig:
    """Lengths, intervals and options of training and evaluation.

    Args:
        iterations: total number of outer steps, including those before a resume; 0 tests the
            initial weights, such as those of `init_from`.
        meta_batch_size: tasks per outer step.
        eval_every: outer steps between validations; 0 for none.
        validation_tasks: tasks per validation, the same ones each time.
        eval_tasks: tasks of the test after training.
        eval_seed: seed of the tasks of validation and test. It is separate from the run's seed, so
            that runs with other algorithms and other seeds are evaluated on the same tasks.
        test_checkpoint: the state that is tested: "last", the state at the end of training, or
            "best", the state with the best validation.
        checkpoint_every: outer steps between checkpoints; 0 for one at the end only.
        keep_checkpoints: number of newest checkpoints to keep, in addition to the best.
        on_non_finite: the action when the loss or the gradient of an outer step is NaN or infinite,
            after reporting the task that caused it: "stop" saves the state before the step and ends
            the run; "skip" leaves parameters, optimizer and running statistics unchanged and
            continues with the next iteration; "continue" takes the step all the same.
        clip_value: largest absolute value of an element of the gradient; larger ones are clipped.
        clip_norm: largest Euclidean norm of the gradient of all parameters together; a gradient
            with a larger norm is scaled down, after `clip_value`.
        send_tasks: whether rank zero samples the tasks and sends their tensors, with
            `strategy=rpc`; with `strategy=allreduce` every rank then samples all of them. Every
            rank still builds the dataset. By default keys are sent and every worker samples its own
            tasks.
        task_chunk_size: number of tasks that a worker computes in one batch, if algorithm and model
            support it; this is faster for small tasks. "auto" depends on the tasks' size; on a GPU,
            a training step takes at most 40% of the memory. Training with the engine "ddp", with
            distributed autograd or with a reducer that is not a weighted sum computes one task at
            a time.
        compile: whether to compile the outer step of batched tasks with TorchInductor; on a GPU,
            the eager step is captured as a CUDA graph instead, with the same bits. "auto" captures
            on GPUs, and on CPUs compiles models without convolutions, from 5,000 iterations on,
            where most of the time is spent on launching operations.
        precision: the precision of the tasks' computation, in training and evaluation; parameters,
            optimizer and sums over tasks keep their types. "float32" is float32 in convolutions,
            too, for which CUDA's default is TensorFloat-32. "tf32" multiplies matrices and
            convolves in TensorFloat-32 on CUDA, and in float32 on devices without it. "bf16" runs
            `torch.autocast` to bfloat16, without the C++ kernels.
        profile: whether to run torch.profiler over a few outer steps. It prints a table after
            training, and writes the table and a trace of every rank into `profile/` of the run's
            directory.
        report: whether to write the plots and `report.html` after the test, which takes about a
            second. `metadist report` writes the report of a run without it later.
    """

    iterations: Annotated[int, Ge(0)] = 200
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
            UserError: `test_checkpoint` is "best", and there are no validations; or `profile` is
                set, and the run is shorter than a profile.
        """
        if self.test_checkpoint == "best" and not self.eval_every:
            raise UserError(
                "trainer.test_checkpoint=best needs validations: set "
                "trainer.eval_every, or take trainer.test_checkpoint=last."
            )
        if self.profile and self.iterations < PROFILED_STEPS:
            raise UserError(
                f"trainer.profile=true takes {PROFILED_STEPS} outer steps, and the run has "
                f"{self.iterations}: set trainer.iterations={PROFILED_STEPS} or more, or "
                "trainer.profile=false."
            )


@dataclass
class TrainState:
    """The state of a run besides parameters and optimizer.

    Attributes:
        iteration: number of finished outer steps.
        best: "iteration" and the metric's mean of the best validation so far; {} before the first.
        validation: the metric of the newest validation; {} before the first.
        validated: number of finished outer steps at the newest validation.
        train_loss: loss of the last outer step.
        train_seconds: seconds spent in outer steps, over all parts of a resumed run.
        wall_seconds: seconds of training, validation and test on rank zero, over all parts of a
            resumed run; an interrupted part counts up to the checkpoint that the next started from.
        skipped_steps: number of outer steps that `trainer.on_non_finite=skip` has left out.
        should_stop: whether a callback has asked to end training after this iteration.
    """

    iteration: int = 0
    best: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    validated: int = 0
    train_loss: float = float("nan")
    train_seconds: float = 0.0
    wall_seconds: float = 0.0
    skipped_steps: int = 0
    should_stop: bool = False


@dataclass
class Experiment:
    """The built objects of a run. Every rank has its own.

    Attributes:
        name: the experiment's name, the name of its configuration file.
        title: one line that describes the run.
        directory: the run's directory.
        configuration: the resolved configuration, as plain containers without secrets, with the
            defaults of the user's own classes.
        seed: the seed of the training tasks and of the initial parameters.
        trainer_config: the trainer's configuration.
        tasks: this rank's task distribution.
        learner: the algorithm with its model.
        optimizer: the outer optimizer of the learner's parameters.
        scheduler: the scheduler of its learning rate, which takes a step after each outer step.
        strategy: the strategy that distributes a meta-batch.
        train_mapper: the workers' computation in training.
        evaluate_mapper: the workers' computation in evaluation.
        logger: the logger of the metrics; on ranks other than zero, it does nothing.
        callbacks: the callbacks, by their names in the configuration.
        defaults: the defaults of the options of the user's own classes, by path and name.
        resume: None, "auto", or the path of a checkpoint or of a run's directory.
        state: the training state; `resume.restore` sets it.
        restored_from: the checkpoint that the state was restored from, until the run goes on; see
            `resume.replace_later_checkpoints`.
        step_blocks: computes several outer steps in a row; None if they are taken one by one.
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
    defaults: Mapping[str, Any] = field(default_factory=dict)
    resume: str | None = None
    state: TrainState = field(default_factory=TrainState)
    restored_from: Path | None = None
    step_blocks: "StepBlocks | None" = None

    @property
    def metric(self) -> str:
        """The metric of validation and test: "mse" for regression, "accuracy" for classes."""
        return task_metric(self.tasks.regression)

    @property
    def evaluated_learner(self) -> Learner:
        """The learner to validate, test and save: a callback's if it has one, else `learner`.

        Raises:
            UserError: a callback returned something other than a learner.
        """
        for callback in self.callbacks.values():
            learner: Any = callback.evaluated_learner()
            if learner is not None and not isinstance(learner, Learner):
                raise UserError(
                    f"{type(callback).__name__}.evaluated_learner returned a "
                    f"{type(learner).__name__}: return a metadist.algorithms.Learner, or None."
                )
            if learner is not None:
                return learner
        return self.learner

    @property
    def split_descriptions(self) -> dict[str, str]:
        """Descriptions of validation and test, by split, if they measure different things."""
        return getattr(self.tasks, "split_descriptions", {})

    def throughput(self, tasks: int, seconds: float) -> dict[str, float]:
        """Tasks per second, and samples per second if tasks are micro-batches."""
        metrics = {"tasks_per_second": tasks / seconds}
        if samples := getattr(self.tasks, "micro_batch_size", 0):
            metrics["samples_per_second"] = samples * tasks / seconds
        return metrics


def training_keys(experiment: Experiment, iteration: int) -> Tensor:
    """The keys of an iteration's meta-batch, shape (meta_batch_size, 4)."""
    tasks = range(experiment.trainer_config.meta_batch_size)
    return task_keys(experiment.seed, "train", iteration, tasks)


def shard_sizes(experiment: Experiment) -> list[float]:
    """The sizes of the shards of a meta-batch, which do not depend on the tasks."""
    batch = MetaBatch(training_keys(experiment, 1))
    shards = as_shards(experiment.strategy.partitioner(experiment.learner, batch))
    return [shard.size for shard in shards]


def evaluation_keys(experiment: Experiment, split: str, tasks: range) -> Tensor:
    """The keys of some tasks of every evaluation of a split, shape (tasks, 4)."""
    return task_keys(experiment.trainer_config.eval_seed, split, 0, tasks)


def make_batch(experiment: Experiment, keys: Tensor) -> MetaBatch:
    """The batch that is sent to workers for keys of shape (tasks, 4): the keys, or the tasks.

    Raises:
        UserError: the tasks are to be sent, and their shapes differ.
    """
    if not experiment.trainer_config.send_tasks:
        return MetaBatch(keys)
    episodes = [experiment.tasks.sample(key) for key in keys]
    if any(episode.shapes != episodes[0].shapes for episode in episodes):
        raise UserError(
            "trainer.send_tasks=true needs tasks of equal shapes, but the tasks of a batch have "
            "different shapes: leave it out, so that each worker samples its own tasks."
        )
    return MetaBatch(keys, stack_episodes(episodes))
