"""What a run is made of, and how long it takes."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
from annotated_types import Ge

from metadist.algorithms import Learner
from metadist.tasks import TaskDistribution
from metadist.tracking import Tracker
from metadist.training.mappers import EvaluateTasks, TrainTasks
from metadist.training.strategies import Strategy


@dataclass(frozen=True)
class Trainer:
    """How long to train, and what to do when.

    Args:
        iterations: outer steps in all, those before a resume counted in.
        meta_batch_size: tasks an outer step.
        eval_every: outer steps between validations; 0 for none.
        validation_tasks: tasks of a validation, the same ones each time.
        eval_tasks: tasks of the test after training.
        checkpoint_every: outer steps between checkpoints; 0 for one at the end only.
        keep_checkpoints: how many of the newest checkpoints to keep.
        send_tasks: rank zero draws the tasks and sends their tensors, because only it holds the
            dataset; by default keys travel and every worker draws its own tasks.
    """

    iterations: Annotated[int, Ge(1)] = 1000
    meta_batch_size: Annotated[int, Ge(1)] = 32
    eval_every: Annotated[int, Ge(0)] = 200
    validation_tasks: Annotated[int, Ge(1)] = 100
    eval_tasks: Annotated[int, Ge(1)] = 600
    checkpoint_every: Annotated[int, Ge(0)] = 200
    keep_checkpoints: Annotated[int, Ge(1)] = 2
    send_tasks: bool = False


@dataclass
class Progress:
    """What changes as a run goes on, beside parameters and optimizer.

    Attributes:
        iteration: finished outer steps.
        best: the best validation so far, {} before the first: "iteration" and the figure's mean.
        validation: the newest validation's figure, {} before the first.
        train_loss: of the last outer step.
        train_seconds: spent in outer steps, over all parts of a resumed run.
    """

    iteration: int = 0
    best: dict[str, float] = field(default_factory=dict)
    validation: dict[str, float] = field(default_factory=dict)
    train_loss: float = float("nan")
    train_seconds: float = 0.0


@dataclass
class Experiment:
    """Everything that a run needs, built; one on each rank.

    Attributes:
        name: of the experiment, as in its configuration's file.
        headline: one line for people.
        directory: the run's directory.
        configuration: the resolved configuration, plain containers.
        seed: keys the tasks and the initial parameters.
        trainer: how long and how often.
        tasks: this rank's tasks.
        learner: model and algorithm.
        optimizer: of the learner's parameters.
        strategy: how a meta-batch is carried out.
        train_mapper: what a worker does in training.
        evaluate_mapper: what a worker does in evaluation.
        tracker: where records go; a mute one except on rank zero.
        resume: None, "auto", or a checkpoint's path.
        progress: how far the run has come; `resume.restore` sets it.
    """

    name: str
    headline: str
    directory: Path
    configuration: dict[str, Any]
    seed: int
    trainer: Trainer
    tasks: TaskDistribution
    learner: Learner
    optimizer: torch.optim.Optimizer
    strategy: Strategy
    train_mapper: TrainTasks
    evaluate_mapper: EvaluateTasks
    tracker: Tracker
    resume: str | None = None
    progress: Progress = field(default_factory=Progress)
