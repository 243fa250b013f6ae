"""Builds the experiment that a configuration describes."""

import inspect
import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.nn.parameter import is_lazy

from metadist.algorithms import Learner
from metadist.config.instantiate import OwnDefaults, locate_target
from metadist.config.instantiate import instantiate as instantiate_node
from metadist.config.plain import redact_secrets, to_plain
from metadist.config.schema import Settings, validate
from metadist.distributed import get_rank, get_world_size
from metadist.distributed.job import current_job
from metadist.distributed.partitioners import DimPartitioner
from metadist.distributed.reducers import LinearReducer
from metadist.distributed.world import usable_cpus
from metadist.errors import UserError
from metadist.kernels import tune_malloc
from metadist.loggers import JsonlLogger, Logger, LoggerCollection
from metadist.metrics import counted
from metadist.reports.comparison import FINGERPRINT_GROUPS
from metadist.tasks import SPLITS, TaskDistribution, TaskShape
from metadist.tasks.episode import TASK_MEMBERS, require_members
from metadist.training import (
    Callback,
    EvaluateMapper,
    Experiment,
    Strategy,
    TrainerConfig,
    TrainMapper,
    initialize,
    resolve_device,
    restore,
    supported_precision,
)
from metadist.training.gpu_memory import measure_chunk_size
from metadist.training.precision import Precision, set_tensor_float32
from metadist.training.sanity_check import check_before_training

_log = logging.getLogger(__name__)


def build_experiment(
    configuration: DictConfig, directory: Path | str, name: str, settings: Settings | None = None
) -> Experiment:
    """Build everything that a run needs and restore its checkpoint. Every rank calls it.

    A run that does not resume starts with the weights of `init_from`, if it is given. The outer
    step runs eagerly; `metadist.training.compile_step` compiles it.

    Args:
        configuration: the configuration, composed from `conf/maml.yaml` or `conf/ddp.yaml`.
        directory: the run's directory.
        name: the experiment's name.
        settings: the value of `validate` for the configuration. Default: it is validated here.

    Raises:
        UserError: the configuration or the checkpoint does not fit.
    """
    experiment = assemble_experiment(configuration, Path(directory), name, settings)
    for callback in experiment.callbacks.values():
        callback.on_build(experiment)
    restore(experiment)
    init_from = configuration.get("init_from")
    resumed = experiment.state.iteration > 0
    if init_from is not None and resumed and get_rank() == 0:
        _log.info("init_from=%s is not used, since the run resumes", init_from)
    if init_from is not None and experiment.strategy.is_driver and not resumed:
        protocol = experiment.tasks.protocol()
        message, warning = initialize(experiment.learner, str(init_from), protocol)
        if get_rank() == 0:
            _log.info(message)
            if warning is not None:
                _log.warning(warning)
    measure_chunk_size(experiment)
    return experiment


def assemble_experiment(
    configuration: DictConfig,
    directory: Path,
    name: str,
    settings: Settings | None = None,
    locate: Callable[[str, str], Any] = locate_target,
    splits: Sequence[str] = SPLITS,
) -> Experiment:
    """`build_experiment` without a checkpoint or `init_from`. Every rank calls it.

    Args:
        configuration: see `build_experiment`.
        directory: see `build_experiment`.
        name: see `build_experiment`.
        settings: see `build_experiment`.
        locate: the function that imports the targets; see `instantiate`.
        splits: the splits that are sampled; not validation if `trainer.eval_every` is 0.
    """
    cfg, settings = configuration, settings or validate(configuration)
    recorded: OwnDefaults = {}
    instantiate = partial(instantiate_node, locate=locate, own_defaults=recorded)
    plain = to_plain(cfg, resolve=True)
    trainer: TrainerConfig = instantiate(cfg.trainer, "trainer")
    device = resolve_device(settings.device)
    precision = supported_precision(trainer.precision, device)
    _set_process_options(settings.threads, device, precision)
    strategy = _strategy(cfg, settings, device, instantiate)
    dataset = instantiate(cfg.dataset, "dataset")
    if not trainer.eval_every:
        splits = [split for split in splits if split != "validation"]
    tasks: TaskDistribution = instantiate(cfg.task, "task", dataset=dataset, sampled_splits=splits)
    require_members(tasks, "task distribution", TASK_MEMBERS, "TaskDistribution")
    torch.manual_seed(settings.seed)
    learner = build_learner(cfg.model, cfg.algorithm, tasks, instantiate)
    learner.to(device if strategy.parameter_device == "device" else "cpu")
    optimizer, scheduler = _optimizer(cfg, learner, trainer.iterations, instantiate)
    check_before_training(strategy, tasks, learner, trainer, precision)
    callbacks = _instances(cfg, "callbacks", Callback, instantiate)
    defaults = {p: d for p, d in recorded.items() if p.partition(".")[0] in FINGERPRINT_GROUPS}
    _add_defaults(plain, defaults)
    local_tasks = current_job().worker_local("tasks", tasks)
    return Experiment(
        name=name,
        title=_title(tasks, learner, strategy),
        directory=directory,
        configuration=redact_secrets(plain),
        defaults=defaults,
        seed=settings.seed,
        trainer_config=trainer,
        tasks=tasks,
        learner=learner,
        optimizer=optimizer,
        scheduler=scheduler,
        strategy=strategy,
        train_mapper=TrainMapper(
            local_tasks,
            settings.device,
            trainer.task_chunk_size,
            profile=trainer.profile and not strategy.every_rank_drives,
            precision=precision,
        ),
        evaluate_mapper=EvaluateMapper(
            local_tasks, settings.device, trainer.task_chunk_size, precision=precision
        ),
        logger=_logger(cfg, instantiate),
        callbacks=callbacks,
        resume=settings.resume,
    )


def _add_defaults(configuration: dict[str, Any], defaults: OwnDefaults) -> None:
    """Add the defaults of the user's own classes, which could change between two runs."""
    callbacks = configuration.get("callbacks") or {}
    nodes = configuration | {f"callbacks.{name}": node for name, node in callbacks.items()}
    for path, options in defaults.items():
        for name, default in options.items():
            nodes[path].setdefault(name, default)


def _set_process_options(threads: int, device: torch.device, precision: Precision) -> None:
    """Set the options of torch and of the memory allocation that hold for the whole process."""
    torch.set_num_threads(threads)
    if threads > usable_cpus() and get_rank() == 0:
        _log.warning(
            "threads=%d is more than the CPUs that this process may use, %d, and slows it down",
            *(threads, usable_cpus()),
        )
    tune_malloc()
    if device.type == "cuda":
        torch.cuda.set_device(device)  # "cuda" without an index then is this rank's GPU
        torch.backends.cudnn.deterministic = True  # for exact resumes
    set_tensor_float32(precision, device)  # also for backward passes outside of the mappers


def build_learner(
    model: Any, algorithm: Any, task: TaskShape, instantiate: Callable[..., Any]
) -> Learner:
    """Build a model and its algorithm, with newly drawn parameters, on the CPU.

    Args:
        model: the node of the model.
        algorithm: the node of the algorithm.
        task: a task distribution, or its saved shape.
        instantiate: the function `metadist.config.instantiate.instantiate`, or a `partial` of it.

    Raises:
        UserError: a node cannot be instantiated, gives another type, or has no parameters,
            complex ones or lazy layers.
    """
    built = instantiate(model, "model", input_shape=task.input_shape, outputs=task.outputs)
    learner: Learner = instantiate(algorithm, "algorithm", model=built, regression=task.regression)
    _check_type(built, nn.Module, "model", model)
    _check_type(learner, Learner, "algorithm", algorithm)
    parameters = list(learner.parameters())
    if not parameters:
        raise UserError(
            f"{type(learner).__name__} and its model {type(built).__name__} have no parameters, "
            "and there is nothing to train: register some with nn.Parameter or a layer."
        )
    if any(parameter.is_complex() for parameter in parameters):
        raise UserError(
            f"the model {type(built).__name__} has complex parameters, and gradients are summed in "
            "float64: give it real ones, two for each complex number."
        )
    if any(map(is_lazy, [*parameters, *learner.buffers()])):
        raise UserError(
            f"the model {type(built).__name__} has lazy layers, whose sizes are not known before "
            "the first input: give them their sizes; the model gets input_shape and outputs."
        )
    _copy_parameters_with_gaps(learner)
    _copy_expanded_buffers(learner)
    return learner


def _copy_parameters_with_gaps(learner: Learner) -> None:
    """Give each parameter memory without gaps and overlaps, as fused optimizers read it on CPUs."""
    for parameter in learner.parameters():
        own = torch.empty_like(parameter, requires_grad=False)  # has the same strides if it can
        if own.stride() != parameter.stride():
            parameter.data = own.copy_(parameter.detach())


def _copy_expanded_buffers(learner: Learner) -> None:
    """Give each element of a buffer its own memory, since buffers are updated in place."""
    for module in learner.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if 0 in buffer.stride():
                setattr(module, name, buffer.contiguous())


def _strategy(
    cfg: DictConfig, settings: Settings, device: torch.device, instantiate: Callable[..., Any]
) -> Strategy:
    # Hydra accepts the plus of `+partition=…` only if the group is not in the defaults list.
    group = "partition" if "partition" in cfg else "default_partition"
    partitioner = instantiate(cfg[group], group)
    reducer = instantiate(cfg.reducer, "reducer")
    _check_callable(partitioner, group, cfg[group])
    _check_callable(reducer, "reducer", cfg.reducer)
    strategy: Strategy = instantiate(
        cfg.strategy,
        "strategy",
        partitioner=partitioner,
        reducer=reducer,
        timeout_seconds=settings.timeout_seconds,
        rendezvous_timeout_seconds=settings.rendezvous_timeout_seconds,
        device=device,
    )
    items_are_equal = isinstance(reducer, LinearReducer) and reducer.weights_items_equally
    if strategy.sums_on_workers and items_are_equal and type(partitioner) is DimPartitioner:
        # The result is the same, and a shard per task takes longer.
        strategy.partitioner = partitioner.with_one_shard_per_worker()
    return strategy


def _check_type(built: Any, base: type, path: str, node: Any) -> None:
    if not isinstance(built, base):
        raise UserError(
            f"{path}._target_={node['_target_']} gives a {type(built).__name__}, which is no "
            f"{base.__module__.removesuffix('.learner')}.{base.__qualname__}: derive the class "
            "from it."
        )


def _check_callable(built: Any, path: str, node: Any) -> None:
    if not callable(built):
        raise UserError(
            f"{path}._target_={node['_target_']} gives a {type(built).__name__}, which cannot be "
            "called: give the class a method __call__, or write a function that returns a function."
        )


def _optimizer(
    cfg: DictConfig, learner: Learner, iterations: int, instantiate: Callable[..., Any]
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """The optimizer and the scheduler of its learning rate."""

    def make() -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
        # Optimizers take `params`; a function of the user may take `named_parameters` instead.
        named = list(learner.named_parameters())
        params = [parameter for _, parameter in named]
        optimizer: Any = instantiate(
            cfg.optimizer, "optimizer", params=params, named_parameters=named
        )
        _check_optimizer(optimizer, params, cfg.optimizer)
        return optimizer, instantiate(cfg.scheduler, "scheduler", optimizer=optimizer)

    _, scheduler = make()
    _check_scheduler(scheduler, cfg.scheduler, iterations)
    return make()  # anew: the check has changed the learning rate


def _check_optimizer(optimizer: Any, params: list[nn.Parameter], node: DictConfig) -> None:
    """Raise an error for an optimizer that the trainer cannot use."""
    _check_type(optimizer, torch.optim.Optimizer, "optimizer", node)
    if any("lr" not in group for group in optimizer.param_groups):
        raise UserError(
            f"{node._target_} has no learning rate (lr) in its parameter groups, which schedules "
            "change and which is logged: add lr to its defaults."
        )
    own = set(params)
    if any(each not in own for group in optimizer.param_groups for each in group["params"]):
        raise UserError(
            f"{node._target_} gives an optimizer of tensors that are not the learner's parameters, "
            "which it would not train: pass the parameters themselves, not copies of them."
        )
    needs_closure = any(
        parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        for parameter in inspect.signature(optimizer.step).parameters.values()
    )
    if needs_closure or isinstance(optimizer, torch.optim.SparseAdam):
        raise UserError(
            f"{node._target_} cannot take a step with a dense gradient and without a closure: "
            "choose another optimizer, such as optimizer=adam."
        )


def _check_scheduler(scheduler: Any, node: DictConfig, iterations: int) -> None:
    """Take a step of a scheduler, unless there is nothing to train."""
    _check_type(scheduler, torch.optim.lr_scheduler.LRScheduler, "scheduler", node)
    if not iterations:
        return
    if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise UserError(
            "scheduler: a schedule that depends on a metric is not supported: choose one of "
            "the iteration, such as scheduler=cosine."
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a step without one of the optimizer
            scheduler.step()
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(
            f"the learning-rate schedule cannot take a step ({error}): correct the values "
            "of scheduler, or choose scheduler=none."
        ) from error
    # OneCycleLR raises an error in the step after its last one.
    one_cycle = isinstance(scheduler, torch.optim.lr_scheduler.OneCycleLR)
    if one_cycle and scheduler.total_steps < iterations:
        raise UserError(
            f"the learning-rate schedule ends after {scheduler.total_steps} of {iterations} "
            "iterations: set scheduler.total_steps=${trainer.iterations}."
        )


def _instances(
    cfg: DictConfig, group: str, base: type, instantiate: Callable[..., Any]
) -> dict[str, Any]:
    """The objects of a group that may have several nodes, by name."""
    nodes = cfg.get(group)
    if nodes is not None and not isinstance(nodes, DictConfig):
        raise UserError(
            f"{group}={nodes} does not fit: expected a dictionary of nodes; leave {group} out, or "
            f"write {group}.NAME._target_=CLASS."
        )
    if nodes is not None and "_target_" in nodes:
        raise UserError(
            f"{group} has a _target_ of its own, and may have several nodes: give each a name, as "
            f"in a file with NAME: {{_target_: CLASS}}, or as in {group}.NAME._target_=CLASS."
        )
    instances: dict[str, Any] = dict(nodes or {})
    for name, node in instances.items():
        instances[name] = instantiate(node, f"{group}.{name}")
        _check_type(instances[name], base, f"{group}.{name}", node)
    return instances


def _logger(cfg: DictConfig, instantiate: Callable[..., Any]) -> Logger:
    """The configured loggers on rank zero; on other ranks, a logger that does nothing."""
    loggers = list(_instances(cfg, "logger", Logger, instantiate).values())
    if get_rank() != 0:
        return Logger()
    # metrics.jsonl is part of a run's results, so it is always written.
    if not any(isinstance(logger, JsonlLogger) for logger in loggers):
        loggers.insert(0, JsonlLogger())
    return LoggerCollection(loggers)


def _title(tasks: TaskDistribution, learner: Learner, strategy: Strategy) -> str:
    protocol = tasks.protocol()
    names = ("shots",) if tasks.regression else ("ways", "shots")
    # The protocol of a user's own task distribution may have neither.
    counts = [f"{protocol[name]}-{name.removesuffix('s')}" for name in names if name in protocol]
    parts = [
        f"{learner.algorithm_name} on {protocol.get('dataset', 'tasks')}",
        *([" ".join(counts)] if counts else []),
        f"{strategy.name} on {counted(get_world_size(), 'worker')}",
    ]
    return ", ".join(parts)
