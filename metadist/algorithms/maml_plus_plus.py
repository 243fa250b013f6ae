"""MAML++ (Antoniou, Edwards and Storkey 2019, arXiv 1810.09502)."""

from collections.abc import Iterator, Mapping
from typing import Annotated

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from metadist.algorithms.inner_loop import InnerLoopLearner, Parameters
from metadist.algorithms.learner import TaskResult
from metadist.errors import UserError
from metadist.tasks import Episode, Examples


class MAMLPlusPlus(InnerLoopLearner):
    """MAML with the improvements of "How to train your MAML", section 4.

    In a task, with K = `inner_steps` and θ_0 = θ, for i = 0 … K - 1:

        θ_{i+1} = θ_i - α_i ∘ ∇ L(support; θ_i, norms_i)
        loss = Σ_i v_i L(query; θ_{i+1}, norms_i)

    - Per-layer per-step learning rates: α_i has one rate per tensor of the model. Learned rates
      may become negative.
    - Per-step batch norm: norms_i are the batch-norm layers of step i. Their weights are
      meta-learned and not adapted by inner steps. If they keep running statistics
      (`model.running_statistics=true`), the queries in evaluation are normalized with them; else,
      as in the authors' code, with batch statistics.
    - Multi-step loss: all v_i are 1/K in the first iteration; all but the last decay linearly to
      0 at `multi_step_iterations`.
    - Derivative-order annealing: first order in the first `first_order_iterations`.
    - Cosine annealing of the outer learning rate: `scheduler=cosine`.

    Evaluation steps beyond K use the rates and norms of step K - 1.

    The iterations are counted in a buffer: each task adds one, and buffers are averaged over the
    meta-batch. Like every buffer it is sent to all workers and saved in checkpoints, so that
    schedules continue after a restart.

    Differences from the authors' code (github.com/AntreasAntoniou/HowToTrainYourMAMLPytorch):

    - The networks there have LeakyReLU instead of ReLU.
    - Omniglot's characters there are divided into 1150, 50 and 423, here into 1100, 100 and 423.
    - Omniglot's images there are not inverted.
    - The head's initial weights there are Glorot uniform; here their standard deviation is 0.01.
    - Loss weights and the outer learning rate change once an epoch of 500 iterations there; here in
      every iteration.
    - The authors test an ensemble of the five checkpoints with the best validation, and average
      logits; `metadist evaluate` with several `--checkpoint` averages probabilities, and a run
      keeps its newest checkpoints (`trainer.keep_checkpoints`) and its best one.

    Args:
        model: the network whose parameters are meta-learned. Parameters and statistics of its
            batch norms get a first dimension of steps.
        regression: regression instead of classification.
        inner_lr: initial value of every rate.
        inner_steps: K, the inner steps in training.
        eval_inner_steps: inner steps in evaluation. Default: as many as in training.
        multi_step_iterations: iterations until the loss is that of the last step only.
        first_order_iterations: iterations with first-order gradients.
        transductive: see `Learner`.

    Raises:
        UserError: no parameter is trainable but those of batch norms.
    """

    batches_tasks = True
    batches_buffers = True
    # The rates of a test are those of the checkpoint.
    training_options = (
        "inner_lr", "inner_steps", "multi_step_iterations", "first_order_iterations",
    )  # fmt: skip
    iteration: Tensor  # a buffer

    def __init__(
        self,
        model: nn.Module,
        regression: bool = False,
        inner_lr: Annotated[float, Gt(0)] = 0.1,
        inner_steps: Annotated[int, Ge(1)] = 5,
        eval_inner_steps: Annotated[int, Ge(1)] | None = None,
        multi_step_iterations: Annotated[int, Ge(0)] = 5000,
        first_order_iterations: Annotated[int, Ge(0)] = 25000,
        transductive: bool = True,
    ) -> None:
        super().__init__(model, regression, inner_steps, eval_inner_steps, transductive)
        self.multi_step_iterations = multi_step_iterations
        self.first_order_iterations = first_order_iterations
        self._norm_tensors = repeat_batch_norms(model, inner_steps)
        self.adapted_names = [name for name in self.adapted_names if name not in self._norm_tensors]
        if not self.adapted_names:
            raise UserError(
                "MAML++ adapts all trainable parameters but those of batch norms, and the model "
                "has no others: leave another one trainable."
            )
        self._step_index = 0
        like = next(parameter for parameter in model.parameters() if parameter.requires_grad)
        self.rates = nn.Parameter(like.new_full((len(self.adapted_names), inner_steps), inner_lr))
        # Not a weight: checkpoints have it, `init_from` does not load it.
        self.register_buffer("iteration", torch.zeros((), dtype=torch.int64), persistent=False)

    def initial(self) -> Parameters:
        """The parameters that inner steps adapt; selects the norms of the first step."""
        self._step_index = 0
        return super().initial()

    def predict(self, parameters: Parameters, inputs: Tensor) -> Tensor:
        """See `InnerLoopLearner`; with the norms of the selected step."""
        axis = self.iteration.dim()  # 1 for batched tasks, which have their own buffers
        tensors = dict(self.model.named_parameters()) | dict(self.model.named_buffers())
        norms = {name: tensors[name].select(axis, self._step_index) for name in self._norm_tensors}
        return super().predict(parameters | norms, inputs)

    def train_task(self, episode: Episode) -> TaskResult:
        """See the class."""
        iteration = int(self.iteration.max())  # the same in all tasks
        second_order = iteration >= self.first_order_iterations
        parameters = self.initial()
        losses = []
        for step, weight in enumerate(self.loss_weights(iteration)):
            parameters = self._step(parameters, episode.support, step, second_order)
            if weight:
                predictions = self.predict(parameters, episode.query.inputs)
                losses.append(weight * self.loss(predictions, episode.query.targets))
        self.iteration += 1
        metrics = self.metrics(predictions, episode.query.targets)
        # Not torch.sum, whose order of addition depends on the number of tasks.
        return TaskResult(sum(losses[1:], losses[0]), metrics)

    def loss_weights(self, iteration: int) -> list[float]:
        """v_0 … v_{K-1} in an iteration, counted from 0; their sum is 1."""
        steps, annealed = self.inner_steps, 1.0
        if iteration < self.multi_step_iterations:
            annealed = iteration / self.multi_step_iterations
        early = (1 - annealed) / steps
        return [early] * (steps - 1) + [1 - early * (steps - 1)]

    def trajectory(
        self, parameters: Parameters, support: Examples, steps: int, create_graph: bool = False
    ) -> Iterator[Parameters]:
        """See `InnerLoopLearner`; the norms of the last step stay selected."""
        for step in range(steps):
            parameters = self._step(parameters, support, step, create_graph)
            yield parameters

    def _step(
        self, parameters: Parameters, support: Examples, step: int, create_graph: bool
    ) -> Parameters:
        self._step_index = min(step, self.inner_steps - 1)
        gradients = self.gradients(parameters, support, create_graph)
        step_rates = self.rates[..., self._step_index].unbind(-1)
        rates = dict(zip(self.adapted_names, step_rates, strict=True))
        return {
            name: parameter - _like(rates[name], parameter) * gradients[name]
            for name, parameter in parameters.items()
        }

    def convert_state(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See `Learner`; batch norms that are the same in all steps are copied to every step."""
        own_state, converted = self.state_dict(), dict(state)
        for name in (f"model.{tensor_name}" for tensor_name in self._norm_tensors):
            if name in state and state[name].shape == own_state[name].shape[1:]:
                converted[name] = _repeat(state[name], self.inner_steps)
        return converted

    @property
    def algorithm_name(self) -> str:
        """See `Learner`."""
        return "MAML++"


def repeat_batch_norms(model: nn.Module, steps: int) -> list[str]:
    """Repeat parameters and statistics of a model's batch norms for each step, in place.

    Args:
        model: the network. Its batch norms must be called with the tensors of one step.
        steps: number of copies, in a new first dimension.

    Returns:
        The names of the repeated parameters and buffers.
    """
    names = []
    shared: dict[nn.Parameter, nn.Parameter] = {}
    for prefix, module in list(model.named_modules()):
        if not isinstance(module, _BatchNorm):
            continue
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter not in shared:
                names.append(f"{prefix}.{name}".lstrip("."))
                repeated = nn.Parameter(_repeat(parameter, steps), parameter.requires_grad)
                shared[parameter] = repeated
            setattr(module, name, shared[parameter])
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, _repeat(buffer, steps))
            names.append(f"{prefix}.{name}".lstrip("."))
    return names


def _repeat(tensor: Tensor, steps: int) -> Tensor:
    return torch.stack([tensor.detach()] * steps)


def _like(rate: Tensor, parameter: Tensor) -> Tensor:
    """A rate, or a rate per task, in the type of a parameter, and to be broadcast over it."""
    return rate.view(rate.shape + (1,) * (parameter.dim() - rate.dim())).to(parameter.dtype)
