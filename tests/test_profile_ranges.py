"""Ranges of a step are part of a profile, and cost nothing without one."""

from contextlib import nullcontext

import torch
from torch.profiler import ProfilerActivity, profile

from metadist.profile_ranges import PREFIX, profile_range


def test_ranges_are_recorded_where_a_profiler_runs():
    assert isinstance(profile_range("step"), nullcontext)
    with profile(activities=[ProfilerActivity.CPU]) as profiler, profile_range("step"):
        torch.ones(3).sum()
    (found,) = [each for each in profiler.key_averages() if each.key == f"{PREFIX}step"]
    assert found.count == 1
    with profile_range("step") as nothing:
        assert nothing is None
