"""Few-shot tasks from a dataset under a protocol of ways, shots and queries."""

from typing import Annotated

from annotated_types import Ge
from torch import Tensor

from metadist.errors import UserError
from metadist.tasks.dataset import TaskDataset
from metadist.tasks.episode import Episode, key_generator, key_split


class FewShotTasks:
    """The task distribution of a dataset; see `metadist.tasks.episode.TaskDistribution`.

    Attributes:
        dataset: what the episodes are drawn from.
        ways: classes in a task.
        shots: support examples a class (support points of a regression task).
        queries: query examples a class (query points of a regression task).
        input_shape: shape of one input, without a batch dimension.
        outputs: width of the model's last layer.
        regression: whether targets are real numbers.
    """

    def __init__(
        self,
        dataset: TaskDataset,
        ways: Annotated[int, Ge(1)] = 5,
        shots: Annotated[int, Ge(1)] = 1,
        queries: Annotated[int, Ge(1)] = 15,
    ):
        """Bind a dataset to the size of its tasks.

        Args:
            dataset: what to draw from.
            ways: classes in a task, at least 1; a regression dataset ignores it.
            shots: support examples a class, at least 1.
            queries: query examples a class, at least 1.

        Raises:
            UserError: a count is below 1, or the dataset has too few classes or examples.
        """
        for name, count in (("ways", ways), ("shots", shots), ("queries", queries)):
            if count < 1:
                raise UserError(f"task.{name} must be at least 1, got {count}")
        dataset.check(ways, shots, queries)
        self.dataset = dataset
        self.ways = ways
        self.shots = shots
        self.queries = queries
        self.input_shape = dataset.input_shape
        self.outputs = dataset.outputs(ways)
        self.regression = dataset.regression

    def draw(self, key: Tensor) -> Episode:
        """The episode of one key; equal keys give equal episodes, bit for bit, on any rank.

        Args:
            key: int64 of shape (4,), a row of `metadist.tasks.episode.task_keys`.
        """
        return self.dataset.episode(
            key_generator(key), key_split(key), self.ways, self.shots, self.queries
        )

    def protocol(self) -> dict[str, object]:
        """What must be equal for two results to be comparable.

        Returns:
            `ways` (1 for regression), `shots`, `queries` and what the dataset adds: its name,
            and for images the split's seed and the rotations.
        """
        return {
            "ways": 1 if self.regression else self.ways,
            "shots": self.shots,
            "queries": self.queries,
            **self.dataset.protocol(),
        }
