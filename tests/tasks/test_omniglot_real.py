import zipfile

import numpy as np
import pytest
import torch
from omniglot_tree import REAL, ink

from metadist.tasks import FewShotTasks, Omniglot, task_keys

pytestmark = pytest.mark.skipif(
    not (REAL / "images_background.zip").exists(), reason=f"no Omniglot images in {REAL}"
)
SPLITS = ("train", "validation", "test")


@pytest.fixture(scope="session")
def omniglot(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("METADIST_CACHE", str(tmp_path_factory.mktemp("omniglot")))
        before = sorted(REAL.iterdir())
        yield Omniglot(str(REAL), download=False)
        assert sorted(REAL.iterdir()) == before


def test_the_papers_split(omniglot):
    assert [len(omniglot.characters[split]) for split in SPLITS] == [1100, 100, 423]
    names = [name for split in SPLITS for name in omniglot.characters[split]]
    assert len(set(names)) == 1623
    assert sum(name.startswith("images_background/") for name in names) == 964
    assert omniglot.images.shape == (1623, 20, 28, 28)
    assert [len(omniglot.splits[split]) for split in SPLITS] == [1100, 100, 423]


@pytest.mark.parametrize("split", SPLITS)
def test_images_are_those_of_the_zip_files(omniglot, split):
    names, classes = omniglot.characters[split], omniglot.split_classes(split)
    for index in (0, len(names) // 2, len(names) - 1):
        with zipfile.ZipFile(REAL / f"{names[index].partition('/')[0]}.zip") as archive:
            members = [f for f in archive.namelist() if f.startswith(f"{names[index]}/")]
            files = sorted(f for f in members if f.endswith(".png"))
            expected = [ink(archive.read(file), 28) for file in files]
        assert np.array_equal(classes[index], expected)
        assert 0.01 < np.mean(expected) / 255 < 0.4


def test_nearest_neighbour_in_pixels_is_as_poor_as_the_literature_says(omniglot):
    """41.7% for 5-way 1-shot on raw pixels (Vinyals et al. 2016, arXiv 1606.04080, table 1)."""
    tasks = FewShotTasks(omniglot, 5, 1, 15)
    accuracies = []
    for key in task_keys(0, "test", 0, range(200)):
        support, query = tasks.draw(key)
        nearest = torch.cdist(query.inputs.flatten(1), support.inputs.flatten(1)).argmin(dim=1)
        accuracies.append((support.targets[nearest] == query.targets).float().mean().item())
    assert 0.36 < np.mean(accuracies) < 0.52
