"""The base class of algorithms: a module whose forward processes one task."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from metadist.algorithms.batch_norm import uses_batch_statistics
from metadist.algorithms.functional import buffers_by_name, submodules
from metadist.errors import UserError
from metadist.tasks import Episode, Examples

_NO_TARGET = -(2**31)
"""No class has this index. A target of -100, PyTorch's default of `ignore_index`, is an error."""


class TaskResult(NamedTuple):
    """The result of one task.

    Attributes:
        loss: scalar; in training, its gradient with respect to the learner's parameters is the
            meta-gradient.
        metrics: detached scalars: "accuracy" (0 to 1) for classification, "mse" for regression;
            before adaptation as `…_before` and, with `Learner.evaluate_each_step`, after k inner
            steps as `…_after_k`.
        predictions: logits or values of the queries, shape (n, outputs), in evaluation; not used
            in training.
        buffers: changes of the learner's buffers (running statistics), by name; filled in by the
            task mapper, empty in a learner's result.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    predictions: Tensor | None = None
    buffers: dict[str, Tensor] = {}  # noqa: RUF012


class Learner(nn.Module):
    """Base class of algorithms. Its parameters are the meta-learned parameters.

    Subclasses implement `forward(episode) -> TaskResult` for one task, independent of ranks and
    other tasks; in training a scalar loss is enough. The meta-gradient is the mean over tasks of
    the gradient of `loss`. In evaluation mode (`learner.eval()`) results are not differentiated.

    Args:
        model: the network, built for the problem.
        regression: regression (squared error) instead of classification (cross-entropy).
        transductive: whether batch norm without running statistics normalizes all queries of a task
            together in evaluation; if False, it normalizes each query with the support set.

    Attributes:
        evaluate_each_step: whether the queries are also evaluated after each inner step in
            evaluation, which takes time. Default: False.
        outputs_are_classes: whether the classes of a few-shot task are the model's outputs, so that
            a task has at most as many classes as the model has outputs. Default: True. A subclass
            that uses the model's features instead sets it to False.
        batches_tasks: whether `forward` supports batched tasks; the learner's own parameters then
            have a first dimension of tasks too. Default: False. It is not inherited by a subclass
            that overrides a method other than `protocol`, `__init__` included, because the new
            method may be written for one task: such a subclass sets it again.
        batches_buffers: whether the learner's buffers, too, may have a first dimension of tasks.
            Default: False; a learner with buffers then runs tasks one at a time.
        needs_task_seeds: whether `forward` of batched tasks draws random numbers. Default: False.
        task_seeds: the seed of each task's random generator, if `needs_task_seeds`.
        published_optimizers: names of the outer optimizers that the algorithm was published with,
            if others change the algorithm; a run with another one warns. Default: any.
        training_options: names of the options that affect training alone, which `metadist evaluate`
            refuses. Default: none.
    """

    evaluate_each_step = False
    outputs_are_classes = True
    batches_tasks = False
    batches_buffers = False
    needs_task_seeds = False
    task_seeds: Sequence[int] = ()
    published_optimizers: tuple[str, ...] = ()
    training_options: tuple[str, ...] = ()

    def __init_subclass__(cls, **options: Any) -> None:
        """Reset `batches_tasks` to False if a subclass overrides methods without setting it."""
        super().__init_subclass__(**options)
        if "algorithm_name" not in vars(cls):
            cls.algorithm_name = Learner.algorithm_name  # type: ignore[method-assign]
        if _overridden_methods(cast(Hashable, cls), "batches_tasks") - {"protocol"}:
            cls.batches_tasks = False

    def __init__(
        self, model: nn.Module, regression: bool = False, transductive: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self.regression = regression
        self.transductive = transductive

    def train(self, mode: bool = True) -> "Learner":
        """Set training or evaluation mode, in all submodules.

        Training calls it in every iteration, so it returns at once if all of them have the mode and
        none has a `train` of its own, such as one that keeps a norm in evaluation mode.
        """
        inherited = (Learner.train, nn.Module.train)
        if all(m.training is mode and type(m).train in inherited for m in submodules(self)):
            return self
        return super().train(mode)

    @property
    def supports_batched_tasks(self) -> bool:
        """Whether `forward` supports batched tasks in the current mode and with this model.

        All tensors of the episode, of the result and of the learner's parameters and buffers then
        have a first dimension of tasks; `loss` has shape (tasks,).
        """
        return (
            self.batches_tasks
            and (self.training or self.transductive)
            and model_supports_batched_tasks(self.model)
            and (self.batches_buffers or not buffers_by_name(self))
        )

    def task_dims(self, examples: Examples) -> int:
        """The number of leading dimensions of tasks: 1 for batched tasks, else 0."""
        return examples.targets.dim() - (2 if self.regression else 1)

    def loss(self, predictions: Tensor, targets: Tensor) -> Tensor:
        """The mean loss over queries: predictions (…, n, outputs) -> (…).

        Raises:
            UserError: regression with targets of another shape, which would be broadcast.
        """
        if self.regression:
            return _squared_error(predictions, targets)
        losses = F.cross_entropy(
            predictions.flatten(0, -2),
            targets.flatten(),
            ignore_index=_NO_TARGET,
            reduction="none",
        )
        return losses.view(targets.shape).mean(-1)

    def metrics(self, predictions: Tensor, targets: Tensor, suffix: str = "") -> dict[str, Tensor]:
        """Detached metrics, each of shape (…).

        Args:
            predictions: logits or values, shape (…, n, outputs).
            targets: labels of shape (…, n), or values of the predictions' shape.
            suffix: the end of the metrics' names, such as "_before".
        """
        predictions = predictions.detach()
        if self.regression:
            return {f"mse{suffix}": _squared_error(predictions, targets)}
        correct = predictions.argmax(-1) == targets
        dtype = torch.promote_types(predictions.dtype, torch.float32)  # under autocast, bfloat16
        return {f"accuracy{suffix}": correct.to(dtype).mean(-1)}

    def predict_queries(
        self, predict: Callable[[Tensor], Tensor], episode: Episode, jointly: bool = False
    ) -> Tensor:
        """Predictions of the queries, shape (…, n, outputs); transductive in training.

        Args:
            predict: the adapted model, (…, n, *input shape) -> (…, n, outputs).
            episode: the task.
            jointly: whether to pass support set and queries to `predict` in one batch.
        """
        support, queries = episode.support.inputs, episode.query.inputs
        transductive = self.training or self.transductive
        if not transductive and uses_batch_statistics(self.model):
            return predict_queries_separately(predict, support, queries)
        if not jointly:
            return predict(queries)
        axis = self.task_dims(episode.query)
        predictions = predict(torch.cat([support, queries], axis))
        return predictions.narrow(axis, support.shape[axis], queries.shape[axis])

    def protocol(self) -> dict[str, Any]:
        """Settings of the algorithm that must be equal for two results to be comparable.

        Default: the attributes `inner_steps` and `eval_inner_steps`, where the learner has them.
        """
        names = ("inner_steps", "eval_inner_steps")
        return {name: getattr(self, name) for name in names if hasattr(self, name)}

    def convert_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the state of another algorithm's learner to this learner's shapes.

        `init_from` calls it. Default: unchanged. A subclass that changes the shapes of the model's
        tensors overrides it.

        Args:
            state: the other learner's `state_dict()`.
        """
        return dict(state)

    @property
    def algorithm_name(self) -> str:
        """The name in titles and results. Default: the name of the class. It is not inherited."""
        return type(self).__name__

    def forward(self, episode: Episode) -> TaskResult:
        """Adapt to the support set, evaluate on the query set.

        Args:
            episode: the task's `support` and `query`, each with `inputs` of shape (n, *input shape)
                and `targets` of shape (n,), or (n, outputs) in regression.

        Returns:
            The result of the task; in training a scalar loss is enough. With batched tasks every
            tensor has a first dimension of tasks.
        """
        raise NotImplementedError


def _squared_error(predictions: Tensor, targets: Tensor) -> Tensor:
    """The mean squared error, (…, n, outputs) -> (…)."""
    if predictions.shape != targets.shape:
        raise UserError(
            f"the model gives values of shape {tuple(predictions.shape)}, and the targets have the "
            f"shape {tuple(targets.shape)}: a regression dataset gives targets of shape "
            "(n, outputs), and a learner with predictions of another shape has its own loss and "
            "metrics."
        )
    return (predictions - targets).square().mean((-2, -1))


@functools.cache
def _overridden_methods(cls: Any, attribute: str) -> AbstractSet[str]:
    """The methods that are overridden by the classes which precede, in the method resolution order
    of `cls`, the first class that defines the attribute.
    """
    bases = list(cls.__mro__)
    first = next((i for i, base in enumerate(bases) if attribute in vars(base)), 0)
    items = [item for base in bases[:first] for item in vars(base).items()]
    methods = {n for n, value in items if callable(value) and (n[:2] != "__" or n == "__init__")}
    return methods & {name for base in bases[first:] for name in vars(base)}


def model_supports_batched_tasks(model: nn.Module) -> bool:
    """The model's `supports_batched_tasks`; False if a subclass overrides methods without it."""
    attribute, model_class = "supports_batched_tasks", cast(Hashable, type(model))
    return getattr(model, attribute, False) and not _overridden_methods(model_class, attribute)


def as_task_result(returned: Any, learner: Learner, shape: tuple[int, ...] = ()) -> TaskResult:
    """Convert what a learner's `forward` returned to a `TaskResult`.

    A tensor is taken as the loss, without metrics; metrics that are Python numbers become tensors.

    Args:
        returned: what `forward` returned.
        learner: the learner.
        shape: the shape of the loss and of each metric: () for one task, (tasks,) for batched ones.

    Raises:
        UserError: `returned` is neither a `TaskResult` nor a tensor, or its loss or metrics have a
            wrong type or shape.
    """
    if isinstance(returned, Tensor):
        returned = TaskResult(returned, {})
    name = f"{type(learner).__name__}.forward"
    expected = f"a tensor of shape {shape}, a value per task" if shape else "a scalar tensor"
    if not isinstance(returned, TaskResult):
        raise UserError(
            f"{name} returned a {type(returned).__name__}: return "
            "metadist.algorithms.TaskResult(loss, metrics, predictions)."
        )
    loss, metrics = returned.loss, returned.metrics
    if not isinstance(metrics, Mapping):
        raise UserError(
            f"{name} returned metrics of type {type(metrics).__name__}: return a dict of numbers "
            "or scalar tensors by name, {} for none."
        )
    if not isinstance(loss, Tensor) or loss.shape != shape:
        value = f"of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise UserError(f"{name} returned a loss {value}: return {expected}.")
    if all(
        isinstance(value, Tensor) and value.shape == shape and not value.requires_grad
        for value in metrics.values()
    ):
        return returned
    number_type = torch.promote_types(loss.dtype, torch.float32)
    try:
        numbers = {
            key: value
            if isinstance(value, Tensor)
            else loss.new_full(shape, float(value), dtype=number_type)
            for key, value in metrics.items()
        }
        converted = {key: value.detach().reshape(shape) for key, value in numbers.items()}
    except (TypeError, ValueError, RuntimeError):
        shapes = {
            key: tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            for key, value in metrics.items()
        }
        wrong = "lack the dimension of tasks" if shape else "are not scalars"
        raise UserError(
            f"{name} returned metrics that {wrong} ({shapes}): return for each a number or "
            f"{expected}."
        ) from None
    return returned._replace(metrics=converted)


def require_equal_metrics(learner: nn.Module, metrics: Sequence[Mapping[str, Tensor]]) -> None:
    """Raise an error if the metrics of several tasks, chunks or shards have different names."""
    for other in metrics:
        if different := metrics[0].keys() ^ other.keys():
            raise UserError(
                f"{type(learner).__name__} returned the metric {min(different)} for some tasks and "
                "not for others: return the same metrics for every task."
            )


def predict_queries_separately(
    predict: Callable[[Tensor], Tensor], support: Tensor, queries: Tensor
) -> Tensor:
    """Predict each query in a batch with the support set alone: one forward pass per query.

    This is Reptile's evaluation that is not transductive (arXiv 1803.02999, section 6.1).

    Args:
        predict: the adapted model, (n, *input shape) -> (n, outputs).
        support: support inputs, shape (n, *input shape).
        queries: query inputs, shape (queries, *input shape).

    Returns:
        Predictions of the queries, shape (queries, outputs).
    """
    batches = (torch.cat([support, query.unsqueeze(0)]) for query in queries)
    return torch.stack([predict(batch)[-1] for batch in batches])


def require_features(model: nn.Module, algorithm: str) -> None:
    """Check that a model has `features(inputs)` and a linear `head`.

    Args:
        model: the network.
        algorithm: the algorithm's name in the configuration, for the error message.

    Raises:
        UserError: the model lacks `features` or a linear `head`.
    """
    if hasattr(model, "features") and isinstance(getattr(model, "head", None), nn.Linear):
        return
    raise UserError(
        f"algorithm={algorithm} needs a model with features() and a linear head, which "
        f"{type(model).__name__} lacks: choose model=conv4, resnet12 or mlp, or define both in "
        "your own model."
    )


def tied_parameters(model: nn.Module, part: nn.Module) -> list[nn.Parameter]:
    """The parameters of a part of a model that other modules of the model share."""
    of_part = set(part.modules())
    others = [module for module in model.modules() if module not in of_part]
    shared = {id(p) for module in others for p in module.parameters(recurse=False)}
    return [p for p in part.parameters() if id(p) in shared]
