"""Configurations as plain values, which YAML and checkpoints can hold."""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, OmegaConf


def to_plain(configuration: DictConfig, *, resolve: bool) -> Any:
    """A configuration as dictionaries, lists, strings, numbers, booleans and None.

    Args:
        configuration: may also hold enumerations, which become their names, and paths.
        resolve: whether interpolations are resolved.
    """
    return _plain(OmegaConf.to_container(configuration, resolve=resolve, enum_to_str=True))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value) if isinstance(value, PurePath) else value
