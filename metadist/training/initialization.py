"""Initial weights from another run (`init_from`), also across algorithms."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from metadist.algorithms import Learner
from metadist.errors import UserError
from metadist.training.pretrained import find_weights
from metadist.training.saved_state import split_differences, tested_checkpoint

_SHOWN = 6
"""How many names a message lists."""


def initialize(
    learner: Learner, path: str | Path, protocol: Mapping[str, Any] | None = None
) -> tuple[str, str | None]:
    """Load the weights of another run into a learner: tensors of equal name and shape.

    Other tensors keep their initial values, such as the head of a model with another number of
    outputs, or the learning rates that another algorithm learns. `Learner.convert_state` may change
    shapes first: each inner step of MAML++ gets the batch norms of a model without steps. Buffers
    such as running statistics and the second moments of Reptile's inner Adam are loaded;
    optimizer, scheduler and iteration are not.

    Args:
        learner: the learner, which is changed in place.
        path: path of a run directory, a checkpoint or a weights file, or the name of pretrained
            weights; see `tested_checkpoint`.
        protocol: protocol of the tasks on which the learner will be tested.

    Returns:
        One line that says which tensors were loaded and which were not; and a warning if the
        weights were trained on another division of the dataset's classes, or if most tensors do not
        fit, else None.

    Raises:
        UserError: there are no such weights, or none of the tensors fits.
    """
    file, contents = tested_checkpoint(find_weights(path))
    # Without the values of `get_extra_state`, which belong to the modules' own training.
    initial = _tensors(learner.state_dict())
    saved = _tensors(learner.convert_state(contents.get("learner") or {}))
    shared = [name for name in saved if name in initial]
    fitting = {name: saved[name] for name in shared if saved[name].shape == initial[name].shape}
    # Buffers of the algorithm belong together, such as Adam's moments and its number of steps.
    buffers = {name for name, _ in learner.named_buffers(recurse=False) if name in initial}
    if buffers - fitting.keys():
        fitting = {name: tensor for name, tensor in fitting.items() if name not in buffers}
    if not fitting:
        raise UserError(
            f"init_from={path} has no tensor that fits {type(learner).__name__} and its model: "
            "choose the model, with the options, that the checkpoint was trained with."
        )
    learner.load_state_dict({**learner.state_dict(), **fitting})
    parts = [
        f"initialized from {file} (iteration {contents.get('iteration')}): "
        f"{len(fitting)} of {len(initial)} tensors loaded"
    ]
    parts += _listed("of another shape", [name for name in shared if name not in fitting])
    parts += _listed("not in the checkpoint", [name for name in initial if name not in saved])
    parts += _listed("of the checkpoint not used", [name for name in saved if name not in initial])
    warning = _warning(path, contents.get("protocol") or {}, protocol or {})
    if warning is None and 2 * len(fitting) < len(initial):
        warning = (
            f"init_from={path}: {len(fitting)} of {len(initial)} tensors fit, and the others start "
            "untrained: check that the options of the model are those of that run"
        )
    return "; ".join(parts), warning


def _tensors(state: Mapping[str, Any]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if isinstance(tensor, Tensor)}


def _warning(path: str | Path, training: Mapping[str, Any], test: Mapping[str, Any]) -> str | None:
    different = split_differences(training, test)
    if not different:
        return None
    return (
        f"init_from={path} was trained on another division of the classes ({', '.join(different)}):"
        " it may have seen classes of the test, whose result is then too good; "
        "choose the dataset options that it was trained with"
    )


def _listed(description: str, names: Sequence[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return [f"{description}: {', '.join(names[:_SHOWN])}{more}"]
