"""Options that the command line replaces: values meant for the replaced ones are dropped.

Hydra merges a preset (`+experiment=NAME`) after the options of the groups, so its values also
apply to an option that the command line has put in the place of the preset's. The values of a
replaced `_target_` remain in the same way.
"""

import logging
import pydoc
from collections.abc import Mapping, Sequence
from typing import Any

import hydra
from hydra.conf import HydraConf
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from metadist.config.schema import NOT_IN_DEFAULTS, Settings

_log = logging.getLogger(__name__)
_TARGET = "_target_"
_DELETED = object()


def compose(name: str, overrides: Sequence[str]) -> DictConfig:
    """`hydra.compose`, and what `replace_options` does. Hydra must be initialized.

    Raises:
        HydraException: the overrides do not fit.
    """
    configuration = hydra.compose(name, list(overrides), return_hydra_config=True)
    with open_dict(configuration):
        hydra_node = configuration.pop("hydra")
    replace_options(configuration, hydra_node)
    return configuration


def replace_options(configuration: DictConfig, hydra_node: HydraConf) -> None:
    """Drop, in place, values meant for what the command line replaces. Hydra must be initialized.

    `scheduler=cosine` replaces the scheduler that a preset chooses: it has the values of
    `conf/scheduler/cosine.yaml` and those of the command line, not the preset's. So does an option
    that another one chooses: the optimizer of `algorithm=reptile`. The preset's values stay if
    the command line chooses the option that the preset chooses anyway.
    `algorithm._target_=my_module.Mine` replaces the class, if it is another one: only values of the
    command line are its arguments, and its own defaults apply to the others.

    Args:
        configuration: composed by Hydra. Values that the command line sets are kept, so that a
            misspelt key is still an error.
        hydra_node: Hydra's own node of the same composition.
    """
    name = str(hydra_node.job.config_name)
    searchpath = [f"hydra.searchpath=[{','.join(map(repr, hydra_node.searchpath))}]"]
    # As they were given: an interpolation in them may have no value.
    lines: Any = OmegaConf.to_container(hydra_node.overrides.task, resolve=False)
    parsed = OverridesParser.create().parse_overrides(lines)
    choices = hydra_node.runtime.choices
    groups = [each for each in parsed if "." not in each.key_or_group]
    others = [each for each in groups if not is_node(configuration, each.key_or_group)]
    preset: Mapping[str, str | None] = {}
    # Composing takes time: without a preset there is nothing to drop.
    if len(others) < len(groups) and any(each.key_or_group in choices for each in others):
        alone = [str(each.input_line) for each in others]
        composed = hydra.compose(name, [*searchpath, *alone], return_hydra_config=True)
        preset = composed.hydra.runtime.choices
    for group, option in choices.items():
        if preset.get(group) in (None, option) or not is_node(configuration, group):
            continue
        values = option_values(name, group, option, parsed, searchpath)
        if values != configuration[group]:
            _log.info(
                "%s=%s replaces %s=%s: the preset's values for %s do not apply",
                *(group, option, group, preset[group], group),
            )
        with open_dict(configuration):
            configuration[group] = values
    _replace_classes(configuration, name, parsed, searchpath)


def _replace_classes(
    configuration: DictConfig, name: str, parsed: Sequence[Override], searchpath: Sequence[str]
) -> None:
    """Drop, in place, values meant for a class that the command line replaces by another one.

    What says how a node is used, `_partial_`, stays.
    """
    values = _values_below("", parsed)
    paths = [key.removesuffix(f".{_TARGET}") for key, _ in values if key.endswith(f".{_TARGET}")]
    if not paths:
        return
    before = hydra.compose(name, [*searchpath, *_without_targets(parsed)])
    for path in dict.fromkeys(paths):
        if not is_node(configuration, path):
            continue
        node = OmegaConf.select(configuration, path)
        if _same_class(OmegaConf.select(before, f"{path}.{_TARGET}"), node[_TARGET]):
            continue
        kept = {_TARGET, "_partial_"}
        kept |= {key.split(".")[0] for key, _ in _values_below(path, parsed)}
        unused = [str(key) for key in node if key not in kept]
        if unused:
            _log.info(
                "%s.%s=%s: the values of %s for another class (%s) do not apply",
                *(path, _TARGET, node[_TARGET], path, ", ".join(unused)),
            )
        with open_dict(node):
            for key in unused:
                del node[key]


def is_node(configuration: DictConfig, path: str) -> bool:
    """Whether a path of the configuration is a node with a target."""
    node = OmegaConf.select(configuration, path) if path else None
    return isinstance(node, DictConfig) and _TARGET in node


def _without_targets(parsed: Sequence[Override]) -> list[str]:
    """The overrides, as they were typed, that set no `_target_`."""
    return [
        str(each.input_line)
        for each in parsed
        if not any(_TARGET in key.split(".") for key, _ in _values_below("", [each]))
    ]


def _same_class(one: Any, other: Any) -> bool:
    """Whether two targets are one class of metadist, which may have two dotted paths; others are
    not imported.
    """
    if one == other:
        return True
    paths = (str(one), str(other))
    return all(path.startswith("metadist.") for path in paths) and (
        pydoc.locate(paths[0]) is pydoc.locate(paths[1]) is not None
    )


def _values_below(path: str, parsed: Sequence[Override]) -> list[tuple[str, Any]]:
    """What the overrides set below a node, with the keys relative to it; `_DELETED` for a key that
    they delete. The values of a dictionary have keys of their own: `group={key: 1}`.
    """
    found: list[tuple[str, Any]] = []

    def add(key: str, value: Any) -> None:
        if isinstance(value, dict) and value:
            for name, each in value.items():
                add(f"{key}.{name}", each)
        elif not path or key.startswith(f"{path}."):
            found.append((key.removeprefix(f"{path}.") if path else key, value))

    for each in parsed:
        add(each.key_or_group, _DELETED if each.is_delete() else each.value())
    return found


def option_values(
    name: str, group: str, option: str, parsed: Sequence[Override], searchpath: Sequence[str] = ()
) -> DictConfig:
    """The values of an option without a preset, and of the command line. Hydra must be initialized.

    Args:
        name: of the primary configuration.
        group: such as "dataset".
        option: such as "omniglot".
        parsed: the command-line overrides; those of keys of the group are applied.
        searchpath: an override of `hydra.searchpath`, where else there are options.
    """
    plus = "+" if group in NOT_IN_DEFAULTS or group not in Settings.model_fields else ""
    values: DictConfig = hydra.compose(name, [*searchpath, f"{plus}{group}={option}"])[group]
    for key, value in _values_below(group, parsed):
        if value is _DELETED:
            with open_dict(values):
                values.pop(key, None)
        else:
            OmegaConf.update(values, key, value, force_add=True)
    return values
