"""Models whose last layer can be told from the rest."""

from torch import nn

from metadist.errors import UserError


def require_embedding(model: nn.Module, algorithm: str) -> None:
    """Check that a model has `features(inputs)` and a linear `head`.

    Args:
        model: the network.
        algorithm: the algorithm's name in the configuration.

    Raises:
        UserError: it has not.
    """
    if hasattr(model, "features") and isinstance(getattr(model, "head", None), nn.Linear):
        return
    raise UserError(
        f"algorithm={algorithm} needs a model with features() and a linear head, which "
        f"{type(model).__name__} lacks: choose model=conv4 or mlp."
    )
