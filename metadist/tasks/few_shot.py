"""Few-shot tasks from a dataset with a number of ways, shots and queries."""

from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from metadist.errors import UserError
from metadist.tasks.dataset import TaskDataset, optional_method, with_dataset_protocol
from metadist.tasks.episode import (
    SPLITS,
    Episode,
    EpisodeDescription,
    key_generator,
    key_split,
    require_members,
)
from metadist.tasks.generators import KeyGenerators
from metadist.tasks.look_ahead import Counts, LookAhead, TaskSource


class FewShotTasks:
    """The task distribution of a dataset; see `metadist.tasks.episode.TaskDistribution`.

    Training tasks may have another size than validation and test tasks: prototypical networks
    train with more ways, Reptile with more shots.

    Attributes:
        dataset: the dataset that episodes are sampled from.
        ways: classes in a validation or test task.
        shots: support examples per class in such a task (support points for regression).
        queries: query examples per class in such a task (query points for regression).
        train_ways: classes in a training task.
        train_shots: support examples per class in a training task.
        train_queries: query examples per class in a training task.
        sampled_splits: the splits that tasks are sampled from.
        input_shape: the shape of one input, without a batch dimension.
        outputs: the width of the model's last layer, enough for the tasks with the most ways.
        regression: whether targets are real numbers.
    """

    def __init__(
        self,
        dataset: TaskDataset,
        ways: Annotated[int, Ge(1)] = 5,
        shots: Annotated[int, Ge(1)] = 1,
        queries: Annotated[int, Ge(1)] = 15,
        train_ways: Annotated[int, Ge(1)] | None = None,
        train_shots: Annotated[int, Ge(1)] | None = None,
        train_queries: Annotated[int, Ge(1)] | None = None,
        sampled_splits: Sequence[str] = SPLITS,
    ) -> None:
        """Set the size of the tasks.

        Args:
            dataset: the dataset to sample from.
            ways: classes in a task, at least 2; ignored by a regression dataset.
            shots: support examples per class, at least 1.
            queries: query examples per class, at least 1.
            train_ways: classes in a training task. Default: `ways`.
            train_shots: support examples per class in a training task. Default: `shots`.
            train_queries: query examples per class in a training task. Default: `queries`.
            sampled_splits: the splits that tasks are sampled from. The sizes of others are not
                checked. A run leaves out the validation split if it has no validations, and
                `metadist evaluate` all except the test split.

        Raises:
            UserError: a count is too small, a split has too few classes or examples, or the dataset
                lacks a member of `TaskDataset`.
        """
        counts = {"ways": ways, "shots": shots, "queries": queries, "train_ways": train_ways}
        counts |= {"train_shots": train_shots, "train_queries": train_queries}
        for name, count in counts.items():
            if count is not None and count < 1:
                raise UserError(f"task.{name} must be at least 1, got {count}.")
        require_members(dataset, "dataset", _MEMBERS, "TaskDataset")
        for name, count in {"ways": ways, "train_ways": train_ways}.items():
            if count == 1 and not dataset.regression:
                raise UserError(
                    f"task.{name} is 1, and there is nothing to tell apart with a single class: "
                    "set it to 2 or more."
                )
        self.dataset = dataset
        self.ways, self.shots, self.queries = ways, shots, queries
        self.train_ways = ways if train_ways is None else train_ways
        self.train_shots = shots if train_shots is None else train_shots
        self.train_queries = queries if train_queries is None else train_queries
        self.sampled_splits = tuple(sampled_splits)
        self._look_ahead = LookAhead()
        if self._counts("train") == self._counts("test"):
            dataset.check(ways, shots, queries, self.sampled_splits)
        else:
            evaluated = [split for split in self.sampled_splits if split != "train"]
            dataset.check(ways, shots, queries, evaluated)
            if "train" in self.sampled_splits:
                dataset.check(*self._counts("train"), ("train",), "task.train_")
        self.input_shape = dataset.input_shape
        self.outputs = dataset.outputs(max(self.ways, self.train_ways))
        self.regression = dataset.regression

    def sample(self, key: Tensor) -> Episode:
        """Sample the task that a key stands for. Equal keys give equal episodes, bit for bit.

        Args:
            key: int64 of shape (4,), a row of `metadist.tasks.episode.task_keys`.
        """
        split = key_split(key)
        return self.dataset.episode(key_generator(key), split, *self._counts(split))

    def sample_batch(self, keys: Tensor, device: torch.device) -> Episode | None:
        """Sample the tasks of several keys at once, if the dataset can.

        Args:
            keys: int64 of shape (tasks, 4), all of one split.
            device: the device on which the tasks will be computed. The dataset makes the episodes
                there or on the CPU.

        Returns:
            The episodes of `sample`, stacked along a leading task dimension; None if the dataset,
            or a subclass that overrides `episode` or `inputs`, samples one task at a time.
        """
        episodes = optional_method(self.dataset, "episodes", "episode", "inputs")
        if episodes is None or type(self).sample is not FewShotTasks.sample:
            return None
        split = key_split(keys[0])
        counts = self._counts(split)
        if split == "train" and self.looks_ahead:
            return self._look_ahead(TaskSource(episodes, device, split, counts), keys)
        return episodes(device, KeyGenerators(keys), split, *counts)

    @property
    def looks_ahead(self) -> bool:
        """Whether training tasks of later iterations may be sampled in advance."""
        # Set by the class itself: a subclass of a dataset may change in training.
        own = "looks_ahead" in vars(type(self.dataset))
        return own and bool(getattr(self.dataset, "looks_ahead", False))

    def describe(self, key: Tensor) -> EpisodeDescription | None:
        """A task's class names and query images; None if the dataset does not describe its tasks.

        Args:
            key: see `sample`.
        """
        describe = optional_method(self.dataset, "describe", "episode")
        if describe is None or type(self).sample is not FewShotTasks.sample:
            return None
        split = key_split(key)
        return describe(key_generator(key), split, *self._counts(split))

    def protocol(self) -> dict[str, object]:
        """The properties that must be equal for two results to be comparable.

        Returns:
            `ways` (1 for regression), `shots` and `queries` of test tasks; `train_ways`,
            `train_shots` and `train_queries` if training tasks have other values; and the
            dataset's protocol: its name, and for images the split's seed and the rotations.

        Raises:
            UserError: the dataset's protocol has a key of one of these counts.
        """
        names = ("ways", "shots", "queries")
        test, train = self._counts("test"), self._counts("train")
        if self.regression:
            test, train = (1, *test[1:]), (1, *train[1:])
        counts = {
            **dict(zip(names, test, strict=True)),
            **{
                f"train_{name}": train_count
                for name, train_count, test_count in zip(names, train, test, strict=True)
                if train_count != test_count
            },
        }
        return with_dataset_protocol(counts, self.dataset)

    def _counts(self, split: str) -> Counts:
        """Ways, shots and queries of a split's tasks."""
        if split == "train":
            return self.train_ways, self.train_shots, self.train_queries
        return self.ways, self.shots, self.queries


_MEMBERS = ("input_shape", "regression", "outputs", "episode", "check", "protocol")
"""The members of `TaskDataset`."""
