"""The base class of algorithms that adapt by gradient steps."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Literal, cast, get_args

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from metadist.algorithms.batch_norm import batch_norms_as_in_training
from metadist.algorithms.functional import call_with, parameters_by_name
from metadist.algorithms.learner import Learner, TaskResult, tied_parameters
from metadist.errors import UserError
from metadist.profile_ranges import profile_range
from metadist.tasks import Episode, Examples

Parameters = dict[str, Tensor]
"""Tensors by the names of the model's parameters."""

AdaptedParameters = Literal["all", "no_norm", "head", "body"]
"""Which parameters inner steps adapt; see `adapted_names`."""

_NORMS = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class InnerLoopLearner(Learner):
    """A learner that adapts the model's parameters to the support set by gradient steps.

    Subclasses implement `train_task` (the result of a task in training) and `trajectory` (the
    inner steps, in training and in evaluation).

    Args:
        model: the network whose parameters are meta-learned. Parameters that do not require grad
            are neither meta-learned nor adapted.
        regression: regression instead of classification.
        inner_steps: steps in training.
        eval_inner_steps: steps in evaluation. Default: as many as in training.
        transductive: see `Learner`.

    Raises:
        UserError: no parameter requires grad.
    """

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_steps: Annotated[int, Ge(1)] = 1,
        eval_inner_steps: Annotated[int, Ge(1)] | None = None,
        transductive: bool = True,
    ) -> None:
        super().__init__(model, regression, transductive)
        self.inner_steps = inner_steps
        self.eval_inner_steps = inner_steps if eval_inner_steps is None else eval_inner_steps
        self.adapted_names = adapted_names(model, "all")

    def train_task(self, episode: Episode) -> TaskResult:
        """The result of a task; the gradient of its loss is the meta-gradient."""
        raise NotImplementedError

    def trajectory(
        self, parameters: Parameters, support: Examples, steps: int, create_graph: bool = False
    ) -> Iterator[Parameters]:
        """The parameters after each inner step.

        Args:
            parameters: initial parameters.
            support: the examples to adapt to.
            steps: number of steps.
            create_graph: whether the steps can be differentiated.
        """
        raise NotImplementedError

    def adapt(
        self, parameters: Parameters, support: Examples, steps: int, create_graph: bool = False
    ) -> Parameters:
        """The parameters after the last step of `trajectory`, with the same arguments."""
        for adapted in self.trajectory(parameters, support, steps, create_graph):
            parameters = adapted
        return parameters

    def forward(self, episode: Episode) -> TaskResult:
        """Adapt to `episode.support`, evaluate on `episode.query`."""
        return self.train_task(episode) if self.training else self.evaluate_task(episode)

    @torch.no_grad()
    def evaluate_task(self, episode: Episode) -> TaskResult:
        """The result of a task in evaluation, with the metrics before adaptation as `…_before`."""

        def predict(parameters: Parameters) -> Tensor:
            return self.predict_queries(lambda inputs: self.predict(parameters, inputs), episode)

        return self.evaluate_trajectory(
            self.initial(), episode.support, episode.query.targets, predict
        )

    def evaluate_trajectory(
        self,
        start: Parameters,
        support: Examples,
        targets: Tensor,
        predict: Callable[[Parameters], Tensor],
    ) -> TaskResult:
        """Evaluate a task before and after adaptation, and after each step if `evaluate_each_step`.

        Args:
            start: initial parameters.
            support: the examples to adapt to.
            targets: the targets of the queries.
            predict: a function, parameters -> predictions of the queries.

        Raises:
            UserError: `trajectory` did not yield once for each step.
        """
        predictions = predict(start)
        metrics = self.metrics(predictions, targets, "_before")
        last = self.eval_inner_steps
        step = 0
        for parameters in self.trajectory(start, support, last):
            step += 1
            if step == last or self.evaluate_each_step:
                predictions = predict(parameters)
            if self.evaluate_each_step:
                metrics |= self.metrics(predictions, targets, f"_after_{step}")
        if step != last:
            raise UserError(
                f"{type(self).__name__}.trajectory yielded {step} times for {last} steps: yield "
                "the adapted parameters once after each step."
            )
        metrics = self.metrics(predictions, targets) | metrics
        return TaskResult(self.loss(predictions, targets), metrics, predictions)

    def initial(self) -> Parameters:
        """The initial values of the parameters that inner steps adapt, by the model's names.

        A subclass may return other tensors that require grad, by names of its own, such as context
        parameters; its `predict` then uses them.

        Parameters that were frozen after the learner was made are left out. If all are frozen, none
        is left out in evaluation.

        Raises:
            UserError: all are frozen, in training.
        """
        parameters = parameters_by_name(self.model)
        return self.without_frozen({name: parameters[name] for name in self.adapted_names})

    def without_frozen(self, parameters: Parameters) -> Parameters:
        """The parameters without frozen ones; see `initial`."""
        trainable = {name: tensor for name, tensor in parameters.items() if tensor.requires_grad}
        if not trainable and self.training:
            raise UserError(
                f"all parameters that {self.algorithm_name} adapts are frozen: leave one of "
                f"{', '.join(parameters)} trainable."
            )
        return trainable or parameters

    def predict(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """Predictions with the given parameters: (…, n, *input shape) -> (…, n, outputs)."""
        return cast(Tensor, call_with(self.model, parameters, inputs))

    def gradients(
        self, parameters: Parameters, examples: Examples, create_graph: bool = False
    ) -> Parameters:
        """The gradient of the examples' loss with respect to the parameters.

        In evaluation, too, batch norm uses the statistics of the examples: with the running
        statistics of training, steps would not be those that were meta-trained.

        Args:
            parameters: values of the model's parameters.
            examples: inputs and targets.
            create_graph: whether the gradient can be differentiated.
        """
        norms: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not self.training:
            norms = batch_norms_as_in_training(self.model)
        with torch.enable_grad(), norms:
            if not create_graph:
                parameters = detach_parameters(parameters)
            loss = self.loss(self.predict(parameters, examples.inputs), examples.targets)
            # With batched tasks, each loss depends on the parameters of its task only.
            with profile_range("inner_gradient"):
                grads = torch.autograd.grad(
                    loss.sum(),
                    list(parameters.values()),
                    create_graph=create_graph,
                    allow_unused=True,  # the model may have parameters that it does not use
                    materialize_grads=True,
                )
        return dict(zip(parameters, grads, strict=True))


def adapted_names(model: nn.Module, adapt: AdaptedParameters) -> list[str]:
    """The names of the model's parameters that inner steps adapt.

    Parameters that do not require grad are never adapted.

    Args:
        model: the network.
        adapt: "all" parameters; "no_norm": all except scale and shift of normalization layers, as
            in the code of MAML's authors; "head": the last layer only, as in ANIL (arXiv
            1909.09157); "body": all except the last layer, as in BOIL (Oh et al. 2021, arXiv
            2008.08882). The last layer is the model's `head`.

    Raises:
        UserError: an unknown `adapt`, the model has no `head` or shares the head's parameters with
            other layers, or no parameter is left.
    """
    if adapt not in get_args(AdaptedParameters):
        raise UserError(
            f"algorithm.adapt={adapt} is unknown: choose {', '.join(get_args(AdaptedParameters))}."
        )
    trainable = {name: each for name, each in model.named_parameters() if each.requires_grad}
    names = list(trainable)
    if adapt in ("head", "body"):
        head = getattr(model, "head", None)
        if not isinstance(head, nn.Module):
            raise UserError(
                f"algorithm.adapt={adapt} needs a model whose last layer is `head`, which "
                f"{type(model).__name__} lacks: choose model=conv4, resnet12 or mlp, or "
                "algorithm.adapt=all."
            )
        if tied_parameters(model, head):
            raise UserError(
                f"algorithm.adapt={adapt} needs a head with parameters of its own, and the head of "
                f"{type(model).__name__} shares some with other layers: give it its own, or choose "
                "algorithm.adapt=all."
            )
        # Not by name: a model may have its last layer under another name, too.
        in_head = {id(parameter) for parameter in head.parameters()}
        names = [name for name in names if (id(trainable[name]) in in_head) == (adapt == "head")]
    elif adapt == "no_norm":
        norms = {name for name, module in model.named_modules() if isinstance(module, _NORMS)}
        names = [name for name in names if name.rpartition(".")[0] not in norms]
    if next(model.parameters(), None) is None:
        raise UserError(
            f"the model {type(model).__name__} has no parameters to adapt: register some with "
            "nn.Parameter or a layer."
        )
    if not names:
        alternative = "" if adapt == "all" else "choose algorithm.adapt=all, or "
        raise UserError(
            f"algorithm.adapt={adapt} leaves no parameter of {type(model).__name__} to adapt: "
            f"{alternative}give the model parameters that require grad."
        )
    return names


def detach_parameters(parameters: Parameters) -> Parameters:
    """The same values as leaves that require grad, in the same memory."""
    return {name: tensor.detach().requires_grad_() for name, tensor in parameters.items()}


def flatten_tensors(tensors: Iterable[Tensor], task_dims: int = 0) -> Tensor:
    """Concatenate tensors into a vector.

    Args:
        tensors: tensors of any shapes.
        task_dims: 1 if the tensors have a first dimension of tasks, for a vector per task.
    """
    return torch.cat([tensor.reshape(*tensor.shape[:task_dims], -1) for tensor in tensors], -1)


def unflatten_tensors(vector: Tensor, like: Mapping[str, Tensor]) -> Parameters:
    """Split a vector, or a vector per task, into tensors with the names, shapes and types of
    `like`.
    """
    tasks = vector.shape[:-1].numel()
    chunks = vector.split([tensor.numel() // tasks for tensor in like.values()], -1)
    return {
        name: chunk.view(tensor.shape).to(tensor.dtype)
        for (name, tensor), chunk in zip(like.items(), chunks, strict=True)
    }
