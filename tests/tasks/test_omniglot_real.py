"""All of Omniglot: a generated copy in the original layout and, where they are, the real images."""

import zipfile

import numpy as np
import pytest
import torch
from omniglot_tree import REAL, character_names, ink, write_whole

from metadist.errors import UserError
from metadist.tasks import FewShotTasks, Omniglot, task_keys

needs_real = pytest.mark.skipif(
    not (REAL / "images_background.zip").exists(), reason=f"no Omniglot images in {REAL}"
)
SPLITS = ("train", "validation", "test")
GENERATED_EXAMPLES = 2


@pytest.fixture(
    scope="module",
    params=["generated", pytest.param("real", marks=[needs_real, pytest.mark.slow])],
    autouse=True,
)
def root(request, tmp_path_factory):
    """The directory of the zip files."""
    if request.param == "real":
        yield REAL
        return
    directory = write_whole(tmp_path_factory.mktemp("generated"), GENERATED_EXAMPLES)
    with pytest.MonkeyPatch.context() as patch:
        counts = {n: c._replace(examples=GENERATED_EXAMPLES) for n, c in Omniglot.expected.items()}
        patch.setattr(Omniglot, "expected", counts)
        yield directory


@pytest.fixture(scope="module")
def cache(root, tmp_path_factory):
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture
def cached(cache, monkeypatch):
    monkeypatch.setenv("METADIST_CACHE", cache)


@pytest.fixture(scope="module")
def omniglot(root, cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METADIST_CACHE", cache)
        if root == REAL:
            before = sorted(REAL.iterdir())
            yield Omniglot(str(REAL), download=False)
            assert sorted(REAL.iterdir()) == before
        else:
            yield Omniglot(str(root), download=False)


@needs_real
def test_the_generated_characters_are_those_of_the_real_files():
    names = set()
    for part in ("images_background", "images_evaluation"):
        with zipfile.ZipFile(REAL / f"{part}.zip") as archive:
            names |= {n.rpartition("/")[0] for n in archive.namelist() if n.endswith(".png")}
    assert sorted(names) == character_names()


def test_the_papers_split(omniglot, root):
    assert [len(omniglot.characters[split]) for split in SPLITS] == [1100, 100, 423]
    names = [name for split in SPLITS for name in omniglot.characters[split]]
    assert len(set(names)) == 1623
    assert sum(name.startswith("images_background/") for name in names) == 964
    examples = GENERATED_EXAMPLES if root != REAL else 20
    assert np.shape(omniglot.images) == (1623, examples, 28, 28)
    assert [len(omniglot.splits[split]) for split in SPLITS] == [1100, 100, 423]


@pytest.mark.parametrize("split", SPLITS)
def test_images_are_those_of_the_zip_files(omniglot, root, split):
    names, classes = omniglot.characters[split], omniglot.split_classes(split)
    for index in (0, len(names) // 2, len(names) - 1):
        with zipfile.ZipFile(root / f"{names[index].partition('/')[0]}.zip") as archive:
            members = [f for f in archive.namelist() if f.startswith(f"{names[index]}/")]
            files = sorted(f for f in members if f.endswith(".png"))
            expected = [ink(archive.read(file), 28) for file in files]
        assert np.array_equal(classes[index], expected)
        assert 0.01 < np.mean(expected) / 255 < 0.4


def test_nearest_neighbour_in_pixels_is_as_poor_as_the_literature_says(omniglot, root):
    """41.7% for 5-way 1-shot on raw pixels (Vinyals et al. 2016, arXiv 1606.04080, table 1)."""
    if root != REAL:
        pytest.skip("generated images are easier")
    tasks = FewShotTasks(omniglot, 5, 1, 15)
    accuracies = []
    for key in task_keys(0, "test", 0, range(200)):
        support, query = tasks.sample(key)
        nearest = torch.cdist(query.inputs.flatten(1), support.inputs.flatten(1)).argmin(dim=1)
        accuracies.append((support.targets[nearest] == query.targets).float().mean().item())
    assert 0.36 < np.mean(accuracies) < 0.52


def variant(root, **options):
    return Omniglot(str(root), download=False, **options)


@pytest.mark.parametrize(
    ("split", "classes"),
    [
        ("vinyals", [1028, 172, 423]),  # 4112, 688 and 1692 with rotations, as published
        ("alphabets", None),
        ("small1", None),
        ("small2", None),
    ],
)
def test_the_other_splits(omniglot, root, cached, split, classes):
    dataset = variant(root, split=split)
    found = [len(dataset.characters[part]) for part in SPLITS]
    alphabets = [{n.rpartition("/")[0] for n in dataset.characters[part]} for part in SPLITS]
    if split == "vinyals":
        assert found == classes
        assert len(alphabets[2]) == 13
        assert "images_evaluation/Gurmukhi" in alphabets[2]
        return
    assert found[2] == 659
    assert [len(a) for a in alphabets[1:]] == [5, 20]
    if split == "alphabets":
        assert found[0] + found[1] == 964
        assert len(alphabets[0]) == 25
    else:
        assert found[0] == {"small1": 136, "small2": 156}[split]


@pytest.mark.parametrize("split", ["small1", "small2"])
def test_minimal_sets_are_those_of_the_official_files(omniglot, root, cached, split):
    dataset = variant(root, split=split)
    name = f"images_background_{split}"
    with zipfile.ZipFile(root / f"{name}.zip") as archive:
        members = sorted(f for f in archive.namelist() if f.endswith(".png"))
        characters = sorted({member.rpartition("/")[0] for member in members})
        assert [c.replace(name, "images_background") for c in characters] == dataset.characters[
            "train"
        ]
        images = dataset.split_classes("train")
        for position in range(0, len(members), 97):
            expected = ink(archive.read(members[position]), 28)
            row, column = divmod(position, len(images[0]))
            assert np.array_equal(images[row][column], expected)


def test_within_alphabets(omniglot, root, cached):
    dataset = variant(
        root, split="small1", within_alphabet=True, rotations=False, test_rotations=False
    )
    tasks = FewShotTasks(dataset, 20, 1, 1)
    named = {
        image.tobytes(): name.split("/")[1]
        for split in SPLITS
        for name, images in zip(
            dataset.characters[split], dataset.split_classes(split), strict=True
        )
        for image in images
    }
    for split, alphabets in (("train", 5), ("test", 20)):
        seen = set()
        for key in task_keys(0, split, 0, range(150)):
            pixels = (tasks.sample(key).support.inputs[:, 0] * 255).round().to(torch.uint8).numpy()
            [alphabet] = {named[image.tobytes()] for image in pixels}
            seen.add(alphabet)
        assert len(seen) == alphabets
    assert dataset.protocol()["within_alphabet"] is True
    with pytest.raises(UserError, match=r"largest alphabet in the train split .* only 40"):
        FewShotTasks(dataset, 41, 1, 1)
