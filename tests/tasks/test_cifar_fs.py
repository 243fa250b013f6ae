import hashlib
import io
import json
import pickle
import shutil
import tarfile
from pathlib import Path

import numpy as np
import omniglot_tree
import pytest
import requests

from metadist.errors import UserError
from metadist.tasks import (
    FC100,
    SPLITS,
    CifarFS,
    FewShotTasks,
    ImageDataset,
    cifar_fs,
    data_files,
    task_keys,
)
from metadist.tasks.cifar_fs import CLASSES
from metadist.tasks.decoded_images import Counts
from metadist.tasks.fc100 import SUPERCLASSES

NAMES = sorted(name for names in CLASSES.values() for name in names)
COUNTS = {"train": 3, "test": 1}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """CIFAR-100 is taken to have 4 images a class."""
    monkeypatch.setattr(CifarFS, "expected", {"": Counts(100, examples=4)})


def part(name):
    """A part of CIFAR-100 in its own format; pixels tell the class, the example and the colour."""
    order = np.random.default_rng(0).permutation(np.repeat(np.arange(100), COUNTS[name]))
    data = np.empty((len(order), 3, 32, 32), dtype=np.uint8)
    data[:, :, 0] = order[:, None, None]
    data[:, :, 1:] = np.arange(3)[:, None, None]
    data[:, :, 31] = 7 if name == "train" else 9
    return {
        "filenames": [f"{index}.png" for index in range(len(order))],
        "batch_label": f"{name}ing batch",
        "fine_labels": order.tolist(),
        "data": data.reshape(len(order), -1),
    }


def contents(protocol=2, encode=None):
    encode = encode or (lambda value: pickle.dumps(value, protocol))
    return {
        "cifar-100-python/": None,
        "cifar-100-python/file.txt~": b"left alone",
        "cifar-100-python/train": encode(part("train")),
        "cifar-100-python/test": encode(part("test")),
        "cifar-100-python/meta": encode({"fine_label_names": NAMES}),
    }


def write_archive(root: Path, members) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    with tarfile.open(root / "cifar-100-python.tar.gz", "w:gz") as archive:
        for name, data in members.items():
            member = tarfile.TarInfo(name.rstrip("/"))
            if data is None:
                member.type = tarfile.DIRTYPE
                archive.addfile(member)
            elif isinstance(data, str):
                member.type, member.linkname = tarfile.SYMTYPE, data
                archive.addfile(member)
            else:
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return root


def write_folder(root: Path, members) -> Path:
    for name, data in members.items():
        if data is not None:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(data)
    return root


def refused(root, *parts):
    omniglot_tree.refused(lambda: CifarFS(str(root), download=False), *parts)
    assert not list(root.glob("*.npy"))
    assert not list(root.glob(".*.part"))


def test_the_published_split():
    assert [len(CLASSES[split]) for split in SPLITS] == [64, 16, 20]
    # Of the three lists in torchmeta (assets/cifar100/cifar-fs), each sorted.
    digest = hashlib.sha256(json.dumps(CLASSES).encode()).hexdigest()
    assert digest == "7307e8013d0ca5da8890f105e4dbe2707a765dcf1feda8fc6b33383ab9515f7d"
    assert len(set(NAMES)) == 100


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("write", [write_archive, write_folder])
def test_archive_and_folder_give_the_images(tmp_path, write, protocol):
    dataset = CifarFS(str(write(tmp_path / "data", contents(protocol))), download=False)
    assert isinstance(dataset, ImageDataset)
    assert dataset.input_shape == (3, 32, 32)
    for split in SPLITS:
        images = np.stack(dataset.split_classes(split))
        assert images.shape == (len(CLASSES[split]), 4, 3, 32, 32)
        for name, of_class in zip(CLASSES[split], images, strict=True):
            assert (of_class[:, :, 0] == NAMES.index(name)).all()
            assert (of_class[:, :, 1] == np.arange(3)[:, None]).all()
            assert of_class[:, 0, 31, 0].tolist() == [7, 7, 7, 9]
    key = task_keys(0, "test", 0, range(1))[0]
    assert FewShotTasks(dataset, 5, 1, 3).sample(key).query.inputs.shape == (15, 3, 32, 32)
    assert dataset.protocol()["class_split"] == "bertinetto"


def test_decoded_once(tmp_path, monkeypatch):
    root = write_archive(tmp_path / "data", contents())
    first = CifarFS(str(root), download=False)
    monkeypatch.setattr(cifar_fs, "read", lambda *_: pytest.fail("read again"))
    assert np.array_equal(CifarFS(str(root)).images, first.images)


def test_download(tmp_path, monkeypatch):
    stock = write_archive(tmp_path / "stock", contents())
    calls = []

    def fetch(target, url, checksum, advice):
        calls.append((url.rpartition("/")[2], checksum))
        target.parent.mkdir()
        shutil.copy(stock / "cifar-100-python.tar.gz", target)

    monkeypatch.setattr(data_files, "download", fetch)
    CifarFS(str(tmp_path / "data"))
    assert calls == [("cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85")]
    assert (tmp_path / "data" / "cifar-100-python.tar.gz").exists()


def test_failing_download_and_missing_files_say_what_to_do(tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise requests.HTTPError("404")

    monkeypatch.setattr(requests, "get", refuse)
    root = tmp_path / "data"
    root.mkdir()
    refused(root, root, "cifar-100-python.tar.gz", "dataset.root", "dataset.download=true")
    with pytest.raises(UserError, match=r"gz could not be downloaded \(404.*put cifar-100-python"):
        CifarFS(str(root))


class Harmful:
    def __reduce__(self):
        return open, ("harm", "w")


@pytest.mark.parametrize("write", [write_archive, write_folder])
def test_code_is_refused(tmp_path, write, monkeypatch):
    monkeypatch.chdir(tmp_path)
    members = contents()
    members["cifar-100-python/test"] = pickle.dumps({"data": Harmful()})
    name = f"names {open.__module__}.open"
    refused(write(tmp_path / "data", members), "cifar-100-python/test", name, "trust")
    assert not (tmp_path / "harm").exists()


def test_members_that_do_not_belong_are_left_alone(tmp_path):
    members = {
        "../../escaped": b"harm",
        "/cifar-100-python/train": b"harm",
        "other/cifar-100-python/train": b"harm",
        "cifar-100-python/deep/train": b"harm",
        "cifar-100-python/link": "/etc/passwd",
        **{f"./{name}": data for name, data in contents().items()},
    }
    root = write_archive(tmp_path / "data", members)
    (root / "cifar-100-python").mkdir()
    (root / "cifar-100-python" / "train").write_bytes(b"an incomplete folder")
    dataset = CifarFS(str(root), download=False)
    assert np.shape(dataset.images) == (100, 4, 3, 32, 32)
    assert {p.name for p in tmp_path.iterdir()} <= {"data", "xdg"}


def test_an_archive_that_would_fill_the_memory_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(cifar_fs, "MAX_DECOMPRESSED_BYTES", 1 << 20)
    members = {"cifar-100-python/zeros": bytes(2 << 20), **contents()}
    refused(
        write_archive(tmp_path / "data", members), "not a readable archive", "decompresses to more"
    )


def link(members):
    members["cifar-100-python/test"] = "/etc/passwd"
    return ["KeyError: 'test'"]


def fewer(members):
    members["cifar-100-python/test"] = pickle.dumps(part("train"))
    return ["class apple", "has 6 images where CIFAR-100 has 4"]


def no_labels(members):
    members["cifar-100-python/test"] = pickle.dumps({"data": part("test")["data"]})
    return ["KeyError: 'fine_labels'"]


def nested_labels(members):
    labels = [1, 2]
    for _ in range(60):
        labels = [labels, labels]  # 2 ** 60 numbers in a few bytes
    members["cifar-100-python/test"] = pickle.dumps({**part("test"), "fine_labels": labels})
    return ["a flat list of integers"]


def fewer_labels(members):
    members["cifar-100-python/test"] = pickle.dumps({**part("test"), "fine_labels": [1, 2]})
    return ["2 labels for 100 images"]


def nested_names(members):
    members["cifar-100-python/meta"] = pickle.dumps({"fine_label_names": [["apple"]]})
    return ["expected text, got list"]


def other_names(members):
    members["cifar-100-python/meta"] = pickle.dumps({"fine_label_names": ["cat", "dog"]})
    return ["KeyError: 'apple'"]


def other_shape(members):
    held = part("test")
    members["cifar-100-python/test"] = pickle.dumps({**held, "data": held["data"][:, :3000]})
    return ["shape (100, 3000)"]


def no_dictionary(members):
    members["cifar-100-python/test"] = pickle.dumps([1, 2])
    return ["a list instead of a dictionary"]


@pytest.mark.parametrize(
    "harm",
    [
        link,
        fewer,
        no_labels,
        nested_labels,
        fewer_labels,
        nested_names,
        other_names,
        other_shape,
        no_dictionary,
    ],
)
def test_archives_of_something_else(tmp_path, harm):
    members = contents()
    parts = harm(members)
    refused(write_archive(tmp_path / "data", members), "cifar-100-python.tar.gz", *parts)


@pytest.mark.parametrize("end", [0, 10, 2000, -20])
def test_half_an_archive(tmp_path, end):
    root = write_archive(tmp_path / "data", contents())
    file = root / "cifar-100-python.tar.gz"
    file.write_bytes(file.read_bytes()[:end])
    refused(root, file, "complete")


def test_fc100(tmp_path):
    assert [len(FC100.classes[split]) for split in SPLITS] == [60, 20, 20]
    assert sorted(name for split in SPLITS for name in FC100.classes[split]) == NAMES
    assert [len(SUPERCLASSES[split]) for split in SPLITS] == [12, 4, 4]
    root = write_archive(tmp_path / "data", contents())
    dataset = FC100(str(root), download=False)
    for split in SPLITS:
        for name, images in zip(FC100.classes[split], dataset.split_classes(split), strict=True):
            assert (images[:, 0, 0] == NAMES.index(name)).all()
    protocol = dataset.protocol()
    assert (protocol["dataset"], protocol["class_split"]) == ("fc100", "oreshkin")
    assert protocol["classes"] == {"train": 60, "validation": 20, "test": 20}
    # One array for both.
    CifarFS(str(root), download=False)
    assert len(list(root.glob("*.npy"))) == 1
