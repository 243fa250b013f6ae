"""The experiment that a configuration describes."""

import difflib
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from metadist.algorithms import Learner
from metadist.config.nodes import build
from metadist.config.secrets import without_secrets
from metadist.distributed import get_rank, get_worker_id, get_world_size
from metadist.distributed.job import current_job
from metadist.distributed.residents import Resident
from metadist.distributed.shards import as_shards
from metadist.errors import UserError
from metadist.loggers import JsonlLogger, Logger, LoggerCollection
from metadist.tasks import FewShotTasks, TaskDistribution, task_keys
from metadist.training import (
    EvaluateTasks,
    Experiment,
    MetaBatch,
    Strategy,
    TaskMapper,
    Trainer,
    TrainTasks,
    resolve_device,
    restore,
)
from metadist.training.memory import keep_freed_memory


def build_experiment(configuration: DictConfig, directory: Path, name: str) -> Experiment:
    """Build everything that a run needs, ready to go on. Every rank calls it.

    Args:
        configuration: composed from `conf/maml.yaml` or `conf/ddp.yaml`.
        directory: the run's directory.
        name: the experiment's name.

    Raises:
        UserError: anything in the configuration that does not fit, or a checkpoint.
    """
    experiment = assemble_experiment(configuration, directory, name)
    restore(experiment)
    return experiment


def assemble_experiment(configuration: DictConfig, directory: Path, name: str) -> Experiment:
    """The same without looking at the run's directory: as a run begins. Every rank calls it.

    Args: as of `build_experiment`.
    """
    cfg = configuration
    _refuse_strangers(cfg)
    seed = _whole_number(cfg, "seed", 0)
    torch.set_num_threads(_whole_number(cfg, "threads", 1, 4096))
    keep_freed_memory()
    trainer: Trainer = build(cfg.trainer, "trainer")
    strategy = _strategy(cfg)
    device = resolve_device(str(cfg.device))
    dataset = build(cfg.dataset, "dataset")
    tasks: TaskDistribution = build(cfg.task, "task", dataset=dataset)
    torch.manual_seed(seed)
    model = build(cfg.model, "model", input_shape=tasks.input_shape, outputs=tasks.outputs)
    learner: Learner = build(cfg.algorithm, "algorithm", model=model, regression=tasks.regression)
    learner.to(device if strategy.home == "device" else "cpu")
    optimizer = build(cfg.optimizer, "optimizer", params=learner.parameters())
    _rehearse_schedule(cfg.scheduler, optimizer)
    scheduler = build(cfg.scheduler, "scheduler", optimizer=optimizer)
    _check_partition(strategy, learner, trainer)
    _check_ways(tasks, learner)
    _rehearse(tasks, learner)
    # Every rank builds a job's experiments in the same order, so the names agree.
    resident = Resident(current_job().new_name("tasks"), tasks)
    return Experiment(
        name=name,
        headline=_headline(tasks, learner, strategy),
        directory=directory,
        configuration=without_secrets(OmegaConf.to_container(cfg, resolve=True)),
        seed=seed,
        trainer=trainer,
        tasks=tasks,
        learner=learner,
        optimizer=optimizer,
        scheduler=scheduler,
        strategy=strategy,
        train_mapper=TrainTasks(resident, str(cfg.device), trainer.tasks_at_once),
        evaluate_mapper=EvaluateTasks(resident, str(cfg.device), trainer.tasks_at_once),
        tracker=_logger(cfg),
        resume=_resume(cfg),
    )


_KEYS = (
    "algorithm",
    "allreduce_engine",
    "dataset",
    "default_partition",
    "device",
    "launcher",
    "logger",
    "model",
    "optimizer",
    "partition",
    "reducer",
    "resume",
    "running_statistics",
    "scheduler",
    "seed",
    "strategy",
    "sweep",
    "task",
    "threads",
    "timeout_seconds",
    "trainer",
)


def _refuse_strangers(cfg: DictConfig) -> None:
    """Hydra takes any key with a plus before it; a misspelt group would go unnoticed."""
    for key in cfg:
        if key not in _KEYS:
            near = difflib.get_close_matches(str(key), [*_KEYS, "experiment"], n=1)
            hint = f"did you mean +{near[0]}=…?" if near else "check its spelling."
            raise UserError(f"{key} is no key or group of the configuration: {hint}")


def _whole_number(cfg: DictConfig, key: str, least: int, most: int = 2**63 - 1) -> int:
    value = cfg[key]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UserError(
            f"{key}={value} does not fit: it must be a whole number from {least} to {most}."
        )
    return value


def _resume(cfg: DictConfig) -> str | None:
    return None if cfg.resume is None else str(cfg.resume)


def _strategy(cfg: DictConfig) -> Strategy:
    # `+partition=…` adds the group: Hydra takes the plus only for one outside the defaults list.
    chosen = "partition" if "partition" in cfg else "default_partition"
    partitioner = build(cfg[chosen], chosen)
    reducer = build(cfg.reducer, "reducer")
    return build(
        cfg.strategy,
        "strategy",
        partitioner=partitioner,
        reducer=reducer,
        timeout_seconds=float(cfg.timeout_seconds),
    )


def _rehearse(tasks: TaskDistribution, learner: Learner) -> None:
    """One task in each mode: a model that cannot do it is found before any work starts."""
    device = next(learner.parameters()).device
    for training, split in ((True, "train"), (False, "test")):
        mapper = TaskMapper(Resident("tasks of a rehearsal", tasks), str(device))
        try:
            mapper.each(learner.train(training), MetaBatch(task_keys(0, split, 0, range(1))))
        except UserError:
            raise
        except (ValueError, RuntimeError, IndexError) as error:
            raise UserError(
                f"the model and the algorithm cannot do a {split} task of this shape "
                f"({str(error).splitlines()[0]}): change model, algorithm or task."
            ) from error


def _rehearse_schedule(node: DictConfig, optimizer: torch.optim.Optimizer) -> None:
    """One step of a schedule of nothing: what it cannot do is found before any work starts."""
    rates = [group["lr"] for group in optimizer.param_groups]
    nothing = [{"params": [torch.nn.Parameter(torch.zeros(()))], "lr": rate} for rate in rates]
    stand_in = torch.optim.SGD(nothing)
    schedule = build(node, "scheduler", optimizer=stand_in)
    try:
        stand_in.step()
        schedule.step()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"the learning-rate schedule cannot take a step ({error}): mend the values of "
            "scheduler, or choose scheduler=none."
        ) from error


def _check_ways(tasks: TaskDistribution, learner: Learner) -> None:
    if not isinstance(tasks, FewShotTasks) or tasks.regression or not learner.outputs_are_classes:
        return
    left_out = tasks.ways - tasks.train_ways
    if left_out > 0:
        raise UserError(
            f"task.train_ways={tasks.train_ways} does not fit: tests have task.ways={tasks.ways}, "
            f"and {type(learner).__name__} would never have trained {left_out} of its outputs: "
            f"leave task.train_ways out, or make it {tasks.ways} at least."
        )


def _check_partition(strategy: Strategy, learner: Learner, trainer: Trainer) -> None:
    """Split a meta-batch in rehearsal: a partitioner that names nobody is found here."""
    keys = task_keys(0, "train", 1, range(trainer.meta_batch_size))
    for worker, _, _ in as_shards(strategy.partitioner(learner, MetaBatch(keys))):
        get_worker_id(worker)


def _logger(cfg: DictConfig) -> Logger:
    """The loggers of rank zero; one that does nothing on other ranks."""
    nodes: dict[str, Any] = {} if cfg.get("logger") is None else dict(cfg.logger)
    loggers = [build(node, f"logger.{name}") for name, node in nodes.items()]
    if get_rank() != 0:
        return Logger()
    # metrics.jsonl is part of the results of a run, so it is always written.
    if not any(isinstance(logger, JsonlLogger) for logger in loggers):
        loggers.insert(0, JsonlLogger())
    return LoggerCollection(loggers)


def _headline(tasks: TaskDistribution, learner: Learner, strategy: Strategy) -> str:
    protocol = tasks.protocol()
    ways = "" if tasks.regression else f"{protocol['ways']}-way "
    size = get_world_size()
    return (
        f"{learner.method()['algorithm']} on "
        f"{protocol.get('dataset', protocol.get('name', 'tasks'))}, {ways}"
        f"{protocol['shots']}-shot, {strategy.name} on {size} worker{'s' if size > 1 else ''}"
    )
