"""Generators of many tasks: the same as one by one."""

import numpy as np
import pytest
import torch

from metadist.kernels import library
from metadist.tasks import (
    FewShotTasks,
    Glyphs,
    Sinusoid,
    key_generator,
    seed_from,
    stack_episodes,
    task_keys,
)
from metadist.tasks.generators import KeyGenerators

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 - 1, 2**32, 2**40 + 3])
def test_each_generator_is_that_of_its_key(seed):
    keys = task_keys(seed, "validation", 123_456, range(9))
    for key, generator in zip(keys, KeyGenerators(keys), strict=True):
        expected = np.random.default_rng(key.tolist())
        assert generator.bit_generator.state == expected.bit_generator.state
        assert np.array_equal(generator.random(5), expected.random(5))
        assert generator.integers(10) == expected.integers(10)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("seed", [0, 7, 2**32 - 1, 2**40 + 3])
def test_uniform_numbers_are_those_of_each_generator(seed, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr("metadist.tasks.generators.library", lambda name: None)
    elif library("uniform") is None:
        pytest.skip("there is no C++ compiler")
    keys = task_keys(seed, "test", 2**32 - 1, range(50))
    expected = [np.random.default_rng(key.tolist()).random(33) for key in keys]
    assert np.array_equal(KeyGenerators(keys).random(33), expected)
    assert np.array_equal(KeyGenerators(keys.T.contiguous().T).random(33), expected)
    assert KeyGenerators(keys[:0]).random(33).shape == (0, 33)


def test_a_seed_depends_on_each_number_and_on_nothing_else():
    assert seed_from(3, 7) == 9565533078676835473  # with every version of Python
    rows = [(seed, iteration) for seed in range(5) for iteration in range(1, 5)]
    assert len({seed_from(*row) for row in rows}) == len(rows)


def test_no_keys_have_no_generators():
    assert list(KeyGenerators(task_keys(0, "train", 1, range(0)))) == []


@pytest.mark.parametrize("split", ["train", "test"])
def test_tasks_sampled_together_are_those_sampled_one_by_one(split):
    tasks = FewShotTasks(Sinusoid(), 1, 5, 7, train_queries=3)
    keys = task_keys(3, split, 8, range(6))
    together = tasks.sample_batch(keys, CPU)
    alone = stack_episodes([tasks.sample(key) for key in keys])
    for found, expected in zip(together, alone, strict=True):
        assert torch.equal(found.inputs, expected.inputs)
        assert torch.equal(found.targets, expected.targets)


def test_a_sine_wave_is_the_one_of_numpy():
    key = task_keys(5, "train", 2, range(4))[3]
    generator = key_generator(key)
    amplitude, phase = generator.uniform(0.1, 5.0), generator.uniform(0.0, np.pi)
    positions = generator.uniform(-5.0, 5.0, size=(12, 1))
    episode = FewShotTasks(Sinusoid(), 1, 5, 7).sample(key)
    inputs = torch.cat([episode.support.inputs, episode.query.inputs])
    targets = torch.cat([episode.support.targets, episode.query.targets])
    assert np.array_equal(inputs.numpy(), positions.astype(np.float32))
    expected = (amplitude * np.sin(positions - phase)).astype(np.float32)
    assert np.array_equal(targets.numpy(), expected)


def test_datasets_of_single_tasks_have_no_batches():
    glyphs = Glyphs(train_classes=5, validation_classes=5, test_classes=5, examples=3)
    assert (
        FewShotTasks(glyphs, 2, 1, 1).sample_batch(task_keys(0, "train", 1, range(2)), CPU) is None
    )
