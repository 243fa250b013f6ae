"""The runs that lie in a folder, and in what they differ on purpose."""

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from metadist.errors import UserError
from metadist.training.identity import identity, is_around

_DEFAULT = "(default)"


@dataclass(frozen=True)
class SweptRun:
    """A run of a sweep, as its directory tells of it.

    Attributes:
        name: its directory, seen from the folder.
        overrides: what its command line set, by key, without the plus before a key.
        configuration: as composed, plain containers with interpolations unresolved.
        results: those of `results.json`; None of a run that has not finished.
        failure: what ended it, of a sweep's job that failed.
    """

    name: str
    overrides: Mapping[str, str]
    configuration: Mapping[str, Any] = field(default_factory=dict)
    results: Mapping[str, Any] | None = None
    failure: str | None = None

    @property
    def failed(self) -> bool:
        """Whether an error ended it."""
        return self.results is None and self.failure is not None

    @property
    def unfinished(self) -> bool:
        """Whether it goes on, was stopped or was killed."""
        return self.results is None and self.failure is None

    def value(self, key: str) -> str:
        """What a key was, whether the command line set it or not."""
        if key in self.overrides:
            return self.overrides[key]
        found: Any = self.configuration
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        return _DEFAULT if found is None or isinstance(found, Mapping) else _text(found)


def read_runs(folder: Path) -> list[SweptRun]:
    """Every run in a folder and below it that has finished, failed or begun, by its name.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder: give the one that holds the runs' directories.")
    signs = ("results.json", "failure.json", "metrics.jsonl")
    places = {path.parent for sign in signs for path in folder.rglob(sign)}
    if not places:
        raise UserError(
            f"{folder} holds no run (no results.json in it or below it): give the folder that "
            "holds the runs' directories."
        )
    return sorted((_read(folder, place) for place in places), key=lambda run: _natural(run.name))


def swept_keys(runs: Sequence[SweptRun]) -> list[str]:
    """The keys by which the runs differ, but for the seed: first those of their command lines."""
    said = dict.fromkeys(key for run in runs for key in run.overrides if key != "seed")
    keys = [key for key in said if not is_around(key)]
    keys = [key for key in keys if len({run.value(key) for run in runs}) > 1]
    return keys + _unsaid(runs, keys)


def _unsaid(runs: Sequence[SweptRun], keys: Sequence[str]) -> list[str]:
    """What else sets the runs apart, such as a file of the configuration that was edited."""
    groups = {key for key in keys if "." not in key}  # a chosen group brings its own with it
    if "experiment" in groups:
        return []
    held = [identity(run.configuration) for run in runs if run.configuration]
    names = dict.fromkeys(name for each in held for name in each if name != "seed")
    return [
        name
        for name in names
        if name not in keys
        and name.partition(".")[0] not in groups
        and len({each.get(name) for each in held}) > 1
    ]


def _read(folder: Path, place: Path) -> SweptRun:
    failure = read_record(place / "failure.json")
    results = None if failure else read_record(place / "results.json")
    words = (failure or {}).get("overrides") or _yaml(place / ".hydra" / "overrides.yaml") or []
    pairs = [str(word).lstrip("+").partition("=") for word in words]
    configuration = _yaml(place / ".hydra" / "config.yaml")
    return SweptRun(
        name=str(place.relative_to(folder)),
        overrides={key: _text(value) for key, sign, value in pairs if sign},
        configuration=configuration if isinstance(configuration, Mapping) else {},
        results=results,
        failure=None if failure is None else str(failure.get("error", "")),
    )


def read_record(path: Path) -> dict[str, Any] | None:
    """What a run has left in a file such as `results.json`; None where there is none yet.

    Raises:
        UserError: it is there but cannot be read.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): bring back a good copy, or remove it to run the "
            "job again."
        ) from None
    if not isinstance(found, dict):
        raise UserError(f"{path} is no record of a run: remove it to run the job again.")
    return found


def _yaml(path: Path) -> Any:
    try:
        return yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{path} cannot be read ({reason}): remove it or bring it back.") from None


def _text(value: object) -> str:
    """A value as a person writes it: 0.10 and 1e-1 are the same, 1.0 and 1 too."""
    text = str(value).strip()
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        return text[1:-1]
    with contextlib.suppress(ValueError):
        return str(int(text))
    try:
        number = float(text)
    except ValueError:
        return text.lower() if text in ("True", "False") else text
    return str(int(number)) if number.is_integer() and abs(number) < 1e15 else repr(number)


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part or 0), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", name)
    ]
