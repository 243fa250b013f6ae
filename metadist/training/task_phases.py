"""A task's phases for a profile, told from what the model is shown: algorithms say nothing.

Whoever is given the support inputs begins the support pass, and the loss on the support targets
ends it: what follows, up to the next look at inputs of the task, adapts (inner gradient and
update). The query inputs begin the query pass.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from metadist.algorithms import Learner
from metadist.distributed.phases import Phase, change_phase, is_recorded, phase


@contextlib.contextmanager
def told_apart(learner: Learner, episode: Any) -> Iterator[None]:
    """In a recorded step, the learner's pass through a task as the phases support, adapt, query.

    What comes before the first look at either set, and the pass of an algorithm that shows the
    model both in one batch, is the phase "task".

    Args:
        learner: the module that is called.
        episode: what it is called with.
    """
    if not is_recorded():
        yield
        return
    support, query = episode.support, episode.query
    loss, now = learner.loss, "task"

    def begin(name: Phase) -> None:
        nonlocal now
        if now != name:  # the model's first layer is shown what the model is shown
            now = name
            change_phase(name)

    def looks(module: nn.Module, inputs: tuple) -> None:
        first = inputs[0] if inputs else None
        if first is support.inputs:
            begin("support")
        elif first is query.inputs:
            begin("query")

    def judged(predictions: Tensor, targets: Tensor) -> Tensor:
        found = loss(predictions, targets)
        if targets is support.targets:
            begin("adapt")
        return found

    hook = register_module_forward_pre_hook(looks)
    learner.loss = judged
    try:
        with phase("task"):
            yield
    finally:
        hook.remove()
        del learner.loss
