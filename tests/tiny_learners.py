"""Small learners in training mode, with tasks for them."""

import torch

from metadist.algorithms import MAML
from metadist.models import MLP, Conv4
from metadist.tasks import FewShotTasks, Glyphs, Sinusoid


def sinusoid(inner_steps: int = 2) -> tuple[MAML, FewShotTasks]:
    """MAML with an MLP for 5-point sine waves."""
    torch.manual_seed(0)
    model = MLP((1,), 1, hidden=[8], batch_norm=False)
    return MAML(model, True, 0.01, inner_steps).train(), FewShotTasks(Sinusoid(), 1, 5, 5)


def glyphs(algorithm: type[MAML] = MAML) -> tuple[MAML, FewShotTasks]:
    """An algorithm with a narrow conv4 for 3-way 1-shot tasks of glyphs."""
    torch.manual_seed(0)
    sizes = {"train_classes": 6, "validation_classes": 5, "test_classes": 5, "examples": 4}
    tasks = FewShotTasks(Glyphs(**sizes), 3, 1, 2)
    return algorithm(Conv4((1, 28, 28), 3, filters=4), inner_steps=2).train(), tasks
