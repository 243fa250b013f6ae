"""Configurations as plain values, which YAML and checkpoints can hold, without secrets."""

import os
import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from omegaconf import DictConfig, OmegaConf

_NAMES = re.compile(
    r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|WEBHOOK|COOKIE|(?:^|_)(?:PASS|PAT|AUTH|DSN)(?:_|$)",
    re.IGNORECASE,
)
_SHORTEST = 8
REDACTED = "***"
"""Replaces a secret."""


def to_plain(configuration: DictConfig, *, resolve: bool) -> Any:
    """A configuration as dictionaries, lists, strings, numbers, booleans and None.

    Args:
        configuration: the configuration. Enumerations become their names, and paths strings.
        resolve: whether interpolations are resolved.
    """
    return _plain(OmegaConf.to_container(configuration, resolve=resolve, enum_to_str=True))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, PurePath) else value


def redact_secrets(value: Any) -> Any:
    """A copy of plain containers in which every secret inside a string is redacted.

    A secret is the value, of at least eight characters, of an environment variable whose name
    contains "key", "token", "secret", "password", "passwd", "credential", "webhook" or "cookie", or
    the word "pass", "pat", "auth" or "dsn", such as WANDB_API_KEY.
    A configuration may contain it through `${oc.env:WANDB_API_KEY}`.
    """
    texts = [text for name, text in os.environ.items() if _NAMES.search(name)]
    secrets = sorted((text for text in texts if len(text) >= _SHORTEST), key=len, reverse=True)

    def clean(inner: Any) -> Any:
        if isinstance(inner, str):
            for secret in secrets:
                inner = inner.replace(secret, REDACTED)
            return inner
        if isinstance(inner, Mapping):
            # The name of a class may contain the text of a password.
            return {clean(k): item if k == "_target_" else clean(item) for k, item in inner.items()}
        if isinstance(inner, list | tuple):
            return [clean(item) for item in inner]
        return inner

    return clean(value)
