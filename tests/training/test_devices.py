"""The device of each local rank, on a machine without GPUs."""

import pytest
import torch

from metadist.training import resolve_device


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_each_local_rank_has_a_gpu_of_its_own(monkeypatch, name):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = []
    for rank in ("0", "1", "3"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("LOCAL_RANK", rank)
        found.append(resolve_device(name))
    assert found == [torch.device("cuda", index) for index in (0, 1, 1)]
