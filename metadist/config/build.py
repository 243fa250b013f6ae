"""Builds the experiment that a configuration describes."""

from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from metadist.algorithms import Learner
from metadist.config.instantiate import instantiate
from metadist.config.sanity_check import run_sanity_check
from metadist.config.schema import Settings, validate
from metadist.config.secrets import redact_secrets
from metadist.distributed import get_rank, get_worker_id, get_world_size
from metadist.distributed.job import current_job
from metadist.distributed.partitioners import as_shards
from metadist.distributed.worker_local import WorkerLocal
from metadist.errors import UserError
from metadist.kernels import tune_malloc
from metadist.loggers import JsonlLogger, Logger, LoggerCollection
from metadist.tasks import FewShotTasks, TaskDistribution, task_keys
from metadist.training import (
    EvaluateMapper,
    Experiment,
    MetaBatch,
    Strategy,
    TrainerConfig,
    TrainMapper,
    resolve_device,
    restore,
)


def build_experiment(configuration: DictConfig, directory: Path, name: str) -> Experiment:
    """Build everything that a run needs and restore its checkpoint. Every rank calls it.

    Args:
        configuration: composed from `conf/maml.yaml` or `conf/ddp.yaml`.
        directory: the run's directory.
        name: the experiment's name.

    Raises:
        UserError: the configuration or the checkpoint does not fit.
    """
    experiment = assemble_experiment(configuration, directory, name)
    restore(experiment)
    return experiment


def assemble_experiment(configuration: DictConfig, directory: Path, name: str) -> Experiment:
    """`build_experiment` without the checkpoint: the state at iteration 0. Every rank calls it."""
    cfg, settings = configuration, validate(configuration)
    torch.set_num_threads(settings.threads)
    tune_malloc()
    trainer: TrainerConfig = instantiate(cfg.trainer, "trainer")
    strategy = _strategy(cfg, settings)
    device = resolve_device(str(cfg.device))
    dataset = instantiate(cfg.dataset, "dataset")
    tasks: TaskDistribution = instantiate(cfg.task, "task", dataset=dataset)
    torch.manual_seed(settings.seed)
    model = instantiate(cfg.model, "model", input_shape=tasks.input_shape, outputs=tasks.outputs)
    learner: Learner = instantiate(
        cfg.algorithm, "algorithm", model=model, regression=tasks.regression
    )
    _check_type(model, torch.nn.Module, "model", cfg.model)
    _check_type(learner, Learner, "algorithm", cfg.algorithm)
    learner.to(device if strategy.parameter_device == "device" else "cpu")
    optimizer = instantiate(cfg.optimizer, "optimizer", params=learner.parameters())
    _check_scheduler(cfg.scheduler, optimizer)
    scheduler = instantiate(cfg.scheduler, "scheduler", optimizer=optimizer)
    _check_partition(strategy, learner, trainer)
    _check_ways(tasks, learner)
    run_sanity_check(tasks, learner)
    # Every rank builds a job's experiments in the same order, so the names agree.
    local_tasks = WorkerLocal(current_job().new_name("tasks"), tasks)
    return Experiment(
        name=name,
        title=_title(tasks, learner, strategy),
        directory=directory,
        configuration=redact_secrets(OmegaConf.to_container(cfg, resolve=True)),
        seed=settings.seed,
        trainer=trainer,
        tasks=tasks,
        learner=learner,
        optimizer=optimizer,
        scheduler=scheduler,
        strategy=strategy,
        train_mapper=TrainMapper(
            local_tasks,
            settings.device,
            trainer.task_chunk_size,
            profile=trainer.profile and strategy.name == "rpc",
        ),
        evaluate_mapper=EvaluateMapper(local_tasks, settings.device, trainer.task_chunk_size),
        logger=_logger(cfg),
        resume=None if settings.resume is None else str(settings.resume),
    )


def _strategy(cfg: DictConfig, settings: Settings) -> Strategy:
    # `+partition=…` adds the group: Hydra takes the plus only for one outside the defaults list.
    chosen = "partition" if "partition" in cfg else "default_partition"
    partitioner = instantiate(cfg[chosen], chosen)
    reducer = instantiate(cfg.reducer, "reducer")
    return instantiate(
        cfg.strategy,
        "strategy",
        partitioner=partitioner,
        reducer=reducer,
        timeout_seconds=settings.timeout_seconds,
        rendezvous_timeout_seconds=settings.rendezvous_timeout_seconds,
    )


def _check_type(built: Any, base: type, path: str, node: DictConfig) -> None:
    if not isinstance(built, base):
        raise UserError(
            f"{path}._target_={node._target_} gives a {type(built).__name__}, which is no "
            f"{base.__module__.removesuffix('.learner')}.{base.__qualname__}: derive the class "
            "from it and call super().__init__() first."
        )


def _check_scheduler(node: DictConfig, optimizer: torch.optim.Optimizer) -> None:
    """Dry-run of the scheduler on a dummy optimizer."""
    rates = [group["lr"] for group in optimizer.param_groups]
    groups = [{"params": [torch.nn.Parameter(torch.zeros(()))], "lr": rate} for rate in rates]
    dummy = torch.optim.SGD(groups)
    scheduler = instantiate(node, "scheduler", optimizer=dummy)
    try:
        dummy.step()
        scheduler.step()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"the learning-rate schedule cannot take a step ({error}): correct the values "
            "of scheduler, or choose scheduler=none."
        ) from error


def _check_ways(tasks: TaskDistribution, learner: Learner) -> None:
    if not isinstance(tasks, FewShotTasks) or tasks.regression or not learner.outputs_are_classes:
        return
    untrained = tasks.ways - tasks.train_ways
    if untrained > 0:
        raise UserError(
            f"task.train_ways={tasks.train_ways} does not fit: test tasks have task.ways="
            f"{tasks.ways}, and {type(learner).__name__} would not train {untrained} of its "
            f"outputs: leave task.train_ways out, or set it to at least {tasks.ways}."
        )


def _check_partition(strategy: Strategy, learner: Learner, trainer: TrainerConfig) -> None:
    """Partition one meta-batch, to find unknown workers before training."""
    keys = task_keys(0, "train", 1, range(trainer.meta_batch_size))
    for worker, _, _ in as_shards(strategy.partitioner(learner, MetaBatch(keys))):
        get_worker_id(worker)


def _logger(cfg: DictConfig) -> Logger:
    """The configured loggers on rank zero; on other ranks one that does nothing."""
    nodes: dict[str, Any] = {} if cfg.get("logger") is None else dict(cfg.logger)
    loggers = [instantiate(node, f"logger.{name}") for name, node in nodes.items()]
    if get_rank() != 0:
        return Logger()
    # metrics.jsonl is part of a run's results, so it is always written.
    if not any(isinstance(logger, JsonlLogger) for logger in loggers):
        loggers.insert(0, JsonlLogger())
    return LoggerCollection(loggers)


def _title(tasks: TaskDistribution, learner: Learner, strategy: Strategy) -> str:
    protocol = tasks.protocol()
    ways = "" if tasks.regression else f"{protocol['ways']}-way "
    size = get_world_size()
    return (
        f"{learner.method()['algorithm']} on "
        f"{protocol.get('dataset', protocol.get('name', 'tasks'))}, {ways}"
        f"{protocol['shots']}-shot, {strategy.name} on {size} worker{'s' if size > 1 else ''}"
    )
