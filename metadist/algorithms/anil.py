"""ANIL: almost no inner loop (Raghu, Raghu, Bengio and Vinyals 2020, arXiv 1909.09157)."""

from typing import Annotated, Any, cast

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.func import functional_call

from metadist.algorithms.batch_norm import batch_norms_as_in_training
from metadist.algorithms.inner_loop import Parameters
from metadist.algorithms.learner import TaskResult, require_features
from metadist.algorithms.maml import MAML
from metadist.tasks import Episode


class ANIL(MAML):
    """MAML whose inner loop adapts the last layer only.

    With θ = (body, head), in a task (section 4.1 of the paper):

        head' ← head' - α ∇ L(support; body, head'), starting at head, `inner_steps` times
        loss = L(query; body, head')

    The meta-gradient with respect to body and head is differentiated through the steps. The
    features of a task are computed once, since the body is not adapted.

    There is no published code. `MAML` lists the differences from the code of MAML's authors.

    Args:
        model: a network with `features(inputs)` and a linear `head`.
        regression: regression instead of classification.
        inner_lr: α, the inner learning rate.
        inner_steps: inner steps in training.
        eval_inner_steps: inner steps in evaluation. Default: as many as in training.
        first_order: treat the inner gradients as constants.
        transductive: see `Learner`.

    Raises:
        UserError: the model lacks `features` or a linear `head`.
    """

    batches_tasks = True
    model: Any  # with `features` and `head`, see `require_features`

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_lr: Annotated[float, Gt(0)] = 0.1,
        inner_steps: Annotated[int, Ge(1)] = 5,
        eval_inner_steps: Annotated[int, Ge(1)] | None = None,
        first_order: bool = False,
        transductive: bool = True,
    ) -> None:
        super().__init__(
            model, regression, inner_lr, inner_steps, eval_inner_steps, first_order, transductive
        )
        require_features(model, "anil")

    def initial(self) -> Parameters:
        """The head's parameters; frozen ones as in `InnerLoopLearner`."""
        return self.without_frozen(dict(self.model.head.named_parameters()))

    def features(self, inputs: Tensor) -> Tensor:
        """Inputs of the head: (n, *input shape) -> (n, features)."""
        return cast(Tensor, self.model.features(inputs))

    def predict(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """Predictions from features: (n, features) -> (n, outputs)."""
        return functional_call(self.model.head, parameters, (inputs,))

    def train_task(self, episode: Episode) -> TaskResult:
        """See the class."""
        support = episode.support._replace(inputs=self.features(episode.support.inputs))
        head = self.adapt(self.initial(), support, self.inner_steps, not self.first_order)
        predictions = self.predict(head, self.features(episode.query.inputs))
        loss = self.loss(predictions, episode.query.targets)
        return TaskResult(loss, self.metrics(predictions, episode.query.targets))

    @torch.no_grad()
    def evaluate_task(self, episode: Episode) -> TaskResult:
        """See `InnerLoopLearner`."""
        with batch_norms_as_in_training(self.model):
            support = episode.support._replace(inputs=self.features(episode.support.inputs))
        queries = self.predict_queries(self.features, episode)
        targets = episode.query.targets
        return self.evaluate_trajectory(
            self.initial(), support, targets, lambda head: self.predict(head, queries)
        )
