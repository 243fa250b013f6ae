"""Comparability of runs: the configuration fingerprint, and differences between protocols."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from metadist.loggers import flatten_values

_RUNTIME_GROUPS = frozenset(("hydra", "launcher", "logger", "resume", "sweep"))
_RUNTIME_KEYS = frozenset((
    "dataset.download", "rendezvous_timeout_seconds", "timeout_seconds", "trainer.checkpoint_every",
    "trainer.keep_checkpoints", "trainer.report",
))  # fmt: skip

FINGERPRINT_GROUPS = frozenset((
    "algorithm", "callbacks", "dataset", "model", "optimizer", "reducer", "scheduler", "seed",
    "task",
))  # fmt: skip
"""The groups of the configuration that determine the results of a run."""
_FINGERPRINT_PREFIXES = (
    "trainer.meta_batch_size", "trainer.clip_value", "trainer.clip_norm", "trainer.precision",
)  # fmt: skip

_SELECT = re.compile(r"\$\{oc\.select:([\w.]+),(\w+)\}")

TRAINING_COUNTS = ("train_ways", "train_shots", "train_queries")
"""Keys of a protocol that are left out where training and test have the same value."""

TEST_TASK_KEYS = (
    "dataset", "ways", "shots", "queries", "class_split", "split_seed", "dataset_seed",
    "within_alphabet", "test_rotations", "held_out",
)  # fmt: skip
"""Keys of a protocol that describe the test tasks."""

MISSING = "—"
"""The value for a key that is missing from the protocol of a run."""


def is_runtime_key(key: str) -> bool:
    """Whether a dotted key only concerns downloads, logging, checkpoints or starting processes.

    Runs that differ only in runtime keys are the same run.
    """
    return key in _RUNTIME_KEYS or key.partition(".")[0] in _RUNTIME_GROUPS


def flatten_config(config: Mapping[str, Any]) -> dict[str, str]:
    """The values of a configuration as strings by dotted key, without runtime keys.

    In an unresolved configuration, `${oc.select:KEY,DEFAULT}` is the value of KEY, or DEFAULT.
    """
    flat = flatten_values(config)

    def text(value: Any) -> str:
        selected = _SELECT.fullmatch(str(value))
        return str(flat.get(selected[1], selected[2]) if selected else value)

    return {key: text(value) for key, value in flat.items() if not is_runtime_key(key)}


def config_fingerprint(config: Mapping[str, Any]) -> dict[str, str]:
    """The values that determine the results of a run, as strings by dotted key.

    The number of iterations, the strategy, paths and logging are not included. Data may be moved,
    so `data_checksum` in the protocol is compared instead.
    """
    return {
        key: value
        for key, value in flatten_config(config).items()
        if key != "dataset.root"
        and (key.partition(".")[0] in FINGERPRINT_GROUPS or key.startswith(_FINGERPRINT_PREFIXES))
    }


def protocol_differences(
    protocols: Mapping[str, Mapping[str, Any]], ignore: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """The keys in which the evaluation protocols of runs differ.

    Results are comparable if backbone, ways, shots, queries, inner steps, batch-norm statistics,
    split, rotations, test tasks, kind of interval and checkpoint are equal. Properties of the
    method, such as its name or inner learning rate, are under `method` and are not compared.

    Args:
        protocols: the `protocol` in `results.json` of each run, by the run's name.
        ignore: keys to leave out, such as keys that are varied on purpose.

    Returns:
        For each key that differs, the value of each run by the run's name; `MISSING` if a run does
        not have the key. Empty if all protocols are equal. A training count that a run does not
        have has the value of the test, as in `FewShotTasks.protocol`.
    """
    ignored = frozenset(ignore)
    differences = {}
    for key in dict.fromkeys(key for protocol in protocols.values() for key in protocol):
        tested = key.removeprefix("train_") if key in TRAINING_COUNTS else key
        values = {
            name: protocol.get(key, protocol.get(tested, MISSING))
            for name, protocol in protocols.items()
        }
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
