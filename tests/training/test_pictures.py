"""Which tasks have pictures: those of others end no run."""

from types import SimpleNamespace

import pytest
import torch

from metadist.tasks import Episode, Examples, task_keys
from metadist.training.pictures import draw_pictures, draw_task


def tasks_of(shape: tuple[int, ...], outputs: int | None) -> SimpleNamespace:
    """Tasks of inputs of a shape; with `outputs`, a regression."""
    targets = torch.zeros(2, dtype=torch.int64) if outputs is None else torch.zeros(2, outputs)
    part = Examples(torch.zeros(2, *shape), targets)
    return SimpleNamespace(
        regression=outputs is not None,
        input_shape=shape,
        outputs=outputs or 2,
        sample=lambda key: Episode(part, part),
    )


@pytest.mark.parametrize(
    ("shape", "outputs"),
    [((2, 8, 8), None), ((4, 8, 8), None), ((5,), None), ((2,), 1), ((1,), 2)],
)
def test_what_cannot_be_drawn_is_left_out(tmp_path, shape, outputs):
    tasks = tasks_of(shape, outputs)
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 1, "train_loss": 1.0}\n')
    results = {"test_accuracy": 0.5, "test_mse": 0.5, "ci95": 0.1}
    drawn = draw_pictures(tmp_path, "tasks", tasks, torch.nn.Identity(), 0, results)
    assert [path.name for path in drawn] == ["learning_curves.png"]
    key = task_keys(0, "test", 0, range(1))[0]
    assert draw_task(tmp_path / "task.png", tasks, torch.nn.Identity(), key) is None
