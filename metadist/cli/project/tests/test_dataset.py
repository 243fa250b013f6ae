"""The dataset: the shapes of a task, and what a task depends on."""

import numpy as np
import torch
from my_project.dataset import MyDataset

from metadist.tasks import SPLITS


def sample(seed: int, split: str = "train"):
    return MyDataset().episode(np.random.default_rng(seed), split, ways=5, shots=2, queries=3)


def test_a_task_has_its_shots_and_queries():
    support, query = sample(0)
    assert support.inputs.shape == (10, 1, 8, 8) and query.inputs.shape == (15, 1, 8, 8)
    assert sorted(query.targets.tolist()) == sorted([0, 1, 2, 3, 4] * 3)


def test_a_task_depends_on_the_generator_alone():
    assert torch.equal(sample(1).query.inputs, sample(1).query.inputs)
    assert not torch.equal(sample(1).query.inputs, sample(2).query.inputs)


def test_splits_share_no_class():
    splits = MyDataset().splits
    members = np.concatenate([splits[split] for split in SPLITS])
    assert len(np.unique(members)) == len(members) == 60
