"""Checks before training: sizes that do not fit, the partitioner, a training and a test task."""

import hashlib
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from metadist.algorithms import Learner, Supervised
from metadist.distributed import get_worker_id, get_world_size
from metadist.distributed.partitioners import Partitioner, as_shards
from metadist.distributed.worker_local import WorkerLocal, delete_worker_local
from metadist.errors import UserError, first_line, user_frame
from metadist.metrics import RESERVED_METRICS, task_metric
from metadist.tasks import FewShotTasks, SupervisedTasks, TaskDistribution, task_keys
from metadist.training.precision import Precision
from metadist.training.signals import raise_if_interrupted
from metadist.training.strategies import Strategy
from metadist.training.task_mapper import MetaBatch, TaskMapper

_ALGORITHMS = "metadist.algorithms."
"""Where a method that a subclass must implement raises NotImplementedError."""


def check_before_training(
    strategy: Strategy,
    tasks: TaskDistribution,
    learner: Learner,
    meta_batch_size: int,
    precision: Precision,
) -> None:
    """Check that the parts of a run fit each other. Every rank calls it.

    Args:
        strategy: of the run.
        tasks: of this rank.
        learner: built for the tasks.
        meta_batch_size: tasks of an outer step.
        precision: of the tasks' computation.

    Raises:
        UserError: they do not; see the checks below.
    """
    _check_parametrizations(strategy, learner)
    _check_partition(strategy, learner, meta_batch_size)
    _check_supervised(tasks, learner)
    _check_ways(tasks, learner)
    _check_batch_norm(tasks, learner)
    run_sanity_check(tasks, learner, precision)


def _check_supervised(tasks: TaskDistribution, learner: Learner) -> None:
    """Supervised training needs an algorithm for it. Algorithms of the user's own pass."""
    few_shot = type(learner).__module__.startswith(_ALGORITHMS) and not isinstance(
        learner, Supervised
    )
    if isinstance(tasks, SupervisedTasks) and few_shot:
        raise UserError(
            f"{learner.algorithm_name} adapts to few-shot tasks, and supervised training gives it "
            "batches of all classes: take algorithm=supervised, or start experiments/maml.py."
        )


def _check_ways(tasks: TaskDistribution, learner: Learner) -> None:
    """Training uses all of the learner's outputs."""
    if not isinstance(tasks, FewShotTasks) or tasks.regression or not learner.outputs_are_classes:
        return
    untrained = tasks.ways - tasks.train_ways
    if untrained > 0:
        raise UserError(
            f"task.train_ways={tasks.train_ways} does not fit: test tasks have task.ways="
            f"{tasks.ways}, and {type(learner).__name__} would not train {untrained} of its "
            f"outputs: leave task.train_ways out, or set it to at least {tasks.ways}."
        )


def _check_batch_norm(tasks: TaskDistribution, learner: Learner) -> None:
    """No batch norm of vectors is given a single example, which has no variance."""
    if not isinstance(tasks, FewShotTasks):
        return
    ways = 1 if tasks.regression else tasks.ways
    train_ways = 1 if tasks.regression else tasks.train_ways
    fewest = min(ways * tasks.shots, train_ways * tasks.train_shots)
    if fewest == 1 and any(isinstance(each, nn.BatchNorm1d) for each in learner.modules()):
        raise UserError(
            "batch norm cannot normalize a single example, and a task has one support example: "
            "set model.batch_norm=false, or ask for more, as in task.shots=10."
        )


def _check_parametrizations(strategy: Strategy, learner: Learner) -> None:
    """A learner that is sent to other workers has no parametrizations, which PyTorch does not
    pickle.
    """
    if strategy.every_rank_drives:
        return
    found = [name for name, each in learner.named_modules() if is_parametrized(each)]
    if found:
        raise UserError(
            f"strategy={strategy.name} sends the model to the workers, and PyTorch does not pickle "
            f"parametrizations such as weight_norm ({found[0]}): take strategy=allreduce."
        )


def partition_digest(strategy: Strategy, learner: Learner, meta_batch_size: int) -> str:
    """A digest of the shards of a meta-batch, which every rank that partitions must have equal.

    Args:
        strategy: whose partitioner it is.
        learner: the partitioner's first argument.
        meta_batch_size: the number of tasks.
    """
    keys = task_keys(0, "train", 1, range(meta_batch_size))
    shards = _shards_of(strategy.partitioner, learner, keys)
    return hashlib.sha256(repr(shards).encode()).hexdigest()


def _check_partition(strategy: Strategy, learner: Learner, meta_batch_size: int) -> None:
    """The partitioner names existing workers, and gives each task to one shard; where every rank
    partitions, it gives the same shards again.
    """
    keys = task_keys(0, "train", 1, range(meta_batch_size))
    shards = _shards_of(strategy.partitioner, learner, keys)
    indices = [index for _, of_shard in shards for index in of_shard]
    if sorted(indices) != keys[:, 3].tolist():
        raise UserError(
            f"the partitioner's shards have {len(indices)} tasks, {len(set(indices))} of them "
            f"different, of a meta-batch of {len(keys)}: give each task to one shard."
        )
    on_every_rank = strategy.every_rank_drives and get_world_size() > 1
    if on_every_rank and _shards_of(strategy.partitioner, learner, keys) != shards:
        raise UserError(
            "the partitioner gives other shards when it is called again, and with "
            f"strategy={strategy.name} every rank calls it: let the shards depend on the tasks and "
            "the number of workers alone, or take strategy=rpc."
        )


def _shards_of(
    partitioner: Partitioner, learner: Learner, keys: Tensor
) -> list[tuple[int, list[int]]]:
    """The worker and the indices of the tasks of each shard."""
    found = []
    for shard in as_shards(partitioner(learner, MetaBatch(keys))):
        worker, args, kwargs = shard
        batches = [each for each in (*args, *kwargs.values()) if isinstance(each, MetaBatch)]
        if not any(each is learner for each in (*args, *kwargs.values())):
            raise UserError(
                f"the partitioner gives worker {worker} a shard without the learner that it was "
                "given: pass it on as it is; a copy would not be trained."
            )
        if len(batches) != 1:
            raise UserError(
                "a shard of the partitioner has no MetaBatch among its arguments, but "
                f"{', '.join(type(each).__name__ for each in (*args, *kwargs.values()))}: give it "
                "(learner, tasks.select(slice)) and size=tasks.size."
            )
        if batches[0].keys.shape[-1] != keys.shape[-1]:
            raise UserError(
                "the partitioner splits the keys of single tasks: let it split the first "
                "dimension, as with partition.dim=0."
            )
        tasks = batches[0].keys.reshape(-1, keys.shape[1])[:, 3].tolist()
        if not tasks:
            raise UserError(
                f"the partitioner gives worker {worker} a shard without tasks: leave it out."
            )
        if shard.size != len(tasks):
            raise UserError(
                f"the partitioner gives a shard of {len(tasks)} tasks the size {shard.size:g}, its "
                "weight in the mean: give Shard(worker, args, size=tasks.size)."
            )
        found.append((get_worker_id(worker), tasks))
    return found


def run_sanity_check(
    tasks: TaskDistribution, learner: Learner, precision: Precision = "float32"
) -> None:
    """Run one training and one test task. Every rank calls it.

    Args:
        tasks: of this rank.
        learner: on its device; its parameters and buffers stay as they are.
        precision: of the computation.

    Raises:
        UserError: model, algorithm and task do not fit together, or the learner returns something
            else than a result, or a metric of a reserved name.
        RuntimeError: the user's own code raised an error. The message names the file and line,
            and the error is the cause.
    """
    handle = WorkerLocal("sanity check", tasks)
    try:
        for split in ("train", "test"):
            _check_episode(tasks, learner, split)
            _check_task(handle, learner, split, precision)
    finally:
        delete_worker_local(handle.name)


def _check_task(tasks: WorkerLocal, learner: Learner, split: str, precision: Precision) -> None:
    """Run a task; check that it leaves the parameters as they are, and what the learner returns."""
    training, name = split == "train", type(learner).__name__
    mapper = TaskMapper(tasks, str(next(learner.parameters()).device), precision=precision)
    batch = MetaBatch(task_keys(0, split, 0, range(1)))
    before = [each.detach().clone() for each in learner.parameters()]
    gradients: tuple[Tensor | None, ...] = ()
    try:
        with torch.set_grad_enabled(training):
            (result,) = mapper.run_each(learner.train(training), batch)
            if training and result.loss.requires_grad:
                trainable = [each for each in learner.parameters() if each.requires_grad]
                gradients = torch.autograd.grad(result.loss, trainable, allow_unused=True)
    except UserError:
        raise
    except Exception as error:
        raise_if_interrupted(error)
        if (explained := _explain(error, tasks.value, learner, split)) is None:
            raise
        raise explained from error
    if training and all(gradient is None for gradient in gradients):
        raise UserError(
            f"the loss that {name}.forward returned in training has no gradient: compute it "
            "from the learner's parameters, without a copy of the model, detach() or "
            "torch.no_grad()."
        )
    if not all(map(torch.equal, before, learner.parameters())):
        raise UserError(
            f"{name}.forward changed the learner's parameters in a {split} task, and every task "
            "must start from the same ones: adapt clones of them, with torch.func.functional_call."
        )
    if (predictions := result.predictions) is not None:
        queries = len(tasks.value.sample(batch.keys[0]).query.targets)
        if predictions.dim() != 2 or len(predictions) != queries:
            raise UserError(
                f"{name}.forward returned predictions of shape {tuple(predictions.shape)} in "
                "evaluation: return the logits or values of all queries, shape "
                f"({queries}, outputs)."
            )
    _check_metrics(result.metrics, learner, training)


def _explain(
    error: Exception, tasks: TaskDistribution, learner: Learner, split: str
) -> Exception | None:
    """What to raise in the place of an error in a task; None to raise it as it is."""
    frame, _ = list(traceback.walk_tb(error.__traceback__))[-1]
    raised_in, method = str(frame.f_globals.get("__name__")), frame.f_code.co_name
    if isinstance(error, NotImplementedError) and raised_in.startswith(_ALGORITHMS):
        return UserError(
            f"{type(learner).__name__} has no {method} of its own: implement it, as "
            "described in metadist.algorithms.Learner."
        )
    if location := user_frame(error):
        hint = f"in a {split} task"
        if split != "train" and "does not require grad" in str(error):
            hint += ", where gradients are disabled: adapt within torch.enable_grad()"
        return RuntimeError(f"{location}: {type(error).__name__}: {error} ({hint})")
    if not isinstance(error, ValueError | RuntimeError | IndexError):
        return None
    return UserError(
        f"the model and the algorithm cannot process a {split} task of this shape "
        f"({first_line(error)}){_model_output(learner, tasks, split)}: "
        "change model, algorithm or task."
    )


def _check_metrics(metrics: Mapping[str, Tensor], learner: Learner, training: bool) -> None:
    name, metric = type(learner).__name__, task_metric(learner.regression)
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


def _check_episode(tasks: TaskDistribution, learner: Learner, split: str) -> None:
    """That a task's tensors are of the right types, and the same for equal keys.

    Tasks of the user's own may have other fields beside support and query, or none of the two.
    """
    key = task_keys(0, split, 0, range(1))[0]
    found, again = tasks.sample(key), tasks.sample(key)
    name = type(getattr(tasks, "dataset", tasks)).__name__
    if isinstance(found, tuple | list) and not hasattr(found, "query"):
        raise UserError(
            f"{name} gives a {type(found).__name__} as a task: return metadist.tasks.Episode("
            "Examples(inputs, targets), Examples(inputs, targets))."
        )
    for part in ("support", "query"):
        for field in ("inputs", "targets"):
            value = getattr(getattr(found, part, None), field, None)
            if value is None:
                continue
            what = f"{name} gives {part}.{field}"
            _check_values(value, what, list(learner.parameters()))
            if field == "targets" and not learner.regression:
                _check_classes(value, what, tasks.outputs if learner.outputs_are_classes else None)
            if not torch.equal(value, getattr(getattr(again, part), field)):
                raise UserError(
                    f"{name} gives two different tasks for one key: draw every random number from "
                    "the generator that it is given."
                )


def _check_values(value: Any, what: str, parameters: Sequence[Tensor]) -> None:
    """That a value is a tensor of numbers; real ones are of the type of a parameter."""
    if not isinstance(value, Tensor):
        raise UserError(
            f"{what} of type {type(value).__name__}: give a tensor, as by torch.from_numpy."
        )
    if value.is_floating_point() and value.dtype not in {each.dtype for each in parameters}:
        raise UserError(
            f"{what} of {value.dtype}, and the model's parameters are {parameters[0].dtype}: "
            "convert them, as by .float()."
        )
    if value.is_floating_point() and value.isnan().any():
        raise UserError(f"{what} with NaN: remove or replace it in the data.")


def _check_classes(targets: Tensor, what: str, outputs: int | None) -> None:
    """That targets are class indices, below the number of outputs where they are classes."""
    if targets.dtype != torch.int64:
        raise UserError(
            f"{what} of {targets.dtype}: give class indices of torch.int64, as by .long()."
        )
    if not targets.numel():
        return
    low, high = int(targets.min()), int(targets.max())
    if outputs is not None and not 0 <= low <= high < outputs:
        raise UserError(
            f"{what} from {low} to {high}, and a task has {outputs} outputs: number its classes "
            f"from 0 to {outputs - 1}."
        )
    if low < 0:
        raise UserError(f"{what} from {low} to {high}: number its classes from 0.")


def _model_output(learner: Learner, tasks: TaskDistribution, split: str) -> str:
    """What the model returns for the queries of a task; "" if it raises an error."""
    inputs = tasks.sample(task_keys(0, split, 0, range(1))[0]).query.inputs
    try:
        with torch.no_grad():
            found = learner.model(inputs.to(next(learner.parameters()).device))
    except Exception:
        return ""
    returned = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
    return (
        f"; for inputs of shape {tuple(inputs.shape)} the model returned {returned}, and the task "
        f"has {tasks.outputs} outputs"
    )
