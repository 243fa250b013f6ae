"""Resolvers that the configuration uses."""

import re

import pytest
from omegaconf import OmegaConf
from worlds import run_world

from metadist.config.resolvers import fraction, run_stamp


@pytest.mark.parametrize(
    ("part", "whole", "expected"),
    [(0.1, 1000, 100), (0.25, 10, 2), (0.29, 10, 3), (0.0, 10, 1), (0.001, 10, 1), (1, 7, 7)],
)
def test_a_fraction_of_the_iterations_is_rounded_and_at_least_one(part, whole, expected):
    assert fraction(part, whole) == expected
    node = OmegaConf.create({"n": whole, "part": f"${{fraction:{part},${{n}}}}"})
    assert node.part == expected


def stamps() -> tuple[str, str]:
    return run_stamp(), run_stamp(20)


def test_all_ranks_have_the_time_at_which_rank_zero_started():
    found = {stamp for rank in run_world(stamps, 3) for stamp in rank}
    assert len(found) == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-\d{6}", found.pop())
