"""One-sentence messages for errors of Hydra, OmegaConf and the operating system."""

import contextlib
import inspect
import re
import traceback
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import (
    ConfigCompositionException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf import DictConfig
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from metadist.config.instantiate import locate_target
from metadist.config.schema import LISTS, NOT_IN_DEFAULTS, Settings, nearest_key
from metadist.errors import UserError, did_you_mean
from metadist.files import REDIRECT_RUN

_SWEEPS_EXTRA = ("optuna", "joblib", "submitit")
"""Hydra's sweepers and launchers that the extra `sweeps` installs."""

_CLASSES = ("algorithm", "dataset", "model", "optimizer", "reducer", "scheduler")
"""Groups in which `GROUP._target_` names a class of the user's own."""

_GIVEN = {
    "algorithm": ("model", "regression"),
    "model": ("input_shape", "outputs"),
    "optimizer": ("params", "named_parameters"),
    "scheduler": ("optimizer",),
    "strategy": (
        "partitioner",
        "reducer",
        "device",
        "timeout_seconds",
        "rendezvous_timeout_seconds",
    ),
    "task": ("dataset", "sampled_splits"),
}
"""The arguments that `metadist.config.build` gives to classes, so that messages omit them."""

_CONF = "path=pkg://metadist.conf"
"""metadist's groups, as in the search path in a message of Hydra."""

_MAX_LISTED = 20
"""A message lists the options of a group with at most so many."""


def describe_error(error: BaseException) -> str:
    """Say in one line what was wrong, what was expected and what to do.

    Args:
        error: an error of Hydra, OmegaConf or the operating system; the text of other errors is
            unchanged.
    """
    text = " ".join(str(error).split())
    if advice := _advice(text):
        return advice
    if isinstance(error, MissingConfigException):
        # Hydra does not say file and options for a list such as logger=[console,…].
        listed = re.search(r"Could not load '([^']+)'", text)
        missing = str(error.missing_cfg_file or (listed[1] if listed else ""))
        options = error.options or _group_options(str(error), missing.rpartition("/")[0])
        return _missing_option(missing, options) if options else text
    if isinstance(error, OverrideParseException):
        key, equals, value = str(error.override).partition("=")
        path = bool(equals) and re.search(r"[/={}]", value) and '"' not in value
        form = f"'{key}=\"{value}\"'" if path else "KEY=VALUE, as in seed=1"
        if value.startswith("~/"):  # in quotes neither the shell nor Hydra would expand it
            form = f"{key}=$HOME{value[1:]}"
        if not equals:
            form += ", with quotes around it if VALUE has spaces"
        return f"the override {error.override!r} cannot be read: write {form}."
    if isinstance(error, ConfigCompositionException):
        return _composition(text, error.__cause__)
    if isinstance(error, MissingMandatoryValue):
        return f"{text.split(' full_key')[0]}: give it a value on the command line."
    if isinstance(error, InstantiationException | OmegaConfBaseException):
        return text
    if isinstance(error, OSError):
        if not error.filename:
            return (
                f"{error.strerror or text}: the output or the run's directory cannot be written; "
                f"redirect the output, or {REDIRECT_RUN}."
            )
        return (
            f"{error.strerror or text} ({error.filename}): {REDIRECT_RUN}, or make this one "
            "writable."
        )
    if mark := getattr(error, "problem_mark", None):  # of YAML
        place = f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}"
        if Path(mark.name).suffix:
            return f"{place}, is not valid YAML ({getattr(error, 'problem', text)}): correct it."
    functions = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, AssertionError) and "_update_overrides" in functions:
        return "a defaults list cannot be read: entries with `override` come last in it."
    if raised_by_hydra(error):
        advice = "write KEY=VALUE, as in seed=1"
        if "--resolve flag" in text:
            advice = "add --cfg job"
        elif text.startswith("Only one of --run"):
            advice = "give one of these flags"
        elif "Expecting one subcommand from" in text:
            advice = "give one, as in --shell-completion install=bash"
        return f"the command line cannot be read ({text}): {advice}."
    return text


def _advice(text: str) -> str | None:
    """The sentence for an error of Hydra that is recognized by its text; None for others."""
    if match := re.match(r"Additional config directory '(.+)' not found", text):
        return f"--config-dir {match[1]} does not exist: give a directory of options."
    if match := re.match(r"Cannot find primary config '(\w+)'.*path=file://(\S+)", text):
        return (
            f"{match[2]} holds no {match[1]}.yaml: write one with hydra.searchpath: "
            "[pkg://metadist.conf] in it, or add a directory of options by --config-dir instead."
        )
    if text.startswith("Primary config module '"):  # Hydra takes a relative path for a package
        return (
            "--config-path needs an absolute directory, as in --config-path $PWD/conf; to add a "
            "directory of options to metadist's, give --config-dir DIR instead."
        )
    if match := re.match(r"Could not delete '([\w/]+)'. No match in the defaults list", text):
        advice = f"write {match[1]}=[] for none" if match[1] in LISTS else "leave it out"
        return f"~{match[1]} deletes no option of the defaults list: {advice}."
    if match := re.match(r"Multiple values for (\S+)\. To override .*?'.*?: (\S+?)'", text):
        return (
            f"{match[1]} is already in the defaults list: write {match[1]}={match[2]}, "
            f"without the plus; in a file, `override /{match[1]}: {match[2]}`."
        )
    if match := re.match(r"(\S+) appears more than once in the final defaults list", text):
        return (
            f"{match[1]} appears more than once in the defaults list: write {match[1]}=VALUE once, "
            f"without the plus; in a file, `override /{match[1]}: VALUE`."
        )
    if text.startswith("Config group override must be a string or a list."):
        return (
            "the command line gives a group a value other than the name of an option: write "
            f"GROUP=NAME, as in scheduler=none, or [] for none of {' and '.join(LISTS)}."
        )
    if match := re.match(r"Could not append to config\. An item is already at '(\S+)'\.", text):
        return (
            f"{match[1]} is a key of the configuration: write {match[1]}=VALUE, without the plus."
        )
    if match := re.search(r"Environment variable '(.+)' not found\" full_key: (\S+)", text):
        return (
            f"Environment variable '{match[1]}' not found, which {match[2]} reads: set it, or give "
            f"a default, as in ${{oc.env:{match[1]},DEFAULT}}."
        )
    if match := re.match(r"Error merging override (\S+?)=(.*)", text):
        return f"{match[1]}={match[2]} does not fit: give a value of the type that {match[1]} has."
    if match := re.match(r"Ambiguous value for argument '(\S+?)=(.*?)' 1\. ", text):
        one = f"'{match[1]}=\"{match[2]}\"' for a text with commas"
        if match[1] in LISTS:
            one = f"'{match[1]}=[{match[2]}]' for all of them in one run"
        return (
            f"{match[1]}={match[2]} has several values: add -m to sweep over them, or write {one}."
        )
    return None


def raised_by_hydra(error: BaseException) -> bool:
    """Whether an error, of any class, was raised inside Hydra, OmegaConf or their parsers."""
    modules = [str(f.f_globals.get("__name__")) for f, _ in traceback.walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].split(".")[0] in ("hydra", "omegaconf", "antlr4", "yaml")


def _missing_option(missing: str, options: Sequence[str]) -> str:
    """The sentence for an unknown option of a group, or an unknown primary configuration."""
    group, slash, option = missing.partition("/")
    if not slash or group not in Settings.model_fields:
        group, _, option = missing.rpartition("/")
    if group == "dataset" and "/" in option:
        return f"dataset={option} is a path: write dataset=folder dataset.root={option}."
    if group in ("hydra/launcher", "hydra/sweeper") and option.startswith(_SWEEPS_EXTRA):
        return (
            f"{group}={option} is not installed: pip install -e '.[sweeps]' in metadist's folder."
        )
    hint = did_you_mean(option, options)
    if not group:
        return f"there is no configuration {option}{hint}: choose maml or ddp."
    own = "; a directory of your own options is given by --config-dir DIR"
    if group in _CLASSES:
        if re.fullmatch(r"\w+(\.\w+)+", option):
            own = f"; a class of your own is given by {group}._target_={option}"
        else:
            own += f", any other class by {group}._target_=module.Class"
    if group in LISTS:
        own = f"; write {group}=[] for none{own}"
    listed = ", ".join(sorted(options))
    if len(options) > _MAX_LISTED:
        listed = f"the {len(options)} that --help lists"
    return f"{option} is not an option of {group}{hint}: choose one of {listed}{own}."


def _group_options(text: str, group: str) -> list[str]:
    """The options of a group, from the search path in a message of Hydra."""
    options = set()
    for scheme, location in re.findall(r"path=(file|pkg)://(\S+)", text):
        with contextlib.suppress(ModuleNotFoundError, OSError):
            folder = Path(location) if scheme == "file" else files(location)
            names = [entry.name for entry in folder.joinpath(group).iterdir()]
            options |= {name.removesuffix(".yaml") for name in names if name.endswith(".yaml")}
    return sorted(options)


def _options_with(group: str, key: str) -> list[str]:
    """The options of one of metadist's groups that have a key, in their file or in its defaults."""
    if group not in Settings.model_fields:
        return []
    folder = files("metadist.conf").joinpath(group)
    nodes: dict[str, dict[str, Any]] = {
        name: yaml.safe_load(folder.joinpath(f"{name}.yaml").read_text("utf-8")) or {}
        for name in _group_options(_CONF, group)
    }

    def has(name: Any) -> bool:  # entries of a defaults list may be dictionaries
        node = nodes.get(name, {}) if isinstance(name, str) else {}
        return key in node or any(map(has, node.get("defaults", ())))

    return [name for name in nodes if has(name)]


def _composition(text: str, cause: BaseException | None) -> str:
    match = re.search(r"(?:Could not override|No earlier Group Default for) '([^']+)'", text)
    if match is None:
        return text.split(" Set the environment variable")[0]
    key = match[1]
    top = key.split(".")[0]
    node = getattr(cause, "parent_node", None)
    if top in NOT_IN_DEFAULTS and not (isinstance(node, DictConfig) and "_target_" in node):
        return (
            f"{top} is not in the defaults list: write +{key}=VALUE to add it; in a file, "
            f"`/{top}: VALUE` without `override`."
        )
    if "@" in key:  # the group's package is that of a file of another group
        group = key.partition("@")[2].split(".")[0]
        return (
            f"an option of {group} overrides {key.partition('@')[0]} in its own package: let its "
            "file begin with the line `# @package _global_`."
        )
    if top == "callbacks" and not (isinstance(node, DictConfig) and "_target_" in node):
        return (
            f"{key} is not a key of the configuration: choose the callback too, as in "
            "callbacks=early_stopping, or +callbacks.NAME._target_=CLASS for one of your own."
        )
    if "." in key and isinstance(node, DictConfig):
        return _unknown_key(str(getattr(cause, "full_key", key)), node)
    if key in Settings.model_fields:  # of another primary configuration
        return f"{key} is not set in this configuration: write +{key}=VALUE to add it."
    nearest = nearest_key(key, node if isinstance(node, DictConfig) else None)
    guess = f" (did you mean {nearest}?)" if nearest else ""
    return (
        f"{key} is not a key or group of the configuration{guess}: check its spelling (--cfg job "
        "shows all keys, --help the groups)."
    )


def _unknown_key(key: str, node: DictConfig) -> str:
    """The sentence for a key that a node does not have; options of its target need the plus."""
    path, _, name = key.rpartition(".")
    names, kwargs = {str(option): str(option) for option in node if option != "_target_"}, False
    known = False
    with contextlib.suppress(UserError, ValueError, OmegaConfBaseException):
        accepted = inspect.signature(locate_target(str(node._target_), path)).parameters
        known = True
        kwargs = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
        given = _GIVEN.get(path, ())
        optional = [n for n, p in accepted.items() if p.default is not p.empty and n not in given]
        names = {n: f"+{path}.{n}" for n in optional} | {n: n for n in names}
    if name in names:
        return f"{key} is not in conf/, but it is an option: write {names[name]}=VALUE to set it."
    target = node.get("_target_")  # None in the groups of loggers and callbacks
    is_own_class = target and not str(target).startswith(("metadist.", "torch."))
    if not is_own_class and not kwargs and (others := _options_with(path, name)):
        advice = "choose this option" if len(others) == 1 else "choose one of these"
        if path in LISTS:
            chosen = [option for option in _group_options(_CONF, path) if option in node]
            advice = f"write '{path}=[{','.join([*chosen, others[0]])}]'"
        return (
            f"{key} is not a key of the chosen {path}, but of {path}={' or '.join(others)}: "
            f"{advice}."
        )
    hint, root = did_you_mean(name, names), node._get_root()  # noqa: SLF001
    if (not hint or name in Settings.model_fields) and isinstance(root, DictConfig):
        other = nearest_key(name, root)  # outside of this group
        hint = f" (did you mean {other}?)" if other else ""
    if not names and known:
        return f"{key} is not a key of the configuration: {path} has no options."
    add = f", or write +{key}=VALUE to add it" if kwargs or not names else ""
    return (
        f"{key} is not a key of the configuration{hint}: the keys of {path or 'the top level'} are "
        f"{', '.join(names)}{add}."
    )
