"""Comparability of runs: the configuration fingerprint, and differences between protocols."""

from collections.abc import Iterable, Mapping
from typing import Any

from metadist.loggers import flatten_values

_RUNTIME_GROUPS = frozenset(("hydra", "launcher", "logger", "resume", "sweep"))
_RUNTIME_KEYS = frozenset(
    (
        "dataset.download",
        "rendezvous_timeout_seconds",
        "timeout_seconds",
        "trainer.checkpoint_every",
        "trainer.keep_checkpoints",
    )
)

_FINGERPRINT_GROUPS = frozenset(
    (
        "seed",
        "model",
        "algorithm",
        "task",
        "dataset",
        "optimizer",
        "scheduler",
        "reducer",
        "callbacks",
    )
)
_FINGERPRINT_PREFIXES = (
    "trainer.meta_batch_size",
    "trainer.clip_value",
    "trainer.clip_norm",
    "trainer.precision",
)

MISSING = "—"
"""Stands for the value of a key that the protocol of a run does not have."""


def is_runtime_key(key: str) -> bool:
    """Whether a dotted key only sets downloads, logging, checkpoints or how processes are started.

    Runs that differ in runtime keys alone are the same run.
    """
    return key in _RUNTIME_KEYS or key.partition(".")[0] in _RUNTIME_GROUPS


def flatten_config(config: Mapping[str, Any]) -> dict[str, str]:
    """The values of a configuration as strings by dotted key, without runtime keys."""
    flat = flatten_values(config)
    return {key: str(value) for key, value in flat.items() if not is_runtime_key(key)}


def config_fingerprint(config: Mapping[str, Any]) -> dict[str, str]:
    """The values that determine the numbers of a run, as strings by dotted key.

    The number of iterations, the strategy, paths and logging are not part of it: data may be moved,
    and `data_checksum` of the protocol is compared instead.
    """
    return {
        key: value
        for key, value in flatten_config(config).items()
        if key != "dataset.root"
        and (key.partition(".")[0] in _FINGERPRINT_GROUPS or key.startswith(_FINGERPRINT_PREFIXES))
    }


def protocol_differences(
    protocols: Mapping[str, Mapping[str, Any]], ignore: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """The keys in which the evaluation protocols of runs differ.

    Backbone, ways, shots, queries, inner steps, batch-norm statistics, split, rotations, test
    tasks, kind of interval and checkpoint must be equal for results to be comparable. Properties of
    the method, such as its name or inner learning rate, are under `method` and are not compared.

    Args:
        protocols: `protocol` of the `results.json` of each run, by a name for the run.
        ignore: keys to leave out, such as those that are varied on purpose.

    Returns:
        For each key that is not equal in all runs the value of each run by its name, `MISSING`
        where a run does not have the key. Empty if all protocols are equal.
    """
    ignored = frozenset(ignore)
    differences = {}
    for key in dict.fromkeys(key for protocol in protocols.values() for key in protocol):
        values = {name: protocol.get(key, MISSING) for name, protocol in protocols.items()}
        first = next(iter(values.values()))
        if key not in ignored and any(value != first for value in values.values()):
            differences[key] = values
    return differences


def format_differences(differences: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """One line per key of `protocol_differences`, such as `shots differs: 1 (a, b), 5 (c)`."""
    lines = []
    for key, values in differences.items():
        runs: dict[str, list[str]] = {}
        for name, value in values.items():
            runs.setdefault(str(value), []).append(name)
        groups = ", ".join(f"{value} ({', '.join(names)})" for value, names in runs.items())
        lines.append(f"{key} differs: {groups}")
    return lines
