"""Implicit MAML (Rajeswaran, Finn, Kakade and Levine 2019, arXiv 1909.04630)."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from metadist.algorithms.inner_loop import (
    InnerLoopLearner,
    Parameters,
    detach_parameters,
    flat,
    unflat,
    with_gradient,
)
from metadist.algorithms.learner import TaskResult


class IMAML(InnerLoopLearner):
    """MAML whose meta-gradient depends on where the inner loop ends, not on its way there.

    In a task (equations 3 to 7 and algorithm 2 of the paper), from the initial parameters θ:

        φ ≈ the minimum of L(support; φ) + λ/2 |φ - θ|², by `inner_steps` steps from θ
        gradient = (I + H/λ)⁻¹ ∇φ L(query; φ), with H the Hessian of L(support; φ)

    The linear system is solved by `cg_steps` steps of conjugate gradient, each of which costs a
    product with H. Memory does not grow with the inner steps. The loss that is reported is the
    query loss of φ; its derivative by θ is the gradient above.

    Args:
        model: the network whose parameters are meta-learned.
        regression: targets are real numbers rather than classes.
        inner_lr: the size of an inner step.
        inner_steps: inner steps in training.
        eval_inner_steps: inner steps in evaluation. Default: as many as in training.
        strength: λ, how strongly φ is drawn to θ.
        cg_steps: the most steps of conjugate gradient; it ends earlier where the system is
            solved, or where H/λ has an eigenvalue below -1 in the direction that it takes.
        cg_damping: added to the diagonal of the system, for networks of which φ is no minimum;
            the authors' code takes 1, beside a damping of the inner problem that the paper has not.
        transductive: see `Learner`.
    """

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_lr: Annotated[float, Gt(0)] = 0.1,
        inner_steps: Annotated[int, Ge(1)] = 16,
        eval_inner_steps: Annotated[int, Ge(1)] | None = None,
        strength: Annotated[float, Gt(0)] = 2.0,
        cg_steps: Annotated[int, Ge(1)] = 5,
        cg_damping: Annotated[float, Ge(0)] = 0.0,
        transductive: bool = True,
    ) -> None:
        super().__init__(model, regression, inner_steps, eval_inner_steps, transductive)
        self.inner_lr = inner_lr
        self.strength = strength
        self.cg_steps = cg_steps
        self.cg_damping = cg_damping

    def train_task(self, episode: Any) -> TaskResult:
        """See the class."""
        start = self.initial()
        adapted = detach_parameters(self.adapt(start, episode.support, self.inner_steps))
        with torch.enable_grad():
            predictions = self.predict(adapted, episode.query.inputs)
            value = self.loss(predictions, episode.query.targets)
            outer = flat(torch.autograd.grad(value, list(adapted.values())))
            inner = flat(self.gradients(adapted, episode.support, create_graph=True).values())

        def times_system(vector: Tensor) -> Tensor:
            hessian = torch.autograd.grad(
                inner,
                list(adapted.values()),
                vector,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            return (1 + self.cg_damping) * vector + flat(hessian) / self.strength

        gradient = conjugate_gradient(times_system, outer, self.cg_steps)
        loss = with_gradient(value, start, unflat(gradient, start))
        return TaskResult(loss, self.metrics(predictions, episode.query.targets))

    @torch.no_grad()
    def trajectory(
        self, parameters: Parameters, support: Any, steps: int, create_graph: bool = False
    ) -> Iterator[Parameters]:
        """See `InnerLoopLearner`; nothing is ever differentiated through these steps."""
        start = parameters
        for _ in range(steps):
            gradients = self.gradients(parameters, support)
            parameters = {
                name: each
                - self.inner_lr * (gradients[name] + self.strength * (each - start[name]))
                for name, each in parameters.items()
            }
            yield parameters

    def method(self) -> dict[str, Any]:
        """The inner problem and how the linear system is solved."""
        return {
            "algorithm": "implicit MAML",
            "inner_lr": self.inner_lr,
            "strength": self.strength,
            "cg_steps": self.cg_steps,
            "cg_damping": self.cg_damping,
        }


def conjugate_gradient(
    times: Callable[[Tensor], Tensor], right: Tensor, steps: int, tolerance: float = 1e-10
) -> Tensor:
    """Solve `times(x) = right` for a symmetric positive definite `times`, from x = 0.

    Args:
        times: the product of the system's matrix with a vector.
        right: the right-hand side, shape (n,).
        steps: the most steps.
        tolerance: the residual, relative to the right-hand side, at which it is solved.

    Returns:
        Shape (n,). Where a direction shows that the matrix is not positive definite, the solution
        so far; the right-hand side itself if there is none.
    """
    solution = torch.zeros_like(right)
    residual = direction = right
    square = start = residual @ residual
    for step in range(steps):
        image = times(direction)
        curvature = direction @ image
        if curvature <= 0:
            return solution if step else right
        length = square / curvature
        solution = solution + length * direction
        residual = residual - length * image
        previous, square = square, residual @ residual
        if square <= tolerance**2 * start:
            break
        direction = residual + square / previous * direction
    return solution
