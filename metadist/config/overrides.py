"""Options that the command line replaces: values for the replaced options are dropped.

Hydra merges a preset (`+experiment=NAME`) after the options of the groups, so its values also
apply to an option that the command line chooses instead of the preset's. In the same way, the
arguments of a replaced `_target_` remain.
"""

import logging
import pydoc
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
from metadist.config.schema import NOT_IN_DEFAULTS, Settings
from metadist.errors import UserError

_log = logging.getLogger(__name__)
_TARGET = "_target_"
_DELETED = object()


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

    `scheduler=cosine` replaces the scheduler that a preset chooses: it has the values of
    `conf/scheduler/cosine.yaml` and of the command line, not the preset's. The same applies to an
    option that another option chooses, such as the optimizer of `algorithm=reptile`. If the command
    line chooses the same option as the preset, the preset's values stay.
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
    # Composing takes time: without a preset there is nothing to drop.
    if len(remaining) < len(top_level) and any(o.key_or_group in choices for o in remaining):
        preset_lines = [str(override.input_line) for override in remaining]
        composed = hydra.compose(name, [*searchpath, *preset_lines], return_hydra_config=True)
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
    """Drop, in place, arguments of a class that the command line replaces by another one.

    `_partial_` stays, because it says how a node is used.
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


def _without_targets(parsed: Sequence[Override]) -> list[str]:
    """The overrides that set no `_target_`, as they were typed."""
    return [
        str(override.input_line)
        for override in parsed
        if not any(_TARGET in key.split(".") for key, _ in _values_below("", [override]))
    ]


def _same_class(first: Any, second: Any) -> bool:
    """Whether two targets are the same class.

    A class of metadist may have two dotted paths. Other classes are not imported.
    """
    if first == second:
        return True
    paths = (str(first), str(second))
    return all(path.startswith("metadist.") for path in paths) and (
        pydoc.locate(paths[0]) is pydoc.locate(paths[1]) is not None
    )


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


def option_values(
    name: str, group: str, option: str, parsed: Sequence[Override], searchpath: Sequence[str] = ()
) -> DictConfig:
    """The values of an option without a preset, updated by the command line.

    Hydra must be initialized.

    Args:
        name: the name of the primary configuration.
        group: the group, such as "dataset".
        option: the option, such as "omniglot".
        parsed: the command-line overrides; overrides of the group's keys are applied.
        searchpath: an override of `hydra.searchpath` that adds directories of options.
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
