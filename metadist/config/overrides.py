"""Options that the command line replaces: values meant for the replaced ones are dropped.

Hydra merges a preset (`+experiment=NAME`) after the options of the groups, so its values also
apply to an option that the command line has put in the place of the preset's. The values of a
replaced `_target_` remain in the same way.
"""

import logging
from collections.abc import Container, Sequence
from typing import Any

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

_log = logging.getLogger(__name__)
_TARGET = "_target_"


def compose(name: str, overrides: Sequence[str]) -> DictConfig:
    """`hydra.compose`, and what `replace_options` does. Hydra must be initialized.

    Raises:
        HydraException: the overrides do not fit.
    """
    configuration = hydra.compose(name, list(overrides), return_hydra_config=True)
    with open_dict(configuration):
        searchpath = configuration.pop("hydra").searchpath
    replace_options(configuration, name, overrides, searchpath)
    return configuration


def replace_options(
    configuration: DictConfig, name: str, overrides: Sequence[str], searchpath: Sequence[str] = ()
) -> None:
    """Drop, in place, values meant for what the command line replaces. Hydra must be initialized.

    `scheduler=cosine` replaces the scheduler that a preset chooses: it has the values of
    `conf/scheduler/cosine.yaml` and those of the command line, not the preset's. The preset's
    values stay if the command line chooses the option that the preset chooses anyway.
    `algorithm._target_=my_module.Mine` replaces the class: only values of the command line are
    its arguments, and its own defaults apply to the others.

    Args:
        configuration: composed by Hydra.
        name: of the primary configuration, such as "maml".
        overrides: the command-line overrides that it was composed with. Values that they set are
            kept, so that a misspelt key is still an error.
        searchpath: `hydra.searchpath`, where else there are options.
    """
    path_override = [f"hydra.searchpath=[{','.join(map(repr, searchpath))}]"]
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    chosen = {
        each.key_or_group: str(each.value())
        for each in parsed
        if is_node(configuration, each.key_or_group) and isinstance(each.value(), str)
    }
    default: Any = None
    for group, option in chosen.items():
        values = option_values(group, option, parsed, path_override)
        if values is None or values == configuration[group]:
            continue
        if default is None:
            default = _default_choices(name, parsed, chosen, path_override)
        if default.get(group) in (None, option):
            continue
        _log.info(
            "%s=%s replaces %s=%s: the preset's values for %s do not apply",
            *(group, option, group, default[group], group),
        )
        with open_dict(configuration):
            configuration[group] = values
    for each in parsed:
        path, _, key = each.key_or_group.rpartition(".")
        if key == _TARGET and not each.is_delete() and is_node(configuration, path):
            node = OmegaConf.select(configuration, path)
            kept = {_TARGET, *(key.split(".")[0] for key, _ in _values_below(path, parsed))}
            with open_dict(node):
                for unused in [key for key in node if key not in kept]:
                    del node[unused]


def is_node(configuration: DictConfig, path: str) -> bool:
    """Whether a path of the configuration is a node with a target."""
    node = OmegaConf.select(configuration, path) if path else None
    return isinstance(node, DictConfig) and _TARGET in node


def _values_below(path: str, parsed: Sequence[Override]) -> list[tuple[str, Override]]:
    """The overrides of a node's keys, with the keys relative to the node."""
    prefix = f"{path}."
    return [
        (each.key_or_group.removeprefix(prefix), each)
        for each in parsed
        if each.key_or_group.startswith(prefix)
    ]


def option_values(
    group: str, option: str, parsed: Sequence[Override], searchpath: Sequence[str] = ()
) -> DictConfig | None:
    """The values of an option's file and of the command line. Hydra must be initialized.

    Args:
        group: such as "dataset".
        option: such as "omniglot".
        parsed: the command-line overrides; those of keys of the group are applied.
        searchpath: an override of `hydra.searchpath`, where else there are options.

    Returns:
        None if the file has no values for the group.
    """
    values = OmegaConf.select(hydra.compose(f"{group}/{option}", [*searchpath]), group)
    if not isinstance(values, DictConfig):
        return None
    for key, override in _values_below(group, parsed):
        if override.is_delete():
            with open_dict(values):
                values.pop(key, None)
        else:
            OmegaConf.update(values, key, override.value(), force_add=True)
    return values


def _default_choices(
    name: str, parsed: Sequence[Override], chosen: Container[str], searchpath: list[str]
) -> Any:
    """The options of the groups without the command line's choices: of presets and defaults."""
    others = [
        str(each.input_line)
        for each in parsed
        if each.key_or_group not in chosen and "." not in each.key_or_group
    ]
    composed = hydra.compose(name, [*searchpath, *others], return_hydra_config=True)
    return composed.hydra.runtime.choices
