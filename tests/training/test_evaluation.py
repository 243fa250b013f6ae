"""Means over tasks and their intervals."""

import math

import numpy as np
import pytest
import torch

from metadist.training.evaluation import estimate


def test_mean_and_interval_against_numpy():
    values = torch.rand(600, generator=torch.Generator().manual_seed(0))
    found = estimate(values)
    exact = values.numpy().astype(np.float64)
    assert found.mean == pytest.approx(exact.mean(), rel=1e-12)
    assert found.ci95 == pytest.approx(1.96 * exact.std(ddof=1) / np.sqrt(600), rel=1e-12)
    assert found.tasks == 600


def test_one_task_has_no_interval():
    assert math.isnan(estimate(torch.ones(1)).ci95)
