import io
import pickle

import numpy as np
import pytest
from PIL import Image

from metadist.errors import UserError
from metadist.tasks import SPLITS, FewShotTasks, TieredImageNet, task_keys
from metadist.tasks.decoded_images import Counts

SHORT = {"train": "train", "validation": "val", "test": "test"}
SIZES = {"train": [2, 3, 4], "validation": [3, 2], "test": [5, 3]}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """tieredImageNet is taken to have 3, 2 and 2 classes, with 9, 5 and 8 images."""
    counts = {split: Counts(len(sizes), images=sum(sizes)) for split, sizes in SIZES.items()}
    monkeypatch.setattr(TieredImageNet, "expected", counts)


def pixels(split, index, example):
    seed = [SPLITS.index(split), index, example]
    return np.random.default_rng(seed).integers(0, 256, (84, 84, 3), dtype=np.uint8)


def png(image):
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG")
    return np.frombuffer(buffer.getvalue(), dtype=np.uint8)[:, None]


def write_pickles(root, protocol=2):
    root.mkdir(parents=True)
    for split, sizes in SIZES.items():
        order = [(index, e) for e in range(5) for index, n in enumerate(sizes) if e < n]
        images = [png(pixels(split, *each)).copy() for each in order]
        labels = {
            "label_specific": np.array([index for index, _ in order]),
            "label_specific_str": [*(f"{split} {i}" for i in range(len(sizes))), "no images"],
            "label_general": [0] * len(order),
            "label_general_str": ["animal"],
        }
        short = SHORT[split]
        (root / f"{short}_images_png.pkl").write_bytes(pickle.dumps(images, protocol))
        (root / f"{short}_labels.pkl").write_bytes(pickle.dumps(labels, protocol))


def write_folders(root):
    for split, sizes in SIZES.items():
        for index, count in enumerate(sizes):
            folder = root / SHORT[split] / f"{split} {index}"
            folder.mkdir(parents=True)
            (root / SHORT[split] / f"no {split}").mkdir(exist_ok=True)
            for e in range(count):
                Image.fromarray(pixels(split, index, e)).save(folder / f"{e}.png")


@pytest.mark.parametrize(
    "write",
    [
        write_pickles,
        lambda root: write_pickles(root, 4),
        lambda root: write_pickles(root / "tiered-imagenet"),
        write_folders,
    ],
)
def test_every_layout_gives_the_images(tmp_path, write):
    root = tmp_path / "data"
    write(root)
    dataset = TieredImageNet(str(root))
    assert dataset.input_shape == (3, 84, 84)
    for split, sizes in SIZES.items():
        classes = dataset.split_classes(split)
        assert [len(images) for images in classes] == sizes
        for index, images in enumerate(classes):
            for example, image in enumerate(images):
                assert np.array_equal(image.transpose(1, 2, 0), pixels(split, index, example))
    key = task_keys(0, "test", 0, range(1))[0]
    assert FewShotTasks(dataset, 2, 1, 1).sample(key).query.inputs.shape == (2, 3, 84, 84)
    assert dataset.protocol()["classes"] == {"train": 3, "validation": 2, "test": 2}


class Harmful:
    def __reduce__(self):
        return open, ("harm", "w")


@pytest.mark.parametrize(
    ("name", "contents", "message"),
    [
        ("val_images_png.pkl", [Harmful()], f"names {open.__module__}.open"),
        ("val_images_png.pkl", {"a": 1}, "list of arrays"),
        ("val_images_png.pkl", [1, 2], "list of arrays"),
        ("val_images_png.pkl", [np.zeros(3, np.uint8)] * 5, "cannot be decoded as PNG"),
        ("val_labels.pkl", {"label_specific": [0]}, "no labels of tieredImageNet"),
        ("val_labels.pkl", {"label_specific": [0, 9, 1, 0, 0], "label_specific_str": ["a", "b"]},
         "5 labels of 2 classes for 5 images"),
        ("val_labels.pkl", {"label_specific": [0, 1], "label_specific_str": ["a", "b"]},
         "2 labels of 2 classes for 5 images"),
        ("val_labels.pkl", {"label_specific": [0, 1, 1, 0, 0], "label_specific_str": ["a", "a"]},
         "names of its classes are not unique"),
        ("val_labels.pkl", {"label_specific": [0, 1, 1, 0, 0], "label_specific_str": ["a", "b/c"]},
         "not unique, or have slashes"),
    ],
)  # fmt: skip
def test_other_contents_are_refused(tmp_path, monkeypatch, name, contents, message):
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "data"
    write_pickles(root)
    (root / name).write_bytes(pickle.dumps(contents, 2))
    with pytest.raises(UserError, match=message) as error:
        TieredImageNet(str(root))
    assert name in str(error.value)
    assert not (tmp_path / "harm").exists()


def test_missing_files_and_classes(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="metadist fetch tiered_imagenet"):
        TieredImageNet(str(tmp_path))
    write_folders(tmp_path / "data")
    monkeypatch.setitem(TieredImageNet.expected, "test", Counts(2, images=9))
    with pytest.raises(UserError, match=r"images for test in .* is 8, in tieredImageNet 9; replac"):
        TieredImageNet(str(tmp_path / "data"))
    assert not list((tmp_path / "data").glob("*.npy"))
    monkeypatch.setitem(TieredImageNet.expected, "test", Counts(160))
    with pytest.raises(UserError, match=r"classes for test in .* is 2, in tieredImageNet 160"):
        TieredImageNet(str(tmp_path / "data"))


def test_a_class_in_two_splits_is_refused(tmp_path):
    write_folders(tmp_path)
    (tmp_path / "val" / "validation 0").rename(tmp_path / "val" / "train 0")
    with pytest.raises(UserError, match=r"class train 0 of .* is in train and in validation"):
        TieredImageNet(str(tmp_path))
