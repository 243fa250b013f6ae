"""Weights of a run as a safetensors file whose metadata says how to use them."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from metadist import __version__
from metadist.errors import UserError
from metadist.files import REDIRECT_OUTPUT, atomic_write
from metadist.loggers import json_value
from metadist.reports import RESULTS_FILE, read_overrides, require_results
from metadist.training.saved_state import tested_checkpoint
from metadist.training.weights_file import WEIGHTS_FORMAT, WEIGHTS_SUFFIX

_DATASET = ("_target_", "normalize")
"""Options of the dataset that the preprocessing of images needs; paths are left out."""
_PATHS = ("dataset.root", "init_from", "resume")
"""Overrides that may be paths of this machine, which are left out."""
_RESULTS = (
    "test_accuracy",
    "test_mse",
    "ci95",
    "test_tasks",
    "iterations",
    "tested_iteration",
    "seed",
)


def export_weights(run: str | Path, path: str | Path) -> Path:
    """Write the weights that a finished run tested as safetensors.

    The metadata are JSON texts by name: `model`, `algorithm`, `dataset` and `task`, from which the
    learner and its preprocessing are built, and `protocol`, `method`, `results` and `overrides`,
    which describe the run.

    Args:
        run: the run's directory.
        path: the file to write.

    Returns:
        `path`.

    Raises:
        UserError: the run has not finished, its checkpoint cannot be read, or the file cannot be
            written.
    """
    run, path = Path(run), Path(path)
    if run.is_file():
        raise UserError(
            f"{run} is a file: give the directory of a finished run; FewShotClassifier.load and "
            "metadist predict read checkpoints and weights files as they are."
        )
    results = require_results(run)
    if path.suffix != WEIGHTS_SUFFIX:
        raise UserError(f"{path} does not end in {WEIGHTS_SUFFIX}: choose such a name.")
    checkpoint, contents = tested_checkpoint(run)
    configuration = contents.get("configuration")
    _require_keys(checkpoint, contents, ("iteration", "task", "learner", "buffers"))
    _require_keys(run / RESULTS_FILE, results, ("tested_iteration", "protocol", "method"))
    if (
        not isinstance(configuration, Mapping)
        or contents["iteration"] != results["tested_iteration"]
    ):
        raise UserError(
            f"{checkpoint} is not the state that {run} tested: test the run again, with "
            "resume=auto."
        )
    from safetensors.torch import save

    _require_keys(checkpoint, configuration, ("model", "algorithm"))
    dataset = configuration.get("dataset") or {}
    sections = {
        "iteration": contents["iteration"],
        "model": configuration["model"],
        "algorithm": configuration["algorithm"],
        "dataset": {key: dataset[key] for key in _DATASET if dataset.get(key) is not None},
        "task": contents["task"],
        "buffers": list(contents["buffers"]),
        **({"frozen": contents["frozen"]} if "frozen" in contents else {}),
        "protocol": results["protocol"],
        "method": results["method"],
        "results": {key: results[key] for key in _RESULTS if key in results},
        "overrides": [
            line for line in read_overrides(run) if line.lstrip("+").split("=")[0] not in _PATHS
        ],
    }
    metadata = {key: json.dumps(json_value(value)) for key, value in sections.items()}
    metadata |= {"format": WEIGHTS_FORMAT, "version": __version__}
    tensors = {**contents["learner"], **contents["buffers"]}
    if names := [name for name, value in tensors.items() if not isinstance(value, Tensor)]:
        raise UserError(
            f"{', '.join(names)} of {run} is no tensor, and a safetensors file holds tensors "
            "alone: give the checkpoint itself to whoever loads it."
        )
    copies = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    atomic_write(path, save(copies, metadata), REDIRECT_OUTPUT)
    return path


def _require_keys(path: Path, values: Mapping[str, Any], keys: Sequence[str]) -> None:
    """Raise `UserError` if values of a file lack a key."""
    if missing := [key for key in keys if key not in values]:
        raise UserError(
            f"{path} has no {', '.join(missing)}: restore a good copy, or train the run again."
        )
