"""Whether results may be compared: where the protocols of runs differ."""

from collections.abc import Iterable, Mapping
from typing import Any

ABSENT = "—"
"""Stands for the value of a key that a run's protocol does not have."""


def protocol_differences(
    protocols: Mapping[str, Mapping[str, Any]], but_for: Iterable[str] = ()
) -> dict[str, dict[str, Any]]:
    """Where results that stand beside each other were not obtained alike.

    Ways, shots, queries, inner steps, batch-norm statistics, split, rotations, test tasks, kind
    of interval and checkpoint must be equal for figures to be comparable. What belongs to the
    method, such as its name or inner rate, stands under `method` and does not count.

    Args:
        protocols: `protocol` of each run's `results.json`, by a name for the run.
        but_for: keys to leave out, such as those that are varied on purpose.

    Returns:
        The value of each run, by its name, for each key that is not equal for all; `ABSENT` where
        a run has none. Empty where all is alike.
    """
    keys = dict.fromkeys(key for protocol in protocols.values() for key in protocol)
    found = {}
    for key in keys:
        if key in but_for:
            continue
        values = {name: protocol.get(key, ABSENT) for name, protocol in protocols.items()}
        if any(value != next(iter(values.values())) for value in values.values()):
            found[key] = values
    return found


def differences_in_words(differences: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Each difference for people, as in `shots differs: 1 (a, b), 5 (c)`."""
    sentences = []
    for key, values in differences.items():
        runs: dict[str, list[str]] = {}
        for name, value in values.items():
            runs.setdefault(str(value), []).append(name)
        each = ", ".join(f"{value} ({', '.join(names)})" for value, names in runs.items())
        sentences.append(f"{key} differs: {each}")
    return sentences
