import pytest
from PIL import Image

from metadist.errors import UserError
from metadist.tasks import CUB, SPLITS, FewShotTasks, task_keys
from metadist.tasks.decoded_images import Counts

SPECIES = ["001.Black_footed_Albatross", *(f"{n:03d}.Bird" for n in range(2, 201))]


@pytest.fixture(autouse=True)
def images_of_all_species(monkeypatch):
    """Two images of each species are taken to be all of them."""
    monkeypatch.setattr(CUB, "expected", {"": Counts(200, images=400)})


def write(folder, images=2):
    for index, name in enumerate(SPECIES):
        (folder / name).mkdir(parents=True)
        for example in range(images + index % 2):
            Image.new("RGB", (9, 7), (index, example, 0)).save(folder / name / f"{example}.png")


@pytest.mark.parametrize(
    "below", [".", "images", "CUB_200_2011/images", "cubirds200/CUB_200_2011/images"]
)
def test_the_split_of_chen_et_al(tmp_path, below):
    write(tmp_path / below, images=3)
    dataset = CUB(str(tmp_path), size=8)
    found = {
        split: [int(images[0, 0, 0, 0]) for images in dataset.split_classes(split)]
        for split in SPLITS
    }
    # As in torchmeta (assets/cub/val.json): 002, 006, 010, … are for validation.
    assert found["train"] == list(range(0, 200, 2))
    assert [SPECIES[index][:3] for index in found["validation"]][:3] == ["002", "006", "010"]
    assert found["validation"] == list(range(1, 200, 4))
    assert found["test"] == list(range(3, 200, 4))
    assert dataset.protocol()["classes"] == {"train": 100, "validation": 50, "test": 50}
    key = task_keys(0, "test", 0, range(1))[0]
    assert FewShotTasks(dataset, 5, 1, 2).sample(key).query.inputs.shape == (10, 3, 8, 8)


def test_an_incomplete_copy_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"has no species .* metadist fetch cub"):
        CUB(str(tmp_path))
    write(tmp_path / "images", images=1)
    for file in (tmp_path / "images" / "017.Bird").iterdir():
        file.unlink()
    with pytest.raises(UserError, match=r"classes in .* is 199, in CUB-200-2011 200; replace"):
        CUB(str(tmp_path))
    (tmp_path / "images" / "018.Bird" / "0.png").rename(tmp_path / "images" / "017.Bird" / "0.png")
    with pytest.raises(UserError, match=r"images in .* is 29\d, in CUB-200-2011 400; replace"):
        CUB(str(tmp_path))
