"""Configurations as plain values, which YAML and checkpoints can hold, without secrets."""

import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, OmegaConf

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8
REDACTED = "***"
"""Replaces a secret."""


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


def redact_secrets(value: Any) -> Any:
    """A copy of plain containers in which every secret inside a string is redacted.

    A secret is the value, of at least eight characters, of an environment variable whose name
    names a key, token, secret, password or credential: WANDB_API_KEY, say. A configuration
    may contain one through `${oc.env:WANDB_API_KEY}`.
    """
    found = [text for name, text in os.environ.items() if _NAMES.search(name)]
    secrets = sorted((text for text in found if len(text) >= _SHORTEST), key=len, reverse=True)

    def clean(inner: Any) -> Any:
        if isinstance(inner, str):
            for secret in secrets:
                inner = inner.replace(secret, REDACTED)
            return inner
        if isinstance(inner, Mapping):
            # A class may have a password's name.
            return {clean(k): each if k == "_target_" else clean(each) for k, each in inner.items()}
        if isinstance(inner, list | tuple):
            return [clean(each) for each in inner]
        return inner

    return clean(value)
