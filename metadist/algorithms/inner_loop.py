"""Base of the algorithms that take gradient steps in a task."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Annotated, Any

import torch
from annotated_types import Ge
from torch import Tensor, nn
from torch.func import functional_call
from torch.profiler import record_function

from metadist.algorithms.learner import Learner, TaskResult

Parameters = dict[str, Tensor]
"""Tensors under the names that the model's parameters have."""


class InnerLoopLearner(Learner):
    """A learner that adapts the model's parameters to the support set by gradient steps.

    A subclass writes `train_task` (a task's result in training) and `trajectory` (the steps, which
    evaluation takes as well).

    Args:
        model: the network whose parameters are meta-learned.
        regression: targets are real numbers rather than classes.
        inner_steps: steps in training.
        eval_inner_steps: steps in evaluation. Default: as many as in training.
        transductive: see `Learner`.
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

    def train_task(self, episode: Any) -> TaskResult:
        """The result of a task whose loss has the meta-gradient as its derivative."""
        raise NotImplementedError

    def trajectory(
        self, parameters: Parameters, support: Any, steps: int, create_graph: bool = False
    ) -> Iterator[Parameters]:
        """The parameters after each of `steps` steps that start at `parameters`.

        Args:
            parameters: where to start.
            support: the examples to adapt to.
            steps: how many.
            create_graph: keep what is needed to differentiate through the steps.
        """
        raise NotImplementedError

    def adapt(
        self, parameters: Parameters, support: Any, steps: int, create_graph: bool = False
    ) -> Parameters:
        """The end of the `trajectory`; its arguments are the same."""
        trajectory = self.trajectory(parameters, support, steps, create_graph)
        return functools.reduce(lambda _, each: each, trajectory, parameters)

    def protocol(self) -> dict[str, Any]:
        """Inner steps, in training and in evaluation."""
        return {"inner_steps": self.inner_steps, "eval_inner_steps": self.eval_inner_steps}

    def forward(self, episode: Any) -> TaskResult:
        """Adapt on `episode.support`, judge on `episode.query`."""
        return self.train_task(episode) if self.training else self.evaluate_task(episode)

    @torch.no_grad()
    def evaluate_task(self, episode: Any) -> TaskResult:
        """The result of a task in evaluation, with the metrics before any step as `…_before`."""

        def answers(parameters: Parameters) -> Tensor:
            return self.predict_queries(lambda inputs: self.predict(parameters, inputs), episode)

        return self.evaluate_trajectory(
            self.initial(), episode.support, episode.query.targets, answers
        )

    def evaluate_trajectory(
        self,
        start: Parameters,
        support: Any,
        targets: Tensor,
        answers: Callable[[Parameters], Tensor],
    ) -> TaskResult:
        """Evaluate a task before and after adaptation, and after each step if `evaluate_each_step`.

        Args:
            start: where the trajectory starts.
            support: the examples to adapt to.
            targets: of the queries.
            answers: parameters -> the queries' predictions.
        """
        predictions = answers(start)
        metrics = self.metrics(predictions, targets, "_before")
        last = self.eval_inner_steps
        trajectory = self.trajectory(start, support, last)
        for step, parameters in enumerate(trajectory, start=1):
            if step == last or self.evaluate_each_step:
                predictions = answers(parameters)
            if self.evaluate_each_step:
                metrics |= self.metrics(predictions, targets, f"_after_{step}")
        metrics = self.metrics(predictions, targets) | metrics
        return TaskResult(self.loss(predictions, targets), metrics, predictions)

    def initial(self) -> Parameters:
        """The parameters that a task starts from, those that are adapted."""
        return dict(self.model.named_parameters())

    def predict(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """The model's predictions with other parameters: (n, *input shape) -> (n, outputs)."""
        return functional_call(self.model, parameters, (inputs,))

    def gradients(
        self, parameters: Parameters, examples: Any, create_graph: bool = False
    ) -> Parameters:
        """The derivative of the examples' loss by the parameters.

        Args:
            parameters: where to differentiate.
            examples: with `inputs` and `targets`.
            create_graph: the derivative can be differentiated again; else it is a constant.
        """
        with torch.enable_grad():
            if not create_graph:
                parameters = detach_parameters(parameters)
            loss = self.loss(self.predict(parameters, examples.inputs), examples.targets)
            # Of batched tasks, each loss depends on its own parameters alone.
            with record_function("metadist::inner_gradient"):
                found = torch.autograd.grad(
                    loss.sum(), list(parameters.values()), create_graph=create_graph
                )
        return dict(zip(parameters, found, strict=True))


def detach_parameters(parameters: Parameters) -> Parameters:
    """Detached leaf copies that require grad."""
    return {name: each.detach().requires_grad_() for name, each in parameters.items()}


def with_gradient(value: Tensor, parameters: Parameters, gradient: Parameters) -> Tensor:
    """A scalar of the given value whose derivative by the parameters is the given gradient.

    It is how an algorithm that computes its meta-gradient by itself hands it to the optimizer.

    Args:
        value: what the scalar shall be.
        parameters: the learner's parameters.
        gradient: the derivative, of the same names and shapes.
    """
    products = [(parameters[name] * each.detach()).sum() for name, each in gradient.items()]
    carrier = torch.stack(products).sum()
    return value.detach() + (carrier - carrier.detach())


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors as one vector."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflat(vector: Tensor, like: Mapping[str, Tensor]) -> Parameters:
    """A vector's pieces under the names and in the shapes of `like`."""
    pieces = vector.split([each.numel() for each in like.values()])
    return {
        name: piece.view_as(each) for (name, each), piece in zip(like.items(), pieces, strict=True)
    }
