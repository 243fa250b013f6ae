import codecs
import os
import pickle

import numpy as np
import omniglot_tree
import pytest
from mini_imagenet_tree import (
    PHASES,
    cache,
    everything,
    labels,
    phases,
    pixels,
    write_caches,
    write_caches_of_learn2learn,
    write_folders,
    write_image,
    write_lists,
    write_phases,
)
from PIL import Image

from metadist.errors import UserError
from metadist.tasks import (
    SPLITS,
    ImageDataset,
    MiniImageNet,
    image_files,
    mini_imagenet,
)
from metadist.tasks.mini_imagenet import PUBLISHED

pytestmark = pytest.mark.usefixtures("small_mini_imagenet")
LAYOUTS = [
    write_folders,
    write_lists,
    lambda root: write_lists(root, nested=True),
    write_caches,
    lambda root: write_caches(root, protocol=2),
    write_caches_of_learn2learn,
    write_phases,
    lambda root: write_phases(root, protocol=5),
]


def by_name(dataset):
    return {
        f"{part}/{label}": images
        for part, names in dataset.classes.items()
        for label, images in zip(names, dataset.split_classes(part), strict=True)
    }


def refused(root, *parts):
    omniglot_tree.refused(lambda: MiniImageNet(str(root)), *parts)
    assert not list(root.rglob("*.npy"))
    assert not list(root.rglob(".*.part"))


@pytest.mark.parametrize("write", LAYOUTS)
def test_every_layout_gives_the_images(tmp_path, write):
    dataset = MiniImageNet(str(write(tmp_path / "data")))
    found, expected = by_name(dataset), everything()
    assert list(found) == list(expected)
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert isinstance(dataset, ImageDataset)
    assert dataset.input_shape == (3, 84, 84)
    assert dataset.protocol() == {
        "dataset": "mini_imagenet",
        "data_checksum": dataset.protocol()["data_checksum"],
        "rotations": False,
        "test_rotations": False,
        "class_split": "unknown",
        "classes": {"train": 3, "validation": 2, "test": 2},
        "image_size": 84,
    }


def test_the_published_split(tmp_path, monkeypatch):
    assert [len(PUBLISHED[split]) for split in SPLITS] == [64, 16, 20]
    assert len({name for names in PUBLISHED.values() for name in names}) == 100
    assert all(names == sorted(names) for names in PUBLISHED.values())
    dataset = MiniImageNet(str(write_caches(tmp_path / "data")))
    monkeypatch.setattr(mini_imagenet, "PUBLISHED", {part: labels(part) for part in SPLITS})
    assert dataset.protocol()["class_split"] == "ravi_larochelle"


def test_images_of_any_size_and_colour_are_resized_as_pillow_does(tmp_path):
    root = write_folders(tmp_path / "data")
    folder = root / "val" / "n00000020"
    photo = np.random.default_rng(0).integers(0, 256, (120, 97, 3), dtype=np.uint8)
    for old in folder.iterdir():
        old.unlink()
    Image.fromarray(photo).save(folder / "a.JPEG", quality=95)
    Image.fromarray(photo[..., 0]).save(folder / "b.png")
    Image.fromarray(photo).convert("CMYK").save(folder / "c.jpg")
    Image.fromarray(photo).convert("P").save(folder / "d.png")
    expected = []
    for file in sorted(folder.iterdir()):
        with Image.open(file) as image:
            grown = image.convert("RGB").resize((84, 84), Image.LANCZOS)
        expected.append(np.array(grown).transpose(2, 0, 1))
    (folder / "notes.txt").write_text("not an image")
    (folder / "._a.JPEG").write_bytes(b"what other systems leave")
    (root / "val" / ".thumbnails").mkdir()
    found = by_name(MiniImageNet(str(root)))["validation/n00000020"]
    assert np.array_equal(found, expected)


def test_decoded_once_and_again_when_a_file_changes(tmp_path, monkeypatch):
    made = []
    decode = image_files.decode_files
    monkeypatch.setattr(
        image_files, "decode_files", lambda *given: made.append(given[2]) or decode(*given)
    )
    root = write_folders(tmp_path / "data")
    MiniImageNet(str(root))
    again = MiniImageNet(str(root))
    assert made == [84]
    assert not again.images[0].flags.writeable
    file = root / "test" / "n00000031" / "n0000003100000002.png"
    write_image(file, pixels("n00000099", 0))
    changed = by_name(MiniImageNet(str(root)))["test/n00000031"]
    assert made == [84] * 2
    assert np.array_equal(changed[2], pixels("n00000099", 0).transpose(2, 0, 1))
    (root / "train" / "n00000010").rename(root / "train" / "n00000009")
    assert MiniImageNet(str(root)).classes["train"][0] == "n00000009"
    assert made == [84] * 3


def test_a_class_that_moves_to_another_split_is_noticed(tmp_path):
    root = write_folders(tmp_path / "data")
    MiniImageNet(str(root))
    # The order of the files stays the same.
    (root / "train" / "n00000012").rename(root / "val" / "n00000012")
    with pytest.raises(UserError, match=r"number of classes .*train.* is 2, "):
        MiniImageNet(str(root))


# --- what is refused ---------------------------------------------------------------------------


def test_no_layout(tmp_path):
    root = tmp_path / "data"
    root.mkdir()
    refused(root, root, "it has nothing", "train, val and test", "train.csv", "mini-imagenet-cache")
    (root / "train").mkdir()
    (root / "mini-imagenet-cache-train.pkl").write_bytes(b"")
    refused(root, "it has mini-imagenet-cache-train.pkl, train")
    with pytest.raises(UserError, match="which is a file"):
        MiniImageNet(str(root / "mini-imagenet-cache-train.pkl"))


def test_a_list_that_names_images_that_are_not_there(tmp_path):
    root = write_lists(tmp_path / "data")
    for name in ("n0000001000000000.png", "n0000002000000001.png", "n0000002100000003.png"):
        (root / "images" / name).unlink()
    refused(
        root,
        f"1 that {root / 'train.csv'} names (n0000001000000000.png)",
        f"2 that {root / 'val.csv'} names (n0000002100000003.png, n000",
    )


def test_a_list_with_a_byte_order_mark(tmp_path):
    root = write_lists(tmp_path / "data")
    file = root / "train.csv"
    file.write_bytes(codecs.BOM_UTF8 + file.read_bytes())
    assert len(MiniImageNet(root).splits["train"]) > 1


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("../../secret.png,n00000010", ["line 2", "../../secret.png"]),
        ("/etc/passwd,n00000010", ["line 2", "/etc/passwd"]),
        ("a.png,../n00000010", ["line 2"]),
        ("a.png", ["line 2", "'a.png'"]),
        ("", ["line 2"]),
    ],
)
def test_lists_name_files_of_their_own_folder(tmp_path, line, parts):
    root = write_lists(tmp_path / "data")
    file = root / "train.csv"
    head, *rest = file.read_text().splitlines()
    file.write_text("\n".join([head, line, *rest]))
    refused(root, file, "no list of images", "filename,label", *parts)


def test_a_list_without_a_head(tmp_path):
    root = write_lists(tmp_path / "data")
    (root / "test.csv").write_text("n0000003000000000.png,n00000030\n")
    refused(root, root / "test.csv", "first line is not filename,label")


def test_classes_that_are_missing_or_in_two_parts_or_too_small(tmp_path):
    root = write_folders(tmp_path / "data")
    (root / "val" / "n00000021" / "n0000002100000001.png").unlink()
    refused(root, f"validation/n00000021 in {root} has 3 images where MiniImageNet has 4")
    for example in range(1, 6, 4):
        write_image(root / "val" / "n00000021" / f"{example}.png", pixels("n00000021", 1))
    refused(root, f"validation/n00000021 in {root} has 5 images where MiniImageNet has 4")
    (root / "val" / "n00000021").rename(root / "test" / "n00000021")
    refused(root, f"classes for validation in {root} is 1, in MiniImageNet 2; replace")
    (root / "test" / "n00000021" / "5.png").unlink()
    (root / "test" / "n00000021").rename(root / "val" / "n00000010")
    refused(root, "n00000010", "in train and in validation")


@pytest.mark.parametrize("data", [b"", b"\x89PNG\r\n\x1a\n damaged", b"GIF89a nothing"])
def test_an_image_that_cannot_be_decoded_is_named(tmp_path, data):
    root = write_folders(tmp_path / "data")
    bad = root / "train" / "n00000012" / "n0000001200000002.png"
    bad.write_bytes(data)
    refused(root, bad, "cannot be decoded")


def test_an_image_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(image_files, "MAX_IMAGE_PIXELS", 84 * 84)
    root = write_folders(tmp_path / "data")
    bad = root / "train" / "n00000012" / "n0000001200000002.png"
    write_image(bad, np.zeros((200, 300, 3), dtype=np.uint8))
    refused(root, bad, "300 x 200 pixels")


class Harmful:
    def __init__(self, path) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("protocol", range(6))
def test_a_pickle_with_code_in_it_is_refused_and_nothing_is_run(tmp_path, protocol):
    root = write_caches(tmp_path / "data")
    file = root / "mini-imagenet-cache-val.pkl"
    file.write_bytes(
        pickle.dumps({**cache("validation"), "x": Harmful(tmp_path / "ran")}, protocol)
    )
    text = "names posix.mkdir" if protocol > 1 else "instruction"
    refused(root, file, text, "nothing in it was executed", "trust")
    assert not (tmp_path / "ran").exists()


def without(key):
    return {name: value for name, value in cache("test").items() if name != key}


@pytest.mark.parametrize(
    ("contents", "parts"),
    [
        (without("class_dict"), ["KeyError: 'class_dict'", "needs image_data"]),
        (without("image_data"), ["KeyError: 'data'"]),
        ([1, 2], ["a list instead of a dictionary"]),
        ({**cache("test"), "image_data": [1, 2]}, ["needs image_data"]),
        ({**cache("test"), "image_data": np.zeros((8, 84, 84))}, ["float64"]),
        ({**cache("test"), "image_data": np.zeros((8, 80, 84, 3), np.uint8)}, ["(8, 80, 84, 3)"]),
        ({**cache("test"), "class_dict": {"a": [0, 8]}}, ["beyond its 8"]),
        ({**cache("test"), "class_dict": {"a": [-1, 3]}}, ["beyond its 8"]),
        ({**cache("test"), "class_dict": {"a": [1, 2], "b": [2, 3]}}, ["named twice"]),
        ({**cache("test"), "class_dict": {"a": [1, 1]}}, ["named twice"]),
        ({**cache("test"), "class_dict": {"a": ["one"]}}, ["ValueError"]),
    ],
)
def test_pickles_of_something_else(tmp_path, contents, parts):
    root = write_caches(tmp_path / "data")
    file = root / "mini-imagenet-cache-test.pkl"
    file.write_bytes(pickle.dumps(contents, 4))
    refused(root, file, *parts)


def nested(levels):
    """2 ** levels numbers in a pickle of a few bytes: each level has the one below twice."""
    value = [1, 2]
    for _ in range(levels):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    "contents",
    [
        {**phases("test"), "labels": nested(60)},
        {**phases("test"), "labels": [nested(60)] * 8},
        {**phases("test"), "catname2label": {"n00000030": nested(60)}},
        {**cache("test"), "class_dict": {"a": nested(60), "b": [nested(60)]}},
        {**cache("test"), "class_dict": {str(i): [0] * 100_000 for i in range(8)}},
        {**cache("test"), "class_dict": {str(i): [] for i in range(100_000)}},
        {**cache("test"), "class_dict": nested(60)},
    ],
    ids=range(7),
)
def test_crafted_lists_are_refused(tmp_path, contents):
    phased = "labels" in contents
    root = (write_phases if phased else write_caches)(tmp_path / "data")
    file = root / (PHASES["test"] if phased else "mini-imagenet-cache-test.pkl")
    file.write_bytes(pickle.dumps(contents, 4))
    refused(root, file, "no cache of MiniImageNet")


def test_half_a_pickle(tmp_path):
    root = write_caches(tmp_path / "data")
    file = root / "mini-imagenet-cache-test.pkl"
    data = file.read_bytes()
    for end in (0, 100, len(data) - 1):
        file.write_bytes(data[:end])
        refused(root, file, "complete copy")
