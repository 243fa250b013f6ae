"""Model-agnostic meta-learning (Finn, Abbeel and Levine 2017, arXiv 1703.03400)."""

from collections.abc import Iterator
from typing import Annotated

from annotated_types import Ge, Gt
from torch import nn

from metadist.algorithms.inner_loop import (
    AdaptedParameters,
    InnerLoopLearner,
    Parameters,
    adapted_names,
)
from metadist.algorithms.learner import TaskResult
from metadist.errors import UserError
from metadist.tasks import Episode, Examples


class MAML(InnerLoopLearner):
    """Learn initial parameters that adapt to a new task in a few gradient steps.

    In a task, from the initial parameters θ (algorithm 1 and equation 1 of the paper):

        φ ← φ - α ∇φ L(support; φ), starting at φ = θ, `inner_steps` times
        loss = L(query; φ)

    The meta-gradient ∇θ loss is differentiated through the steps (second order) or treats each ∇φ
    as a constant (`first_order`).

    Differences from the authors' code (github.com/cbfinn/maml):

    - The loss is a mean over examples; there its sum over the classes is differentiated, so that an
      inner learning rate there acts as `ways` times its value here.
    - All parameters are adapted. There batch norm has no scale, its shift is meta-learned but not
      adapted, and its ε is 1e-3 instead of 1e-5.
    - The head's initial weights have a standard deviation of 0.01; there it is 1 on Omniglot, and
      they are Glorot uniform on MiniImageNet. The sinusoid's network there starts from weights of
      standard deviation 0.01 and biases of 0; here from PyTorch's.
    - Strided convolutions there pad unevenly (TensorFlow's "SAME"); here by a pixel on both sides.
    - Training there visits a fixed list of 200,000 tasks repeatedly; here every task is new.

    Args:
        model: the network whose parameters are meta-learned.
        regression: regression instead of classification.
        inner_lr: α, the inner learning rate.
        inner_steps: inner steps in training. With 0 one network is trained on all tasks and
            adapted in evaluation only, in `eval_inner_steps`: the paper's pretrained baseline,
            whose step size is tuned there.
        eval_inner_steps: inner steps in evaluation. Default: as many as in training.
        first_order: drop the second derivatives.
        transductive: see `Learner`.
        adapt: the parameters that inner steps adapt: "all", "no_norm", "head" or "body"; see
            `adapted_names`. The others are meta-learned and the same in all tasks.

    Raises:
        UserError: `adapt` does not fit the model.
    """

    batches_tasks = True
    training_options: tuple[str, ...] = ("inner_steps", "first_order")

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_lr: Annotated[float, Gt(0)] = 0.4,
        inner_steps: Annotated[int, Ge(0)] = 1,
        eval_inner_steps: Annotated[int, Ge(1)] | None = None,
        first_order: bool = False,
        transductive: bool = True,
        adapt: AdaptedParameters = "all",
    ) -> None:
        super().__init__(model, regression, inner_steps, eval_inner_steps, transductive)
        self.adapted_names = adapted_names(model, adapt)
        self.inner_lr = inner_lr
        self.first_order = first_order

    def train_task(self, episode: Episode) -> TaskResult:
        """See the class."""
        adapted = self.adapt(
            self.initial(), episode.support, self.inner_steps, not self.first_order
        )
        predictions = self.predict(adapted, episode.query.inputs)
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets))

    def trajectory(
        self, parameters: Parameters, support: Examples, steps: int, create_graph: bool = False
    ) -> Iterator[Parameters]:
        """See `InnerLoopLearner`.

        Raises:
            UserError: a subclass's `step` did not return all parameters.
        """
        for _ in range(steps):
            adapted = self.step(parameters, self.gradients(parameters, support, create_graph))
            if adapted is None:
                raise UserError(
                    f"{type(self).__name__}.step returned None: return all parameters by name."
                )
            if different := adapted.keys() ^ parameters.keys():
                raise UserError(
                    f"{type(self).__name__}.step returned other parameters than it was given "
                    f"({min(different)}): return all of them, also those that it does not change."
                )
            parameters = adapted
            yield parameters

    def step(self, parameters: Parameters, gradients: Parameters) -> Parameters:
        """φ - α ∇φ L(support; φ), given φ and its gradient."""
        return {name: p - self.inner_lr * gradients[name] for name, p in parameters.items()}

    @property
    def algorithm_name(self) -> str:
        """See `Learner`; the name depends on `first_order` and `inner_steps`."""
        if not self.inner_steps:
            return "pretrained on all tasks"
        return "FOMAML" if self.first_order else "MAML"
