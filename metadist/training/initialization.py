"""Initial weights from another run (`init_from`), also across algorithms."""

from collections.abc import Sequence
from pathlib import Path

from metadist.algorithms import Learner
from metadist.errors import UserError
from metadist.training.pretrained import find_weights
from metadist.training.resume import tested_checkpoint

_SHOWN = 6
"""How many names a message lists."""


def initialize(learner: Learner, path: str | Path) -> str:
    """Load the weights of another run into a learner: tensors of equal name and shape.

    Other tensors keep their initial values, such as the head of a model with another number of
    outputs, or the learning rates that another algorithm learns. Optimizer, scheduler and
    iteration are not loaded.

    Args:
        learner: changed in place.
        path: of a run directory, a checkpoint or a weights file, or the name of pretrained weights;
            see `tested_checkpoint`.

    Returns:
        One line that says what was and what was not loaded.

    Raises:
        UserError: there are no such weights, or none of the tensors fits.
    """
    file, contents = tested_checkpoint(find_weights(path))
    own, saved = learner.state_dict(), contents.get("learner") or {}
    shared = [name for name in saved if name in own]
    fitting = {name: saved[name] for name in shared if saved[name].shape == own[name].shape}
    if not fitting:
        raise UserError(
            f"init_from={path} has no tensor that fits {type(learner).__name__} and its model: "
            "choose the model, with the options, that the checkpoint was trained with."
        )
    learner.load_state_dict({**own, **fitting})
    parts = [
        f"initialized from {file} (iteration {contents.get('iteration')}): "
        f"{len(fitting)} of {len(own)} tensors loaded"
    ]
    parts += _listed("of another shape", [name for name in shared if name not in fitting])
    parts += _listed("not in the checkpoint", [name for name in own if name not in saved])
    parts += _listed("of the checkpoint not used", [name for name in saved if name not in own])
    return "; ".join(parts)


def _listed(what: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{what}: {', '.join(names[:_SHOWN])}{more}"]
