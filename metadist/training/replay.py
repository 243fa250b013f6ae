"""Replay of one task from its key: its loss, its gradients, its plot."""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from metadist.errors import UserError
from metadist.reports import REPLAY_DIRECTORY, read_config
from metadist.tasks import SPLITS
from metadist.training.checkpoints import Checkpoints, read_checkpoint
from metadist.training.experiment import Experiment
from metadist.training.initialization import initialize
from metadist.training.non_finite import format_key, task_gradient
from metadist.training.resume import restore_from
from metadist.training.run_plots import plot_task
from metadist.training.saved_state import load_learner_state, tested_checkpoint
from metadist.training.task_mapper import TASK_INDEX, MetaBatch
from metadist.training.trainer import Trainer


class Replay(NamedTuple):
    """The result of a replay.

    Attributes:
        key: the task's key as text.
        start: the source of the learner's state.
        outer_steps: number of outer steps that were repeated from there.
        loss: the task's loss.
        gradients: the norm of the loss's gradient with respect to each parameter; None where the
            loss does not depend on it; empty in evaluation.
        metrics: the task's metrics after adaptation, in evaluation; empty in training.
        plot: plot of the task; None if it cannot be plotted.
        callbacks: the user's own callbacks of the run. They may have changed the state that the
            task started from, and were not called in the replay.
    """

    key: str
    start: str
    outer_steps: int
    loss: float
    gradients: dict[str, float | None]
    metrics: dict[str, float]
    plot: Path | None
    callbacks: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """The result as text lines."""
        steps = f", and {self.outer_steps} outer steps from there" if self.outer_steps else ""
        if self.callbacks:
            names = ", ".join(f"callbacks.{name}" for name in self.callbacks)
            advice = "give a --checkpoint if these change the training"
            if not self.outer_steps:  # no checkpoint is older than the first iteration
                advice = "these may have changed the initial state"
            steps += f" without {names}: {advice}"
        lines = [f"task {self.key}, from {self.start}{steps}", f"loss {self.loss!r}"]
        lines += [f"{name} {value!r}" for name, value in self.metrics.items()]
        width = max((len(name) for name in self.gradients), default=0)
        for name, norm in self.gradients.items():
            value = "none" if norm is None else f"{norm:.6g}"
            mark = "" if norm is None or math.isfinite(norm) else "  <- not finite"
            lines.append(f"gradient norm  {name:<{width}}  {value}{mark}")
        return [*lines, f"plotted in {self.plot}"] if self.plot else lines


def parse_key(text: str) -> Tensor:
    """Parse a key "seed,split,iteration,index", with the split as a name or a number.

    Returns:
        The key, int64 of shape (4,).

    Raises:
        UserError: the text is not a key.
    """
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 4 and parts[1] in SPLITS:
        parts[1] = str(SPLITS.index(parts[1]))
    numbers = [int(part) for part in parts if part.isdecimal()]
    if (
        len(parts) != 4
        or len(numbers) != 4
        or numbers[1] >= len(SPLITS)
        or max(numbers) > torch.iinfo(torch.int64).max
    ):
        raise UserError(
            f"--key {text} is no task's key: give seed,split,iteration,index, "
            "as in --key 0,train,17,3."
        )
    return torch.tensor(numbers, dtype=torch.int64)


def replay(experiment: Experiment, key: Tensor, checkpoint: Path | None = None) -> Replay:
    """Compute one task as the run did: on CPUs with the same bits, unless the run was compiled or
    used distributed autograd or the engine "ddp".

    The learner's state before the key's iteration comes from the newest checkpoint until then,
    from `init_from`, or from the seed; the outer steps in between are repeated, without callbacks.
    A test task is evaluated with the state that the run tested, a validation task with the state of
    the newest checkpoint.

    Args:
        experiment: the run's experiment, newly built, with strategy=local.
        key: the task's key, shape (4,).
        checkpoint: file of the state to use instead, without further outer steps. Default: none.

    Raises:
        UserError: the run has no such task, or the checkpoint cannot be read.
    """
    split, iteration = _check_key(experiment, key)
    training, config = split == "train", experiment.trainer_config
    done = iteration - 1 if training else config.iterations
    start = _restore(experiment, split, done, checkpoint)
    replayed = training and checkpoint is None
    steps = range(experiment.state.iteration + 1, done + 1) if replayed else ()
    if config.on_non_finite == "stop":  # the run's steps were finite, or skipped after a resume
        experiment.trainer_config = replace(config, on_non_finite="skip")
    trainer = Trainer(experiment)
    for step in steps:
        trainer.train_step(step)
    gradients: dict[str, float | None] = {}
    metrics: dict[str, float] = {}
    if training:
        loss, tensors = task_gradient(experiment.train_mapper, experiment.learner, MetaBatch(key))
        gradients = {n: None if g is None else g.double().norm().item() for n, g in tensors.items()}
    else:
        evaluated = experiment.evaluate_mapper(experiment.learner, MetaBatch(key))
        loss = evaluated["loss"]
        metrics = {n: v.item() for n, v in evaluated.items() if n not in ("loss", TASK_INDEX)}
    name = format_key(key).replace(",", "-")
    plot = plot_task(experiment.directory / REPLAY_DIRECTORY / f"task-{name}.png", experiment, key)
    uncalled = replayed and (steps or not done)  # the first iteration follows `on_train_start`
    callbacks = _own_callbacks(experiment.directory) if uncalled else ()
    return Replay(
        format_key(key), start, len(steps), loss.item(), gradients, metrics, plot, callbacks
    )


def _own_callbacks(run: Path) -> tuple[str, ...]:
    """The names of a run's callbacks that are not metadist's; those do not change training."""
    nodes = read_config(run).get("callbacks") or {}
    targets = {name: str((node or {}).get("_target_")) for name, node in nodes.items()}
    return tuple(name for name, target in targets.items() if not target.startswith("metadist."))


def _check_key(experiment: Experiment, key: Tensor) -> tuple[str, int]:
    """Check that a key is of one of the run's tasks; return its split and iteration."""
    seed, number, iteration, index = key.tolist()
    split, config = SPLITS[number], experiment.trainer_config
    training = split == "train"
    expected = experiment.seed if training else config.eval_seed
    if seed != expected:
        raise UserError(
            f"the key has seed {seed} and the {split} tasks of the run in {experiment.directory} "
            f"have {expected}."
        )
    tasks = {
        "train": config.meta_batch_size,
        "validation": config.validation_tasks,
        "test": config.eval_tasks,
    }[split]
    first, last = (1, config.iterations) if training else (0, 0)
    iterations = f"iterations {first} to {last}" if training else "iteration 0"
    if first > last:
        raise UserError(f"the run in {experiment.directory} has no training tasks: it only tests.")
    if not first <= iteration <= last or index >= tasks:
        raise UserError(
            f"the run in {experiment.directory} has no task {format_key(key)}: its {split} tasks "
            f"have {iterations} and indices 0 to {tasks - 1}."
        )
    return split, iteration


def _restore(experiment: Experiment, split: str, done: int, checkpoint: Path | None) -> str:
    """Restore the state from which a task is replayed.

    Args:
        experiment: the run's experiment, at iteration 0.
        split: the task's split.
        done: number of outer steps that the run had taken.
        checkpoint: the file to take the state from; None for the run's.

    Returns:
        The source of the state, as text.
    """
    saved = Checkpoints(experiment.directory)
    path = checkpoint or _newest_until(saved, done)
    if path is not None:
        if checkpoint is None and split == "test":
            path, contents = tested_checkpoint(experiment.directory)
        else:
            contents = read_checkpoint(path)
        _require_reducer(experiment, contents)
        restore_from(experiment, path, contents)
        if split != "train":
            load_learner_state(experiment.learner, contents)
        return str(path)
    init_from = experiment.configuration.get("init_from")
    if init_from is None:
        return "the seed"
    initialize(experiment.learner, str(init_from))
    return str(init_from)


def _require_reducer(experiment: Experiment, contents: Mapping[str, Any]) -> None:
    """Check that the experiment was loaded with the run's reducer, which may be the user's own."""
    saved_target, target = (
        ((configuration or {}).get("reducer") or {}).get("_target_")
        for configuration in (contents.get("configuration"), experiment.configuration)
    )
    if saved_target != target:
        raise UserError(
            f"reducer._target_={saved_target} is needed to replay outer steps and is code that "
            "metadist does not know: if it gives a metadist.distributed.reducers.LinearReducer, "
            "and you trust it, load the run with trust_code=True or --trust-code."
        )


def _newest_until(saved: Checkpoints, iteration: int) -> Path | None:
    checkpoints = saved.iterations() + saved.bests()
    return max((c for c in checkpoints if c[0] <= iteration), default=(0, None))[1]
