"""Options that the command line replaces: values for the replaced options are dropped.

Hydra merges a preset (`+experiment=NAME`), and the values of the user's own primary configuration,
after the options of the groups, so they also apply to an option that the command line chooses
instead. In the same way, the arguments of a replaced `_target_` remain.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from metadist.config.hydra_errors import describe_error
from metadist.config.schema import LISTS
from metadist.errors import UserError

_log = logging.getLogger(__name__)
_TARGET = "_target_"
_PRIMARY = ("maml", "ddp")
"""metadist's primary configurations, which set no values of the groups' options."""

_DELETED = object()

VERSION_BASE = {"version_base": "1.3"} if hydra.__version__.startswith("1.3.") else {}
"""The argument with which Hydra 1.3 behaves like later versions, which warn of it."""


def compose(name: str, overrides: Sequence[str]) -> DictConfig:
    """`hydra.compose`, followed by `replace_options`. Hydra must be initialized.

    Raises:
        UserError: the overrides do not fit.
    """
    try:
        configuration = hydra.compose(name, list(overrides), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException) as error:
        raise UserError(describe_error(error)) from None
    with open_dict(configuration):
        hydra_node = configuration.pop("hydra")
    replace_options(configuration, hydra_node)
    return configuration


def replace_options(configuration: DictConfig, hydra_node: HydraConf) -> None:
    """Drop, in place, values of options that the command line replaces. Hydra must be initialized.

    `scheduler=cosine` replaces the scheduler that a preset, or a primary configuration of the
    user's, chooses: it has the values of `conf/scheduler/cosine.yaml` and of the command line, not
    the preset's. The same applies to an option that another option chooses, such as the optimizer
    of `algorithm=reptile`. If the command line chooses the same option as the preset, the preset's
    values stay.
    `algorithm._target_=my_module.Mine` replaces the class, if it is another one: its arguments are
    the values of the command line, and its own defaults otherwise.

    Args:
        configuration: the configuration that Hydra composed. Values that the command line sets are
            kept, so that a misspelt key is still an error.
        hydra_node: Hydra's own node of the same composition.
    """
    name = str(hydra_node.job.config_name)
    searchpath = [f"hydra.searchpath=[{','.join(map(repr, hydra_node.searchpath))}]"]
    # Not resolved: an interpolation in them may have no value.
    lines: Any = OmegaConf.to_container(hydra_node.overrides.task, resolve=False)
    parsed = OverridesParser.create().parse_overrides(lines)
    choices = hydra_node.runtime.choices
    top_level = [override for override in parsed if "." not in override.key_or_group]
    remaining = [o for o in top_level if not is_node(configuration, o.key_or_group)]
    preset: Mapping[str, str | None] = {}
    # Composing takes time: without values of a preset or of the user there is nothing to drop.
    # Loggers, callbacks and Hydra's own options set values of their own alone.
    is_users = name not in _PRIMARY
    groups = {o.key_or_group for o in remaining}.intersection(choices)
    has_values = is_users or any(g not in LISTS and not g.startswith("hydra/") for g in groups)
    if len(remaining) < len(top_level) and has_values:
        preset_lines = [str(override.input_line) for override in remaining]
        composed = hydra.compose(name, [*searchpath, *preset_lines], return_hydra_config=True)
        preset = composed.hydra.runtime.choices
    replaced = [
        group
        for group, option in choices.items()
        if preset.get(group) not in (None, option) and is_node(configuration, group)
    ]
    # Hydra lists the choices last first. An option may override those before it, not those after.
    nodes = [group for group in reversed(list(choices)) if is_node(configuration, group)]
    for group in replaced:
        options = [f"+{node}={choices[node]}" for node in nodes[: nodes.index(group) + 1]]
        alone = hydra.compose(None, [*searchpath, *options])
        values = with_overrides(alone[group], group, parsed)
        # Not resolved: `alone` lacks the keys that other groups refer to.
        before, after = (
            OmegaConf.to_container(node, resolve=False) for node in (configuration[group], values)
        )
        if before != after:
            _log.info(
                "%s=%s replaces %s=%s: the values for %s in %s do not apply",
                *(group, choices[group], group, preset[group], group),
                f"the preset or {name}.yaml" if is_users else "the preset",
            )
        with open_dict(configuration):
            configuration[group] = values
    chosen = [str(o.input_line) for o in parsed if _chooses_option(o, choices)]
    _replace_classes(configuration, name, parsed, [*searchpath, *chosen])


def _replace_classes(
    configuration: DictConfig, name: str, parsed: Sequence[Override], chosen: Sequence[str]
) -> None:
    """Drop, in place, arguments of a class that the command line replaces by another one.

    `_partial_` stays, because it says how a node is used.

    Args:
        configuration: the composed configuration.
        name: the name of the primary configuration.
        parsed: all overrides of the command line.
        chosen: the overrides that choose options of groups, which determine the replaced classes.
    """
    values = _values_below("", parsed)
    paths = [key.removesuffix(f".{_TARGET}") for key, _ in values if key.endswith(f".{_TARGET}")]
    if not paths:
        return
    before = hydra.compose(name, list(chosen))
    for path in dict.fromkeys(paths):
        if not is_node(configuration, path):
            continue
        node = OmegaConf.select(configuration, path)
        if OmegaConf.select(before, f"{path}.{_TARGET}") == node[_TARGET]:
            continue
        kept = {_TARGET, "_partial_"}
        kept |= {key.split(".")[0] for key, _ in _values_below(path, parsed)}
        unused = [str(key) for key in node if key not in kept]
        if unused:
            _log.info(
                "%s.%s=%s: values that conf/ sets for the replaced class do not apply (%s)",
                *(path, _TARGET, node[_TARGET], ", ".join(unused)),
            )
        with open_dict(node):
            for key in unused:
                del node[key]


def is_node(configuration: DictConfig, path: str) -> bool:
    """Whether a path of the configuration is a node with a target."""
    node = OmegaConf.select(configuration, path) if path else None
    return isinstance(node, DictConfig) and _TARGET in node


def _chooses_option(override: Override, choices: Mapping[str, Any]) -> bool:
    """Whether an override chooses or deletes an option of a group, and sets no values."""
    is_group = any(key.split("@")[0] == override.key_or_group for key in choices)
    return is_group and not isinstance(override.value(), dict)


def _values_below(path: str, parsed: Sequence[Override]) -> list[tuple[str, Any]]:
    """The keys, relative to a node, and the values that overrides set below the node.

    The value is `_DELETED` for a key that is deleted. A dictionary such as `group={key: 1}` sets
    each of its keys.
    """
    pairs: list[tuple[str, Any]] = []

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, item in value.items():
                add(f"{key}.{name}", item)
        elif not path or key.startswith(f"{path}."):
            pairs.append((key.removeprefix(f"{path}.") if path else key, value))

    for override in parsed:
        add(override.key_or_group, _DELETED if override.is_delete() else override.value())
    return pairs


def with_overrides(values: DictConfig, group: str, parsed: Sequence[Override]) -> DictConfig:
    """Update an option's values, in place, by the overrides of its group's keys, and return them.

    Args:
        values: the values of the option's file.
        group: the group, such as "dataset".
        parsed: the command-line overrides.
    """
    for key, value in _values_below(group, parsed):
        if value is _DELETED:
            with open_dict(values):
                values.pop(key, None)
        else:
            OmegaConf.update(values, key, value, force_add=True)
    return values
