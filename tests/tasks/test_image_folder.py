import logging
import os
import shutil

import numpy as np
import pytest
import tiny
import torch
from PIL import Image

from metadist.config.instantiate import instantiate
from metadist.errors import UserError
from metadist.tasks import SPLITS, FewShotTasks, ImageDataset, ImageFolder, image_files, task_keys
from metadist.tasks.image_files import FORMATS

SIZES = {f"class{index:02d}": 3 + index for index in range(10)}


def colour(name, example):
    return int(name[5:7]) * 20, example * 10, 128


def write(root, classes, suffix=".png", size=(12, 10)):
    """Images of one colour each, which says class and example."""
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for example in range(count):
            image = Image.new("RGB", size if example % 2 else size[::-1], colour(name, example))
            image.save(root / name / f"{example:03d}{suffix}")
    return root


def of_class(dataset, split, name):
    index = dataset.classes[split].index(name)
    return dataset.split_classes(split)[index]


def test_folders_are_split_by_the_seed(tmp_path):
    root = str(write(tmp_path / "data", SIZES))
    dataset = ImageFolder(root, size=8)
    assert isinstance(dataset, ImageDataset)
    assert dataset.input_shape == (3, 8, 8)
    assert [len(dataset.classes[split]) for split in SPLITS] == [6, 2, 2]
    assert sorted(name for split in SPLITS for name in dataset.classes[split]) == list(SIZES)
    assert all(sorted(names) == names for names in dataset.classes.values())
    for split in SPLITS:
        for name, images in zip(dataset.classes[split], dataset.split_classes(split), strict=True):
            assert len(images) == SIZES[name]
            for example, image in enumerate(images):
                assert (image == np.array(colour(name, example))[:, None, None]).all()
    assert ImageFolder(root, size=8).classes == dataset.classes
    others = [ImageFolder(root, size=8, seed=seed) for seed in range(1, 6)]
    assert any(other.classes != dataset.classes for other in others)
    assert dataset.protocol()["split_seed"] == 0
    assert dataset.protocol()["classes"] == {"train": 6, "validation": 2, "test": 2}
    assert len({other.protocol()["class_names"] for other in others}) > 1
    # As in earlier versions.
    assert dataset.classes["validation"] == ["class02", "class03"]
    half = ImageFolder(root, size=8, validation_fraction=0.04, test_fraction=0.5)
    assert [len(half.classes[split]) for split in SPLITS] == [4, 1, 5]
    near = ImageFolder(root, size=8, validation_fraction=0.28)  # 2.8 of 10 classes
    assert [len(near.classes[split]) for split in SPLITS] == [5, 3, 2]
    # Both are fractions of all classes.
    small = ImageFolder(root, size=8, validation_fraction=0.4, test_fraction=0.4)
    assert [len(small.classes[split]) for split in SPLITS] == [2, 4, 4]


@pytest.mark.parametrize("validation", ["val", "validation", "valid"])
def test_split_folders(tmp_path, validation):
    parts = {"train": range(5), validation: range(5, 7), "test": range(7, 10)}
    for part, indices in parts.items():
        write(tmp_path / part, {f"class{i:02d}": 3 + i for i in indices}, ".jpg")
    (tmp_path / ".hidden").mkdir()
    dataset = ImageFolder(str(tmp_path), size=8)
    assert [len(dataset.classes[split]) for split in SPLITS] == [5, 2, 3]
    assert len(of_class(dataset, "test", "class08")) == 11
    assert "split_seed" not in dataset.protocol()


@pytest.mark.parametrize(
    ("given", "missing"), [(["train"], "validation, test"), (["valid", "test"], "train")]
)
def test_folders_of_some_splits_are_no_classes(tmp_path, given, missing):
    for part in given:
        write(tmp_path / part, {f"class{i:02d}": 4 for i in range(5)})
    with pytest.raises(UserError, match=f"folders of classes in .*, and none of {missing}: add"):
        ImageFolder(str(tmp_path), size=8)


def test_missing_validation_is_taken_from_training(tmp_path):
    write(tmp_path / "train", {f"class{i:02d}": 4 for i in range(5)})
    write(tmp_path / "test", {f"class{i:02d}": 4 for i in range(5, 8)})
    dataset = ImageFolder(str(tmp_path), size=8)
    assert [len(dataset.classes[split]) for split in SPLITS] == [4, 1, 3]
    assert dataset.protocol()["split_seed"] == 0


def test_lists(tmp_path):
    write(tmp_path / "images", {f"class{i:02d}": 4 for i in range(6)})
    for part, names in (("train", "012"), ("val", "3"), ("test", "45")):
        lines = [f"{e:03d}.png,class0{name}" for name in names for e in range(3)]
        (tmp_path / f"{part}.csv").write_text("\n".join(["filename,label", *lines]))
    dataset = ImageFolder(str(tmp_path), size=8)
    assert [len(dataset.classes[split]) for split in SPLITS] == [3, 1, 2]
    assert len(of_class(dataset, "validation", "class03")) == 3


def test_an_image_with_two_labels_of_one_split_is_refused(tmp_path):
    write(tmp_path, {"class00": 2})
    (tmp_path / "class00").rename(tmp_path / "images")
    for part in ("train", "val", "test"):
        (tmp_path / f"{part}.csv").write_text("filename,label\n")
    (tmp_path / "train.csv").write_text("filename,label\n000.png,a\n001.png,b\n000.png,b\n")
    with pytest.raises(UserError, match=r"train\.csv names 000\.png as b of train, .* a of train"):
        ImageFolder(str(tmp_path), size=8)


def test_greyscale_and_nested_folders(tmp_path):
    root = write(tmp_path / "data", {f"class{i:02d}/deep": 4 for i in range(5)}, ".bmp")
    shutil.copytree(root / "class00", root / "class01" / "deep" / ".hidden")
    shutil.copytree(root / "class00", root / ".hidden")
    dataset = ImageFolder(str(root), size=16, channels=1)
    assert dataset.input_shape == (1, 16, 16)
    name = dataset.classes["train"][0]
    grey = np.asarray(Image.new("RGB", (1, 1), colour(name, 2)).convert("L"))[0, 0]
    assert (of_class(dataset, "train", name)[2] == grey).all()
    assert {len(images) for split in SPLITS for images in dataset.split_classes(split)} == {4}


def test_linked_folders_are_followed_once(tmp_path):
    root = write(tmp_path / "data", {f"class{i:02d}": 4 for i in range(5)})
    write(tmp_path, {"class99": 5})
    (root / "class02" / "more").symlink_to(tmp_path / "class99")
    (root / "class03" / "itself").symlink_to(root / "class03")
    (root / "class04" / "above").symlink_to(root)
    dataset = ImageFolder(str(root), size=8)
    sizes = {
        name: len(of_class(dataset, split, name))
        for split in SPLITS
        for name in dataset.classes[split]
    }
    assert sizes == {"class00": 4, "class01": 4, "class02": 9, "class03": 4, "class04": 4}


@pytest.mark.parametrize("splits", [("", ""), ("train", "test")])
def test_a_folder_that_is_two_classes_by_a_link_is_refused(tmp_path, splits):
    first, second = (tmp_path / "data" / split for split in splits)
    write(first, {f"class{i:02d}": 4 for i in range(5)})
    second.mkdir(exist_ok=True)
    (second / "linked").symlink_to(first / "class02")
    message = r"class02 and \S+linked are one folder, by a link, and would be two classes"
    with pytest.raises(UserError, match=message):
        ImageFolder(str(tmp_path / "data"), size=8)


def test_decoded_once_for_each_size_and_again_when_a_file_changes(tmp_path, monkeypatch):
    calls = []
    decode = image_files.decode_files
    monkeypatch.setattr(
        image_files, "decode_files", lambda *given: calls.append(given[2]) or decode(*given)
    )
    root = write(tmp_path / "data", SIZES)
    for size in (8, 8, 9):
        ImageFolder(str(root), size=size)
    assert calls == [8, 9]
    assert not ImageFolder(str(root), size=8).split_classes("train")[0].flags.writeable
    Image.new("RGB", (40, 40)).save(root / "class03" / "000.png")
    ImageFolder(str(root), size=8)
    assert calls == [8, 9, 8]
    (root / "class03").rename(root / "renamed")
    assert any("renamed" in names for names in ImageFolder(str(root), size=8).classes.values())


def test_what_cannot_be_used_is_refused(tmp_path):
    empty = tmp_path / "empty"
    empty.mkdir()
    cases = [(empty, "no images in class folders")]
    missing = tmp_path / "none"
    cases.append(
        (missing, rf"^dataset\.root={missing} does not exist: give the directory of class")
    )
    one = write(tmp_path / "one", {"class00": 3})
    cases.append((one, "the number of classes .* is 1 and none is left for train"))
    with pytest.raises(UserError, match="none is left for train"):
        ImageFolder(str(one), size=8)
    assert not [*one.glob("*.npy")]  # the images have not been decoded
    broken = write(tmp_path / "broken", SIZES)
    (broken / "class04" / "001.png").write_bytes(b"\x89PNG\r\n\x1a\nbroken")
    cases.append((broken, r"class04/001.png cannot be decoded"))
    several = write(tmp_path / "several", {f"class{index:02}": 3 for index in range(5)})
    for file in sorted(several.rglob("*.png"))[1:13]:
        file.write_bytes(b"")
    cases.append((several, r"class00/001\.png cannot be decoded .*; replace or delete it"))
    shared = tmp_path / "shared"
    for part in ("train", "val"):
        write(shared / part, {"class00": 3, "class01": 3})
    cases.append((shared, "class00 of .* is in train and in validation"))
    both = tmp_path / "both"
    for part, index in (("train", 0), ("val", 1), ("validation", 2), ("test", 3)):
        write(both / part, {f"class{index:02d}": 3})
    cases.append((both, "val and .*validation are both for validation: keep one of them"))
    without_test = tmp_path / "without"
    for part, index in (("train", 0), ("val", 4)):
        write(without_test / part, {f"class{index + i:02d}": 3 for i in range(3)})
    cases.append(
        (
            without_test,
            r"no classes with images for test: add them in the folder test, or to test\.csv if",
        )
    )
    one_to_train = tmp_path / "one_to_train"
    for part, index in (("train", 0), ("test", 1)):
        write(one_to_train / part, {f"class{index:02d}": 3})
    cases.append((one_to_train, "the number of classes .* is 2 and none is left for train"))
    text = write(tmp_path / "text", SIZES)
    (text / "class04" / "001.png").write_text("no image")
    cases.append((text, "it is of no known image format"))
    twice = tmp_path / "twice"
    write(twice / "images", {"class00": 3})
    for part in ("train", "val", "test"):
        (twice / f"{part}.csv").write_text(f"filename,label\n000.png,{part}_label\n")
    for file in (twice / "images" / "class00").iterdir():
        file.rename(twice / "images" / file.name)
    cases.append((twice, r"val.csv names 000.png as val_label of validation, .* train_label of"))
    for root, message in cases:
        with pytest.raises(UserError, match=message) as error:
            ImageFolder(str(root), size=8)
        assert "\n" not in str(error.value)


def test_the_option_that_leaves_small_classes_out_is_named(tmp_path):
    dataset = ImageFolder(str(write(tmp_path / "data", SIZES)), size=8)
    with pytest.raises(UserError, match=r"or leave these classes out with dataset\.skip_small"):
        FewShotTasks(dataset, 2, 1, max(SIZES.values()) - 1)


def test_the_fraction_that_gives_a_split_more_classes_is_named(tmp_path):
    dataset = ImageFolder(str(write(tmp_path / "data", SIZES)), size=8)  # 6, 2 and 2 classes
    lower = "lower task.ways, add classes, or "
    for split, advice in (
        ("train", "lower dataset.test_fraction or dataset.validation_fraction."),
        ("validation", "raise dataset.validation_fraction."),
        ("test", "raise dataset.test_fraction."),
    ):
        with pytest.raises(UserError) as error:
            dataset.check(7, 1, 1, [split])
        assert str(error.value).endswith(lower + advice)
    given = tmp_path / "given"
    write(given / "train", dict.fromkeys([*SIZES][:8], 3))
    write(given / "test", dict.fromkeys([*SIZES][8:], 3))
    dataset = ImageFolder(str(given), size=8)  # 6, 2 and 2 classes
    for split, advice in (
        ("train", ", add classes, or lower dataset.validation_fraction."),
        ("validation", ", add classes, or raise dataset.validation_fraction."),
        ("test", " or add classes."),
    ):
        with pytest.raises(UserError) as error:
            dataset.check(7, 1, 1, [split])
        assert str(error.value).endswith("lower task.ways" + advice)


def test_the_configuration(tmp_path):
    root = write(tmp_path / "data", SIZES)
    overrides = [
        "dataset=folder",
        f"dataset.root={root}",
        "dataset.size=8",
        "dataset.skip_small_classes=true",
        "dataset.augment.flip=0.5",
        "dataset.transforms=[{_target_: torchvision.transforms.v2.RandomErasing, p: 1.0},"
        "{_target_: torchvision.transforms.v2.RandomApply, p: 0.5, transforms: "
        "[{_target_: torchvision.transforms.v2.ColorJitter, brightness: 0.4}]}]",
    ]
    dataset = instantiate(tiny.compose(*overrides).dataset, "dataset")
    assert [type(each).__name__ for each in dataset.transforms] == ["RandomErasing", "RandomApply"]
    tasks = FewShotTasks(dataset, 2, 1, 3)
    plain = FewShotTasks(ImageFolder(str(root), size=8, skip_small_classes=True), 2, 1, 3)
    for split in SPLITS:
        key = task_keys(0, split, 0, range(1))[0]
        one, two, before = (each.sample(key).query.inputs for each in (tasks, tasks, plain))
        assert torch.equal(one, two)
        assert torch.equal(one, before) == (split != "train")
    bad = tiny.compose("dataset=folder", "dataset.transforms=[{_target_: no.such.thing}]").dataset
    with pytest.raises(UserError, match=r"dataset.transforms.0._target_=no.such.thing cannot be"):
        instantiate(bad, "dataset")


def test_folders_named_as_splits_may_be_classes(tmp_path):
    write(tmp_path, {f"class{i:02d}": 3 for i in range(4)})
    write(tmp_path / "more", {"class09": 3})
    (tmp_path / "more" / "class09").rename(tmp_path / "train")
    (tmp_path / "more").rmdir()
    dataset = ImageFolder(str(tmp_path), size=8)
    assert "train" in {name for names in dataset.classes.values() for name in names}


def test_files_of_all_formats_are_found_in_order_and_decoded(tmp_path, monkeypatch):
    suffixes = ["bmp", "gif", "jpeg", "JPG", "pgm", "png", "ppm", "tif", "tiff", "webp"]
    for folder in "hbfdgace":
        (tmp_path / folder).mkdir()
    for index, suffix in enumerate(suffixes):
        mode = "L" if suffix == "pgm" else "RGB"
        folder = tmp_path / "hbfdgace"[index % 8]
        Image.new(mode, (8, 8)).save(folder / f"image.{suffix}", FORMATS[f".{suffix.lower()}"])
    (tmp_path / "a" / "notes.txt").write_text("not an image")
    files = image_files.images_below(tmp_path)
    assert sorted(file.suffix[1:] for file in files) == sorted(suffixes)
    assert files == sorted(files)
    decoded = list(image_files.decode_files(files, "RGB", 8))
    assert [each.shape for each in decoded] == [(3, 8, 8)] * len(suffixes)
    monkeypatch.setattr(image_files, "MAX_IMAGE_BYTES", 20)
    with pytest.raises(UserError, match="it is larger than 0 MiB"):
        image_files.decode_file(files[0], "RGB", 8)


def test_messages_name_classes_as_their_folders_in_a_root_below_home(tmp_path, monkeypatch):
    write(tmp_path / "data", {f"class{index:02d}": 3 for index in range(5)})
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("METADIST_CACHE", "~/cache")
    assert len(ImageFolder("~/data", size=8).classes["train"]) == 3
    assert list((tmp_path / "cache").glob("folder_8px_3_*.npy"))
    write(tmp_path / "data", {"class09": 9})
    with pytest.raises(UserError, match=r"fewer examples: class0\d \(3\), class0\d \(3\)"):
        ImageFolder("~/data", size=8).check(1, 2, 2)


def test_lists_that_change_are_read_again(tmp_path):
    write(tmp_path, {"class00": 24})
    (tmp_path / "class00").rename(tmp_path / "images")

    def dataset(classes, **parts):
        for part, names in parts.items():
            lines = [f"{i:03d}.png,{classes[i]}" for i in range(24) if classes[i] in names]
            (tmp_path / f"{part}.csv").write_text("\n".join(["filename,label", *lines]))
        return ImageFolder(str(tmp_path), size=8)

    classes = "aaaabbbbccccddddeeeeffff"
    assert dataset(classes, train="abc", val="d", test="ef").classes["train"] == ["a", "b", "c"]
    moved = dataset(classes, train="ab", val="cd", test="ef")  # the same files in the same order
    assert moved.classes["train"] == ["a", "b"]
    other = dataset("aaaaa" + classes[5:], train="ab", val="cd", test="ef")
    assert len(of_class(other, "train", "a")) == 5


def test_datasets_that_share_a_cache_may_have_equal_names_sizes_and_times(tmp_path, monkeypatch):
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "cache"))
    for level in (10, 200):
        for name in "abcdefgh":
            folder = tmp_path / str(level) / name
            folder.mkdir(parents=True)
            for example in range(3):
                Image.new("L", (8, 8), level).save(folder / f"{example}.bmp")
                os.utime(folder / f"{example}.bmp", ns=(0, 0))
        dataset = ImageFolder(str(tmp_path / str(level)), size=8, channels=1)
        assert (dataset.split_classes("train")[0] == level).all()


def test_folders_without_images_are_named(tmp_path, caplog):
    root = write(tmp_path / "data", SIZES)
    (root / "empty").mkdir()
    caplog.set_level(logging.INFO)
    dataset = ImageFolder(str(root), size=8)
    assert sum(len(names) for names in dataset.classes.values()) == len(SIZES)
    assert any("without images" in text and "left out: empty" in text for text in caplog.messages)
