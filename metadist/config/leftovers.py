"""What is left of an option when the command line puts another target in its place."""

import inspect
from collections.abc import Sequence

from omegaconf import DictConfig, OmegaConf, open_dict

from metadist.config.nodes import find_target

_TARGET = "._target_"


def drop_leftovers(configuration: DictConfig, overrides: Sequence[str]) -> None:
    """Drop the keys of replaced targets, in place.

    `algorithm._target_=my_module.MyAlgorithm` puts a class of the user's where the option
    `algorithm=maml` has MAML: the option's other keys go, but for those that the class takes.
    Keys that the command line sets stay in any case, so that a misspelt one is still refused.

    Args:
        configuration: composed by Hydra.
        overrides: the words of the command line that it was composed with.

    Raises:
        UserError: a target that cannot be imported.
    """
    words = [word.lstrip("+~").partition("=") for word in overrides]
    given = {key for key, _, _ in words}
    for key, _, target in words:
        path = key.removesuffix(_TARGET)
        node = OmegaConf.select(configuration, path) if key.endswith(_TARGET) else None
        if not isinstance(node, DictConfig):
            continue
        taken = inspect.signature(find_target(target, path)).parameters.values()
        if any(parameter.kind is parameter.VAR_KEYWORD for parameter in taken):
            continue
        kept = {"_target_", *(parameter.name for parameter in taken)}
        kept |= {each.removeprefix(f"{path}.").split(".")[0] for each in given}
        with open_dict(node):
            for name in [name for name in node if name not in kept]:
                del node[name]
