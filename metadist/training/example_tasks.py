"""`test_tasks.json`: images or points of the hardest and of some typical test tasks."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from metadist.files import atomic_write
from metadist.plots.points import spread_over_classes
from metadist.reports import TEST_TASKS_DATA_FILE, read_test_predictions
from metadist.reports.run_record import tasks_by_difficulty
from metadist.tasks import Episode
from metadist.training.experiment import Experiment, evaluation_keys
from metadist.training.run_plots import can_plot, predict_before_adaptation

SHOWN = 3
"""Tasks of each kind."""

_MAX_SUPPORT = 25
_MAX_QUERIES = 20
_MAX_SIDE = 84  # pixels of a saved image
_JPEG_QUALITY = 85


def write_test_tasks(experiment: Experiment) -> Path | None:
    """Save the data of the hardest test tasks and of tasks around the median. Rank zero calls it.

    Predictions are not included: they are in `test_predictions.jsonl`.

    Args:
        experiment: the experiment of a tested run; its learner has the state that was tested.

    Returns:
        The file, or None for tasks that cannot be shown; see `can_plot`.

    Raises:
        UserError: the file cannot be written.
    """
    records = read_test_predictions(experiment.directory)
    if not records or not can_plot(experiment.tasks):
        return None
    order = tasks_by_difficulty(records, experiment.metric)
    middle = max(0, (len(order) - SHOWN) // 2)
    kinds = {"hardest": order[:SHOWN], "typical": order[middle : middle + SHOWN]}
    content = {
        kind: [_data(experiment, number) for number in numbers] for kind, numbers in kinds.items()
    }
    path = experiment.directory / TEST_TASKS_DATA_FILE
    atomic_write(path, json.dumps(content, separators=(",", ":")).encode())
    return path


def _data(experiment: Experiment, number: int) -> dict[str, Any]:
    (key,) = evaluation_keys(experiment, "test", range(number, number + 1))
    episode = experiment.tasks.sample(key)
    data = _points(experiment, episode) if experiment.tasks.regression else _images(episode)
    return {"task": number, **data}


def _points(experiment: Experiment, episode: Episode) -> dict[str, Any]:
    before = predict_before_adaptation(experiment.evaluated_learner, episode.query)
    return {
        "support": [tensor.double().ravel().tolist() for tensor in episode.support],
        "inputs": episode.query.inputs.double().ravel().tolist(),
        "before": before.double().ravel().tolist(),
    }


def _images(episode: Episode) -> dict[str, Any]:
    # Normalized images are scaled to the range of the task's values.
    values = torch.cat([episode.support.inputs, episode.query.inputs])
    low, high = values.min(), values.max()
    support = spread_over_classes(episode.support.targets.numpy(), _MAX_SUPPORT).tolist()
    query = spread_over_classes(episode.query.targets.numpy(), _MAX_QUERIES).tolist()

    def encode(inputs: Tensor, indices: Sequence[int]) -> list[str]:
        return [_encode((inputs[index] - low) / (high - low).clamp(min=1e-12)) for index in indices]

    return {
        "support": {
            "labels": [int(episode.support.targets[index]) for index in support],
            "images": encode(episode.support.inputs, support),
        },
        "query": {"indices": query, "images": encode(episode.query.inputs, query)},
    }


def _encode(image: Tensor) -> str:
    """A data URL of an image of shape (1 or 3, H, W) from 0 to 1: PNG if grey, else JPEG."""
    pixels = (image.nan_to_num().clamp(0, 1) * 255).round().byte().cpu().numpy()
    grey = len(pixels) == 1
    thumbnail = Image.fromarray(
        pixels[0] if grey else np.ascontiguousarray(pixels.transpose(1, 2, 0))
    )
    thumbnail.thumbnail((_MAX_SIDE, _MAX_SIDE))
    buffer = io.BytesIO()
    kind = "png" if grey else "jpeg"
    thumbnail.save(buffer, kind, quality=_JPEG_QUALITY)  # ignored for PNG
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
