"""The base class of algorithms that adapt by gradient steps."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Literal, get_args

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from metadist.algorithms.learner import Learner, TaskResult
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
        model: the network whose parameters are meta-learned. Those that do not require grad are
            neither meta-learned nor adapted.
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
            targets: of the queries.
            predict: parameters -> predictions of the queries.
        """
        predictions = predict(start)
        metrics = self.metrics(predictions, targets, "_before")
        last = self.eval_inner_steps
        trajectory = self.trajectory(start, support, last)
        for step, parameters in enumerate(trajectory, start=1):
            if step == last or self.evaluate_each_step:
                predictions = predict(parameters)
            if self.evaluate_each_step:
                metrics |= self.metrics(predictions, targets, f"_after_{step}")
        metrics = self.metrics(predictions, targets) | metrics
        return TaskResult(self.loss(predictions, targets), metrics, predictions)

    def initial(self) -> Parameters:
        """The initial values of the parameters that inner steps adapt.

        Those that were frozen since the learner was made are left out; in evaluation all are taken
        if all are frozen.

        Raises:
            UserError: in training, all are frozen.
        """
        parameters = dict(self.model.named_parameters())
        return self.without_frozen({name: parameters[name] for name in self.adapted_names})

    def without_frozen(self, parameters: Parameters) -> Parameters:
        """See `initial`."""
        trainable = {name: each for name, each in parameters.items() if each.requires_grad}
        if not trainable and self.training:
            raise UserError(
                f"all parameters that {self.algorithm_name} adapts are frozen: leave one of "
                f"{', '.join(parameters)} trainable."
            )
        return trainable or parameters

    def predict(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """Predictions with the given parameters: (…, n, *input shape) -> (…, n, outputs)."""
        return functional_call(self.model, parameters, (inputs,))

    def gradients(
        self, parameters: Parameters, examples: Examples, create_graph: bool = False
    ) -> Parameters:
        """The gradient of the loss of examples with respect to the parameters.

        Args:
            parameters: of the model.
            examples: with `inputs` and `targets`.
            create_graph: whether the gradient can be differentiated.
        """
        with torch.enable_grad():
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
            in the code of MAML's authors; "head": the last layer only, as ANIL (arXiv 1909.09157);
            "body": all except the last layer, as BOIL (Oh et al. 2021, arXiv 2008.08882). The last
            layer is the model's `head`.

    Raises:
        UserError: an unknown `adapt`, the model has no `head`, or no parameter is left.
    """
    if adapt not in get_args(AdaptedParameters):
        raise UserError(
            f"algorithm.adapt={adapt} is unknown: choose {', '.join(get_args(AdaptedParameters))}."
        )
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    if adapt in ("head", "body") and not isinstance(getattr(model, "head", None), nn.Module):
        raise UserError(
            f"algorithm.adapt={adapt} needs a model whose last layer is `head`, which "
            f"{type(model).__name__} lacks: choose model=conv4 or mlp, or algorithm.adapt=all."
        )
    if adapt == "head":
        names = [name for name in names if name.startswith("head.")]
    elif adapt == "body":
        names = [name for name in names if not name.startswith("head.")]
    elif adapt == "no_norm":
        norms = {name for name, module in model.named_modules() if isinstance(module, _NORMS)}
        names = [name for name in names if name.rpartition(".")[0] not in norms]
    if not names:
        other = "" if adapt == "all" else "choose algorithm.adapt=all, or "
        raise UserError(
            f"algorithm.adapt={adapt} leaves no parameter of {type(model).__name__} to adapt: "
            f"{other}give the model parameters that require grad."
        )
    return names


def detach_parameters(parameters: Parameters) -> Parameters:
    """The same values as leaves that require grad, in the same memory."""
    return {name: each.detach().requires_grad_() for name, each in parameters.items()}


def flatten_tensors(tensors: Iterable[Tensor], task_dims: int = 0) -> Tensor:
    """Concatenate tensors to a vector.

    Args:
        tensors: of any shapes.
        task_dims: 1 for tensors with a first dimension of tasks: a vector for each task.
    """
    return torch.cat([tensor.flatten(task_dims) for tensor in tensors], -1)


def unflatten_tensors(vector: Tensor, like: Mapping[str, Tensor]) -> Parameters:
    """Split a vector, or that of each task, into tensors with the names and shapes of `like`."""
    tasks = vector.shape[:-1].numel()
    chunks = vector.split([each.numel() // tasks for each in like.values()], -1)
    return {
        name: chunk.view(each.shape)
        for (name, each), chunk in zip(like.items(), chunks, strict=True)
    }
