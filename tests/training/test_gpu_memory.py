"""The number of tasks that a GPU computes at once, with a simulated GPU."""

import threading

import pytest
import torch
from torch import nn

from metadist.algorithms import MAML
from metadist.models import Conv4
from metadist.tasks import FewShotTasks, Glyphs
from metadist.training.batching import MAX_CHUNK
from metadist.training.gpu_memory import gpu_chunk_size

CPU = torch.device("cpu")
GIB = 2**30


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 10 GiB, of which a step takes half a GiB, and a quarter for each task."""
    steps = []
    monkeypatch.setattr(
        "metadist.training.gpu_memory.outer_step",
        lambda arguments: steps.append(len(arguments.weights)),
    )
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 10 * GIB))
    monkeypatch.setattr(
        torch.cuda, "max_memory_allocated", lambda device: GIB // 2 + steps[-1] * GIB // 4
    )
    return steps


def tasks(queries=2):
    sizes = {"train_classes": 6, "validation_classes": 5, "test_classes": 5, "examples": 4}
    return FewShotTasks(Glyphs(**sizes), 3, 1, queries)


def learner():
    return MAML(Conv4((1, 28, 28), 3, filters=16))


def test_tasks_take_two_fifths_of_the_memory_shared_by_the_processes_of_a_gpu(gpu, monkeypatch):
    for processes, expected in ((1, 14), (2, 14), (3, 6), (100, 1)):
        monkeypatch.setattr(
            "metadist.training.gpu_memory.get_local_world_size",
            lambda processes=processes: processes,
        )
        assert gpu_chunk_size(learner(), tasks(), CPU, "float32") == expected
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 10**6 * GIB))
    assert gpu_chunk_size(learner(), tasks(), CPU, "float32") == MAX_CHUNK


def test_what_does_not_take_more_memory_with_more_tasks_is_not_measured(gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: GIB)
    assert gpu_chunk_size(learner(), tasks(), CPU, "float32") == "auto"


def test_a_gpu_that_is_too_small_computes_one_task_at_a_time(gpu, monkeypatch):
    def fail(arguments):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("metadist.training.gpu_memory.outer_step", fail)
    assert gpu_chunk_size(learner(), tasks(), CPU, "float32") == 1


def test_tasks_of_several_shapes_and_single_tasks_are_not_measured(gpu):
    class Varying:
        def sample(self, key):
            return tasks(1 + int(key[3]) % 2).sample(key)

    assert gpu_chunk_size(learner(), Varying(), CPU, "float32") == "auto"
    single = MAML(nn.Sequential(nn.Flatten(), nn.Linear(784, 3)))
    assert gpu_chunk_size(single, tasks(), CPU, "float32") == "auto"
    assert not gpu


def test_the_learner_itself_is_unchanged(gpu, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, GIB))
    peaks = iter((4, 4, 2))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    mine = learner().eval()
    mine.lock = threading.Lock()  # cannot be copied
    assert gpu_chunk_size(mine, tasks(), CPU, "float32") == MAX_CHUNK
    assert not mine.training and all(p.grad is None for p in mine.parameters())
