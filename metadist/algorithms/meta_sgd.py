"""Meta-SGD: learned initial parameters and learning rates (Li et al. 2017, arXiv 1707.09835)."""

from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import nn

from metadist.algorithms.inner_loop import AdaptedParameters, Parameters
from metadist.algorithms.maml import MAML
from metadist.errors import UserError


class MetaSGD(MAML):
    """MAML with a learned inner learning rate for each adapted parameter.

    In a task (algorithm 1 of the paper), with a vector of rates α of the size of θ and the
    elementwise product ∘:

        φ = θ - α ∘ ∇θ L(support; θ)
        loss = L(query; φ)

    Both θ and α are parameters of the learner; rates may become negative. The paper takes one
    step; further steps use the same rates.

    There is no published code. The paper's network for images has a further layer of 32 features,
    and its rates are drawn at random: `inner_lr=0.005`, `inner_lr_max=0.1`.

    Args:
        model: the network whose parameters are meta-learned.
        regression: regression instead of classification.
        inner_lr: initial value of every rate.
        inner_lr_max: draw each initial rate uniformly from [inner_lr, inner_lr_max] instead; the
            paper draws from [0.005, 0.1].
        inner_steps: inner steps in training.
        eval_inner_steps: inner steps in evaluation. Default: as many as in training.
        first_order: treat the inner gradients as constants.
        transductive: see `Learner`.
        adapt: see `MAML`.

    Raises:
        UserError: `inner_lr_max` is below `inner_lr`, or `adapt` does not fit the model.
    """

    batches_tasks = True
    # The rates of a test are those of the checkpoint.
    training_options = (*MAML.training_options, "inner_lr", "inner_lr_max")

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_lr: Annotated[float, Gt(0)] = 0.1,
        inner_steps: Annotated[int, Ge(1)] = 1,
        eval_inner_steps: Annotated[int, Ge(1)] | None = None,
        first_order: bool = False,
        transductive: bool = True,
        inner_lr_max: Annotated[float, Gt(0)] | None = None,
        adapt: AdaptedParameters = "all",
    ) -> None:
        if inner_lr_max is not None and inner_lr_max < inner_lr:
            raise UserError(
                f"algorithm.inner_lr_max={inner_lr_max} is below algorithm.inner_lr={inner_lr}: "
                "give the upper end of the interval, or null for equal rates."
            )
        super().__init__(
            model,
            regression,
            inner_lr,
            inner_steps,
            eval_inner_steps,
            first_order,
            transductive,
            adapt,
        )
        start = self.initial()
        self.rated_names = list(start)
        self.rates = nn.ParameterList(
            torch.full_like(parameter, inner_lr)
            if inner_lr_max is None
            else torch.empty_like(parameter).uniform_(inner_lr, inner_lr_max)
            for parameter in start.values()
        )

    def step(self, parameters: Parameters, gradients: Parameters) -> Parameters:
        """φ - α ∘ ∇φ L(support; φ), given φ and its gradient."""
        rates = dict(zip(self.rated_names, self.rates, strict=True))
        return {name: p - rates[name] * gradients[name] for name, p in parameters.items()}

    @property
    def algorithm_name(self) -> str:
        """See `Learner`."""
        return "Meta-SGD"
