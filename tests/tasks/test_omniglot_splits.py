import numpy as np
import pytest

from metadist.errors import UserError
from metadist.tasks.omniglot import (
    MINIMAL_SETS,
    VINYALS_VALIDATION,
    alphabet,
    split_characters,
)

SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="module")
def names():
    """Fifty alphabets of 33 characters, those with a part in a split under their own names."""
    special = sorted({*MINIMAL_SETS["small1"], *MINIMAL_SETS["small2"], *VINYALS_VALIDATION})
    background = special + [f"Other{index}" for index in range(30 - len(special))]
    alphabets = [f"images_background/{name}" for name in background]
    alphabets += [f"images_evaluation/New{index}" for index in range(20)]
    return sorted(f"{name}/character{i:02d}" for name in alphabets for i in range(1, 34))


def alphabets(names, indices):
    return {alphabet(names[index]) for index in indices}


@pytest.mark.parametrize("split", ["random", "vinyals", "alphabets", "small1", "small2"])
def test_parts_are_disjoint_and_follow_from_the_seed(names, split):
    parts = split_characters(names, split, 0, 5)
    assert tuple(parts) == SPLITS
    assert all(p.dtype == np.int64 for p in parts.values())
    joint = np.concatenate(list(parts.values()))
    assert len(np.unique(joint)) == len(joint)
    again, other = split_characters(names, split, 0, 5), split_characters(names, split, 1, 5)
    assert all(np.array_equal(parts[s], again[s]) for s in SPLITS)
    assert all(np.array_equal(parts[s], other[s]) for s in SPLITS) == (split == "vinyals")


def test_alphabets(names):
    parts = split_characters(names, "alphabets", 0, 7)
    trained, held, tested = (alphabets(names, parts[split]) for split in SPLITS)
    assert (len(trained), len(held), len(tested)) == (23, 7, 20)
    assert not trained & held
    assert all(name.startswith("images_background/") for name in trained | held)
    assert all(name.startswith("images_evaluation/") for name in tested)
    assert sum(map(len, parts.values())) == len(names)


@pytest.mark.parametrize("split", ["small1", "small2"])
def test_minimal_sets(names, split):
    parts = split_characters(names, split, 0, 5)
    trained, held, tested = (alphabets(names, parts[part]) for part in SPLITS)
    assert trained == {f"images_background/{name}" for name in MINIMAL_SETS[split]}
    assert len(held) == 5
    assert not held & trained
    assert len(tested) == 20
    assert [len(parts[part]) for part in SPLITS] == [5 * 33, 5 * 33, 20 * 33]


def test_vinyals_goes_by_the_order_of_names(names):
    parts = split_characters(names, "vinyals", 0, 5)
    validation = {f"images_background/{name}" for name in VINYALS_VALIDATION}
    assert alphabets(names, parts["validation"]) == validation
    assert [len(parts[split]) for split in SPLITS] == [1200 - 5 * 33, 5 * 33, 50 * 33 - 1200]
    assert parts["train"].max() < 1200 <= parts["test"].min()


@pytest.mark.parametrize(
    ("split", "held", "message"),
    [
        ("alphabets", 30, "validation_alphabets=30 does not fit: from 1 to 29"),
        ("small1", 25, "validation_alphabets=25 does not fit: from 1 to 24"),
        ("alphabets", 0, "validation_alphabets=0 does not fit"),
        ("halves", 5, "split=halves is none of Omniglot's splits: choose random, vinyals, alph"),
    ],
)
def test_what_does_not_fit(names, split, held, message):
    with pytest.raises(UserError, match=message):
        split_characters(names, split, 0, held)
