"""Checks before training: sizes, the partitioner, and one training and one test task."""

import contextlib
import itertools
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils.parametrize import is_parametrized

from metadist.algorithms import Learner, Supervised, TaskResult
from metadist.distributed import get_rank
from metadist.distributed.modules import unpicklable_part
from metadist.distributed.worker_local import WorkerLocal, delete_worker_local
from metadist.errors import UserError, one_line, user_frame
from metadist.metrics import RESERVED_METRICS, task_metric
from metadist.tasks import SPLITS, FewShotTasks, SupervisedTasks, TaskDistribution, task_keys
from metadist.training.batching_check import check_batched_tasks, log_unbatched
from metadist.training.episode_check import ALGORITHMS, check_episodes
from metadist.training.experiment import TrainerConfig
from metadist.training.explained_errors import raise_explained
from metadist.training.partition_check import check_partition
from metadist.training.precision import Precision
from metadist.training.strategies.strategy import Strategy
from metadist.training.task_mapper import MetaBatch, TaskMapper

_log = logging.getLogger(__name__)


def check_before_training(
    strategy: Strategy,
    tasks: TaskDistribution,
    learner: Learner,
    trainer: TrainerConfig,
    precision: Precision,
) -> None:
    """Check that the parts of a run fit each other. Every rank calls it.

    Args:
        strategy: the run's strategy.
        tasks: this rank's tasks.
        learner: the learner, built for the tasks.
        trainer: the trainer's configuration.
        precision: the precision of the tasks' computation.

    Raises:
        UserError: the parts do not fit; see the checks below.
        RuntimeError: the user's own code raised an error; see `run_sanity_check`.
    """
    _check_compilation(strategy, trainer)
    _check_picklable(strategy, learner)
    check_partition(strategy, learner, trainer.meta_batch_size)
    _check_protocols(tasks, learner)
    _check_supervised(tasks, learner)
    _check_ways(tasks, learner)
    run_sanity_check(tasks, learner, precision)
    if strategy.sums_on_workers:
        log_unbatched(learner)
    counts = {"train": trainer.meta_batch_size, "test": trainer.eval_tasks}
    chunk_size = trainer.task_chunk_size
    for split in _checked_splits(tasks):
        try:
            check_batched_tasks(tasks, learner, split, precision, chunk_size, counts[split])
        except UserError:
            raise
        except Exception as error:
            raise_explained(error, tasks, learner, split, f"a batch of two {split} tasks")


def _check_compilation(strategy: Strategy, trainer: TrainerConfig) -> None:
    """Refuse `trainer.compile=true` for a strategy that computes one task at a time."""
    if trainer.compile is True and not strategy.sums_on_workers:
        raise UserError(
            f"trainer.compile=true does not apply to strategy={strategy.name} with these options, "
            "which computes one task at a time: leave it out, or take a linear reducer with "
            "strategy.gradient=worker or strategy.engine=sum."
        )


def _log_unregistered_modules(learner: Learner) -> None:
    """Warn of modules in plain lists and dictionaries, which PyTorch does not register."""
    registered = set(learner.modules())
    for module in learner.modules() if get_rank() == 0 else ():
        for name, value in vars(module).items():
            items = value.values() if isinstance(value, dict) else value
            if isinstance(value, list | tuple | dict) and any(
                isinstance(item, nn.Module) and item not in registered for item in items
            ):
                _log.warning(
                    "%s.%s holds modules that are not registered, so that their parameters are "
                    "neither trained nor saved: put those to train into an nn.ModuleList or "
                    "nn.ModuleDict",
                    *(type(module).__name__, name),
                )


def _check_supervised(tasks: TaskDistribution, learner: Learner) -> None:
    """Require a supervised algorithm for supervised tasks; the user's own algorithms pass."""
    few_shot = type(learner).__module__.startswith(ALGORITHMS) and not isinstance(
        learner, Supervised
    )
    if isinstance(tasks, SupervisedTasks) and few_shot:
        raise UserError(
            f"{learner.algorithm_name} adapts to few-shot tasks, and supervised training gives it "
            "batches of all classes: take algorithm=supervised, or start experiments/maml.py."
        )


def _check_protocols(tasks: TaskDistribution, learner: Learner) -> None:
    """Require protocols that the checkpoints and `results.json` can hold."""
    own: Any = tasks.dataset if isinstance(tasks, FewShotTasks | SupervisedTasks) else tasks
    for source in (own, learner):
        protocol: Any = source.protocol()
        if not isinstance(protocol, Mapping) or not all(isinstance(key, str) for key in protocol):
            raise UserError(
                f"{type(source).__name__}.protocol returned {protocol!r}: return a dict whose keys "
                "are strings, with what must be equal for results to be comparable."
            )


def _check_ways(tasks: TaskDistribution, learner: Learner) -> None:
    """Require that training uses all of the learner's outputs."""
    if not isinstance(tasks, FewShotTasks) or tasks.regression or not learner.outputs_are_classes:
        return
    untrained = tasks.ways - tasks.train_ways
    if untrained > 0:
        raise UserError(
            f"task.train_ways={tasks.train_ways} does not fit: test tasks have task.ways="
            f"{tasks.ways}, and {type(learner).__name__} would not train {untrained} of its "
            f"outputs: leave task.train_ways out, or set it to at least {tasks.ways}."
        )


def _check_picklable(strategy: Strategy, learner: Learner) -> None:
    """Require that the learner can be pickled, if it is sent to workers.

    PyTorch does not pickle parametrizations, nor Python local functions, such as hooks.
    """
    if strategy.every_rank_drives:
        return
    names = [name for name, module in learner.named_modules() if is_parametrized(module)]
    if names:
        raise UserError(
            f"strategy={strategy.name} sends the model to the workers, and PyTorch does not pickle "
            f"parametrizations such as weight_norm ({names[0]}): take strategy=allreduce."
        )
    if part := unpicklable_part(learner):
        raise UserError(
            f"strategy={strategy.name} sends the model to the workers, and a part of it cannot be "
            f"pickled ({part}): define functions and classes at the top level of a module, or take "
            "strategy=allreduce."
        )


def run_sanity_check(
    tasks: TaskDistribution, learner: Learner, precision: Precision = "float32"
) -> None:
    """Run one training and one test task, if they are sampled. Every rank calls it.

    Args:
        tasks: this rank's tasks.
        learner: the learner, on its device; its parameters and buffers are not changed.
        precision: the precision of the tasks' computation.

    Raises:
        UserError: model, algorithm and task do not fit together, the learner returns something
            other than a result, or a metric has a reserved name.
        RuntimeError: the user's own code raised an error. The message names the file and line, and
            the traceback is that of the error.
    """
    for parameter_name, parameter in learner.named_parameters():
        if not parameter.isfinite().all():
            raise UserError(
                f"the parameter {parameter_name} is NaN or infinite before training: initialize it."
            )
    _log_unregistered_modules(learner)
    handle = WorkerLocal("sanity check", tasks)
    try:
        for split in _checked_splits(tasks):
            check_episodes(tasks, learner, split)
            _check_task(handle, learner, split, precision)
    finally:
        delete_worker_local(handle.name)


def _checked_splits(tasks: TaskDistribution) -> list[str]:
    """The splits of which a task is run: validation tasks are like test tasks."""
    sampled = getattr(tasks, "sampled_splits", SPLITS)
    return [split for split in ("train", "test") if split in sampled]


def _check_task(tasks: WorkerLocal, learner: Learner, split: str, precision: Precision) -> None:
    """Run a task; check that it does not change the parameters, and check its result."""
    training = split == "train"
    before = [parameter.detach().clone() for parameter in learner.parameters()]
    result, gradients = _run_task(tasks, learner, split, precision)
    if training:
        _check_gradients(gradients, learner)
    if not all(map(torch.equal, before, learner.parameters())):
        raise UserError(
            f"{type(learner).__name__}.forward changed the learner's parameters in a {split} task, "
            "and every task must start from the same ones: adapt clones of them, with "
            "torch.func.functional_call."
        )
    if result.predictions is not None:
        _check_predictions(result.predictions, learner, tasks.value, split)
    _check_metrics(result.metrics, learner, training)


def _run_task(
    tasks: WorkerLocal, learner: Learner, split: str, precision: Precision
) -> tuple[TaskResult, dict[str, Tensor | None]]:
    """The result of a task and, in training, its gradient by each parameter that requires grad."""
    training = split == "train"
    mapper = TaskMapper(tasks, str(next(learner.parameters()).device), precision=precision)
    batch = MetaBatch(task_keys(0, split, 0, range(1)))
    trainable: dict[str, nn.Parameter] = {}
    gradients: Sequence[Tensor | None] = ()
    try:
        with torch.set_grad_enabled(training), _refusing_changed_inputs(learner.model):
            (result,) = mapper.run_each(learner.train(training), batch)
            if training and result.loss.requires_grad:
                trainable = {n: p for n, p in learner.named_parameters() if p.requires_grad}
                gradients = torch.autograd.grad(
                    result.loss, list(trainable.values()), allow_unused=True
                )
    except UserError:
        raise
    except Exception as error:
        in_backward = trainable and not isinstance(error, torch.OutOfMemoryError)
        if in_backward and isinstance(error, RuntimeError) and not user_frame(error):
            raise UserError(
                f"the loss that {type(learner).__name__}.forward returned cannot be differentiated "
                f"({one_line(error)}): do not change tensors in place that the gradient needs, "
                "and give autograd.grad create_graph=True, or retain_graph=True where a graph is "
                "differentiated twice."
            ) from error
        raise_explained(error, tasks.value, learner, split, f"a {split} task")
    return result, dict(zip(trainable, gradients, strict=True))


def _check_gradients(gradients: Mapping[str, Tensor | None], learner: Learner) -> None:
    if all(gradient is None for gradient in gradients.values()):
        raise UserError(
            f"the loss that {type(learner).__name__}.forward returned in training has no gradient: "
            "compute it from the learner's parameters, without a copy of the model, detach() or "
            "torch.no_grad()."
        )
    unused = [name for name, gradient in gradients.items() if gradient is None]
    if unused and get_rank() == 0:
        _log.warning(
            "the loss of a task does not depend on %s: check that forward uses it, or freeze it "
            "with requires_grad_(False)",
            ", ".join(unused),
        )
    if any(gradient is not None and gradient.is_sparse for gradient in gradients.values()):
        raise UserError(
            f"the model {type(learner.model).__name__} has a sparse gradient, and gradients are "
            "summed as dense ones: give its layers sparse=False."
        )


def _check_predictions(
    predictions: Tensor, learner: Learner, tasks: TaskDistribution, split: str
) -> None:
    """Check the shape of a task's predictions, and say if there are more than its classes."""
    name = type(learner).__name__
    queries = len(tasks.sample(task_keys(0, split, 0, range(1))[0]).query.targets)
    if predictions.dim() != 2 or len(predictions) != queries:
        raise UserError(
            f"{name}.forward returned predictions of shape {tuple(predictions.shape)} in "
            f"evaluation: return the logits or values of all queries, shape ({queries}, outputs)."
        )
    classes = learner.outputs_are_classes and not learner.regression and split != "train"
    if classes and predictions.shape[1] > tasks.outputs and get_rank() == 0:
        _log.warning(
            "%s.forward returned %d values for each query, and a task has %d outputs: the loss "
            "also treats the additional values as classes; let the __init__ of %s take outputs, "
            "the width of its last layer",
            *(name, predictions.shape[1], tasks.outputs, type(learner.model).__name__),
        )


@contextlib.contextmanager
def _refusing_changed_inputs(model: nn.Module) -> Iterator[None]:
    """Raise a UserError if the model changes its inputs in place: inner steps read them again."""
    given: list[list[tuple[Tensor, Tensor]]] = []

    def before(module: nn.Module, inputs: tuple) -> None:
        if module is model:
            tensors = [x for x in inputs if isinstance(x, Tensor) and x.grad_fn is None]
            given.append([(tensor, tensor.clone()) for tensor in tensors])

    def after(module: nn.Module, inputs: tuple, output: Any) -> None:
        if module is model and not all(itertools.starmap(torch.equal, given.pop())):
            raise UserError(
                f"{type(model).__name__}.forward changes its inputs in place, and the inner steps "
                "and the evaluation read them again: compute new tensors, without methods such as "
                "mul_() and inplace=True on the inputs."
            )

    # Of all modules, since a scripted model has no hooks of its own.
    hooks = [register_module_forward_pre_hook(before), register_module_forward_hook(after)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _check_metrics(metrics: Mapping[str, Tensor], learner: Learner, training: bool) -> None:
    name, metric = type(learner).__name__, task_metric(learner.regression)
    for key in metrics:
        if not isinstance(key, str):
            raise UserError(f"{name}.forward returned a metric named {key!r}: give it a text.")
    if taken := sorted(metrics.keys() & RESERVED_METRICS - {metric}):
        raise UserError(
            f'{name}.forward returned the metric "{taken[0]}", a name that metrics of '
            "metadist have: give it another name."
        )
    if not training and metric not in metrics:
        raise UserError(
            f"{name}.forward returned the metrics {sorted(metrics)} in evaluation, "
            f'which lack "{metric}": return '
            "TaskResult(loss, self.metrics(predictions, targets), predictions)."
        )
