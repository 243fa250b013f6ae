"""Implicit MAML (Rajeswaran, Finn, Kakade and Levine 2019, arXiv 1909.04630)."""

from collections.abc import Callable, Iterator
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from metadist.algorithms.inner_loop import (
    InnerLoopLearner,
    Parameters,
    detach_parameters,
    flatten_tensors,
    unflatten_tensors,
)
from metadist.algorithms.learner import TaskResult
from metadist.gradients import with_gradients
from metadist.tasks import Episode, Examples

_TOLERANCE = 1e-10
"""Norm of the residual, relative to that of the right-hand side, at which a system is solved."""


class IMAML(InnerLoopLearner):
    """MAML with the implicit meta-gradient at the end of the inner loop.

    In a task (equations 3 to 7 and algorithm 2 of the paper), from the initial parameters θ:

        φ ≈ the minimum of L(support; φ) + λ/2 |φ - θ|², by `inner_steps` steps from θ
        gradient = (I + H/λ)⁻¹ ∇φ L(query; φ), with H the Hessian of L(support; φ)

    The linear system is solved by `cg_steps` steps of conjugate gradient, each with one
    Hessian-vector product. Memory does not grow with the inner steps. The reported loss is the
    query loss of φ; its gradient with respect to θ is the one above.

    The authors' code (github.com/aravindr93/imaml_dev) differs from the paper. It corresponds to
    `proximal_step="last"`, `cg_damping=1` and `cg_proximal_offset=10`, with ε = 1e-3 in the outer
    Adam. Not offered: its larger initial weights (gain 1.73, also in the head) and biases (uniform
    up to 0.05), and the Hessian-free inner optimizer of the paper, which is not in the code. On
    Omniglot, the authors' images are not inverted, training uses all 1,200 characters and a fixed
    list of tasks, and the released test script splits the characters with another seed than
    training, so that 310 of its 423 test characters were trained on.

    Args:
        model: the network whose parameters are meta-learned.
        regression: regression instead of classification.
        inner_lr: inner learning rate.
        inner_steps: inner steps in training.
        eval_inner_steps: inner steps in evaluation. Default: as many as in training.
        proximal_weight: λ, the weight of the proximal term.
        proximal_step: "each": every inner step descends the loss with the proximal term, in
            training and in evaluation. "last": the inner steps descend the loss alone; in training
            a further step on the proximal term follows, φ ← φ - inner_lr λ (φ - θ).
        cg_steps: maximum steps of conjugate gradient, which stops earlier at convergence or at
            negative curvature.
        cg_damping: a constant added to the diagonal of the system, in case φ is not a minimum.
        cg_proximal_offset: a constant added to λ in the linear system only.
        transductive: see `Learner`.
    """

    batches_tasks = True
    training_options = ("inner_steps", "cg_steps", "cg_damping", "cg_proximal_offset")

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_lr: Annotated[float, Gt(0)] = 0.1,
        inner_steps: Annotated[int, Ge(1)] = 16,
        eval_inner_steps: Annotated[int, Ge(1)] | None = None,
        proximal_weight: Annotated[float, Gt(0)] = 2.0,
        cg_steps: Annotated[int, Ge(1)] = 5,
        cg_damping: Annotated[float, Ge(0)] = 0.0,
        transductive: bool = True,
        proximal_step: Literal["each", "last"] = "each",
        cg_proximal_offset: Annotated[float, Ge(0)] = 0.0,
    ) -> None:
        super().__init__(model, regression, inner_steps, eval_inner_steps, transductive)
        self.inner_lr = inner_lr
        self.proximal_weight = proximal_weight
        self.proximal_step = proximal_step
        self.cg_proximal_offset = cg_proximal_offset
        self.cg_steps = cg_steps
        self.cg_damping = cg_damping

    def train_task(self, episode: Episode) -> TaskResult:
        """See the class."""
        start = self.initial()
        adapted = self.adapt(start, episode.support, self.inner_steps)
        if self.proximal_step == "last":
            shrink = self.inner_lr * self.proximal_weight
            adapted = {name: p - shrink * (p - start[name]) for name, p in adapted.items()}
        adapted = detach_parameters(adapted)
        with torch.enable_grad():
            predictions = self.predict(adapted, episode.query.inputs)
            value = self.loss(predictions, episode.query.targets)
            task_dims = value.dim()
            derivatives = torch.autograd.grad(
                value.sum(), list(adapted.values()), allow_unused=True, materialize_grads=True
            )
            outer = flatten_tensors(derivatives, task_dims)
            inner = flatten_tensors(
                self.gradients(adapted, episode.support, create_graph=True).values(), task_dims
            )

        system_weight = self.proximal_weight + self.cg_proximal_offset

        def system_product(vector: Tensor) -> Tensor:
            hessian_product = torch.autograd.grad(
                inner,
                list(adapted.values()),
                vector,
                retain_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            flat = flatten_tensors(hessian_product, task_dims)
            return (1 + self.cg_damping) * vector + flat / system_weight

        gradient = conjugate_gradient(system_product, outer, self.cg_steps)
        loss = with_gradients(
            value, list(start.values()), list(unflatten_tensors(gradient, start).values())
        )
        return TaskResult(loss, self.metrics(predictions, episode.query.targets))

    def initial(self) -> Parameters:
        """See `InnerLoopLearner`; the parameters that are trainable now."""
        return self.without_frozen(dict(self.model.named_parameters()))

    @torch.no_grad()
    def trajectory(
        self, parameters: Parameters, support: Examples, steps: int, create_graph: bool = False
    ) -> Iterator[Parameters]:
        """See `InnerLoopLearner`; the steps are never differentiated."""
        start = parameters
        weight = self.proximal_weight if self.proximal_step == "each" else 0.0
        for _ in range(steps):
            gradients = self.gradients(parameters, support)
            parameters = {
                name: p - self.inner_lr * (gradients[name] + weight * (p - start[name]))
                for name, p in parameters.items()
            }
            yield parameters

    @property
    def algorithm_name(self) -> str:
        """See `Learner`."""
        return "implicit MAML"


def conjugate_gradient(matvec: Callable[[Tensor], Tensor], b: Tensor, steps: int) -> Tensor:
    """Solve A x = b for symmetric positive definite A, from x = 0.

    Args:
        matvec: the product x -> A x.
        b: the right-hand side, shape (n,), or (tasks, n) with one system per task.
        steps: maximum number of steps.

    Returns:
        x, with the shape of b. At negative curvature, the solution so far, or b in the first step;
        NaN if a product is NaN.
    """
    solution = torch.zeros_like(b)
    residual = direction = b
    square = start = b.square().sum(-1, keepdim=True)
    active = torch.ones_like(start, dtype=torch.bool)
    for step in range(steps):
        product = matvec(direction)
        curvature = (direction * product).sum(-1, keepdim=True)
        if step == 0:
            solution = torch.where(curvature > 0, solution, b)
        solution = torch.where(active & curvature.isnan(), curvature, solution)
        active = active & (curvature > 0)
        step_size = square / curvature
        solution = torch.where(active, solution + step_size * direction, solution)
        residual = torch.where(active, residual - step_size * product, residual)
        previous, square = square, residual.square().sum(-1, keepdim=True)
        active = active & (square > _TOLERANCE**2 * start)
        # On a GPU the check would synchronize, and a recorded step cannot depend on values. Further
        # steps do not change solved systems.
        if not active.is_cuda and not _is_recorded() and not active.any():
            break
        direction = residual + square / previous * direction
    return solution


def _is_recorded() -> bool:
    """Whether `make_fx` records the operations of this thread."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode  # takes time to import

    return get_proxy_mode() is not None
