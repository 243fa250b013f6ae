"""The defaults of the user's own classes, which results and checkpoints record.

Without them, a default that was changed in the code between two runs would go unnoticed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from metadist.config.instantiate import option_defaults

_LIBRARIES = ("metadist", "torch", "torchvision", "timm")
"""Packages whose classes are not the user's own."""

GIVEN: Mapping[str, tuple[str, ...]] = {
    "algorithm": ("model", "regression"),
    "dataset": (),
    "model": ("input_shape", "outputs"),
    "optimizer": ("params", "named_parameters"),
    "reducer": (),
    "scheduler": ("optimizer",),
    "task": ("dataset", "sampled_splits"),
}
"""The groups whose options determine results, and the arguments that `metadist.config.build` gives
their classes, which are no options."""


def own_defaults(
    configuration: Mapping[str, Any], locate: Callable[[str, str], Any]
) -> dict[str, Any]:
    """The defaults of the options of the user's own classes, by group and name.

    Args:
        configuration: the resolved configuration, as plain containers.
        locate: the function that imports the targets; see `instantiate`.
    """

    def of(node: Any, path: str) -> dict[str, Any]:
        if not isinstance(node, Mapping) or "_target_" not in node:
            return {}
        if str(node["_target_"]).partition(".")[0] in _LIBRARIES:
            return {}
        return option_defaults(node, path, GIVEN.get(path, ()), locate)

    callbacks = configuration.get("callbacks") or {}
    defaults: dict[str, Any] = {group: of(configuration.get(group), group) for group in GIVEN}
    defaults["callbacks"] = {name: of(n, f"callbacks.{name}") for name, n in callbacks.items()}
    return {group: options for group, options in defaults.items() if options}


def with_defaults(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Nested values with the defaults for those that are missing.

    Args:
        values: the configuration.
        defaults: the value of `own_defaults`.
    """
    missing = {key: value for key, value in defaults.items() if key not in values}
    nested = {
        key: with_defaults(value, defaults[key])
        if isinstance(value, Mapping) and isinstance(defaults.get(key), Mapping)
        else value
        for key, value in values.items()
    }
    return nested | missing
