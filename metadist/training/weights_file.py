"""Reads the weights files that `metadist export` writes."""

import json
from pathlib import Path
from typing import Any

from metadist.errors import UserError
from metadist.files import open_regular
from metadist.reports.file_schema import Contents, mismatch

WEIGHTS_SUFFIX = ".safetensors"

WEIGHTS_FORMAT = "metadist-1"
"""Version of the metadata's layout."""


def read_weights(path: Path) -> dict[str, Any]:
    """The contents of a weights file, with the keys of a checkpoint that a learner is built from.

    Args:
        path: a file that `metadist export` wrote. Nothing in it is executed.

    Returns:
        `configuration` (model, algorithm, dataset), `task`, `learner`, `buffers`, `frozen` (if
        saved) and `iteration`; `protocol`, `method`, `results` and `overrides` of the run.

    Raises:
        UserError: the file cannot be read, is damaged, or was not written by metadist.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()  # safetensors would wait for a pipe
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UserError(
            f"the weights file {path} cannot be read ({error}): give a file that metadist export "
            "wrote."
        ) from None
    if metadata.get("format") != WEIGHTS_FORMAT:
        raise UserError(
            f"the weights file {path} was not written by this version of metadist (format "
            f"{metadata.get('format')}, expected {WEIGHTS_FORMAT}): give a file that metadist "
            "export wrote."
        )
    try:
        texts = {key: value for key, value in metadata.items() if key not in ("format", "version")}
        contents = {key: json.loads(value) for key, value in texts.items()}
        names = ("model", "algorithm", "dataset")
        contents["configuration"] = {name: contents.pop(name) for name in names}
        contents["buffers"] = {name: tensors.pop(name) for name in contents["buffers"]}
        if reason := mismatch(contents, Contents):
            raise ValueError(reason)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f"the weights file {path} has damaged metadata ({error!r}): export it again."
        ) from None
    return {**contents, "learner": tensors}
