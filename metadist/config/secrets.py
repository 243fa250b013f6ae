"""Secrets of the environment, kept out of everything that a run writes."""

import os
import re
from collections.abc import Mapping
from typing import Any

_NAMES = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8
BLOT = "***"
"""What stands in a secret's place."""


def without_secrets(value: Any) -> Any:
    """The same plain containers, with secrets blotted out wherever a text holds them.

    A secret is the value, of at least eight characters, of an environment variable whose name
    speaks of a key, token, secret, password or credential: WANDB_API_KEY, say. A configuration
    may take one in by `${oc.env:WANDB_API_KEY}`.
    """
    found = [text for name, text in os.environ.items() if _NAMES.search(name)]
    secrets = sorted((text for text in found if len(text) >= _SHORTEST), key=len, reverse=True)

    def clean(inner: Any) -> Any:
        if isinstance(inner, str):
            for secret in secrets:
                inner = inner.replace(secret, BLOT)
            return inner
        if isinstance(inner, Mapping):
            return {clean(key): clean(each) for key, each in inner.items()}
        if isinstance(inner, list | tuple):
            return [clean(each) for each in inner]
        return inner

    return clean(value)
