"""Which run it is: what its numbers follow from, among all that its configuration says."""

from collections.abc import Mapping
from typing import Any

_AROUND = frozenset(("hydra", "launcher", "logger", "resume", "sweep", "timeout_seconds"))
_WHERE = frozenset(("dataset.root", "dataset.download"))

_IDENTITY = ("seed", "model", "algorithm", "task", "dataset", "optimizer", "scheduler", "reducer")
_TRAINERS = ("trainer.meta_batch_size", "trainer.clip_value", "trainer.clip_norm")


def is_around(key: str) -> bool:
    """Whether a dotted key says only where data lie, what is logged or how processes start.

    Runs that differ in such keys alone are the same run.
    """
    return key in _WHERE or key.partition(".")[0] in _AROUND


def flat(configuration: Mapping[str, Any]) -> dict[str, str]:
    """A configuration's values as text by dotted keys, without those of `is_around`."""
    found: dict[str, str] = {}

    def flatten(value: Any, path: str) -> None:
        if isinstance(value, Mapping):
            for key, each in value.items():
                flatten(each, f"{path}.{key}" if path else str(key))
        elif not is_around(path):
            found[path] = str(value)

    flatten(configuration, "")
    return found


def identity(configuration: Mapping[str, Any]) -> dict[str, str]:
    """What a run's numbers follow from, as dotted keys with their values as text.

    How long it runs, where, how it is carried out and what it logs do not belong to it.
    """
    return {
        key: value
        for key, value in flat(configuration).items()
        if key.partition(".")[0] in _IDENTITY or key.startswith(_TRAINERS)
    }
