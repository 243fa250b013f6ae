import shutil
import zipfile

import numpy as np
import pytest
import requests
from omniglot_tree import (
    SMALL,
    by_name,
    images,
    ink,
    refused,
    write_folders,
    write_zip,
    write_zips,
)

from metadist.tasks import Omniglot, data_files

pytestmark = pytest.mark.usefixtures("small_omniglot")


@pytest.mark.parametrize(
    "put", [write_zips, write_folders, lambda root: write_folders(root / "omniglot-py")]
)
def test_zip_files_and_folders_give_the_images_as_pillow_decodes_them(tmp_path, put):
    root = tmp_path / "data"
    put(root)
    if put is write_folders:  # a folder takes precedence
        (root / "images_background.zip").write_bytes(b"not a zip file")
    found = by_name(Omniglot(str(root), size=20, download=False))
    members = images("images_background") | images("images_evaluation")
    assert set(found) == {name.rpartition("/")[0] for name in members}
    for name, pixels in found.items():
        files = sorted(m for m in members if m.startswith(f"{name}/"))
        assert np.array_equal(pixels, [ink(members[file], 20) for file in files])
    assert max(pixels.max() for pixels in found.values()) > 200


def test_missing_root(tmp_path):
    refused(
        lambda: Omniglot(str(tmp_path / "none"), download=False),
        tmp_path / "none",
        "images_background.zip",
        "images_evaluation.zip",
        "put",
    )
    assert not (tmp_path / "none").exists()


def test_root_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    refused(lambda: Omniglot(str(tmp_path / "file")), tmp_path / "file", "is a file")


def test_only_one_zip(tmp_path):
    root = write_zips(tmp_path / "data")
    (root / "images_evaluation.zip").unlink()
    refused(
        lambda: Omniglot(str(root), download=False),
        root,
        "has no images_evaluation of",
        "put images_evaluation.zip from",
    )


def test_download_fetches_what_is_missing(tmp_path, monkeypatch):
    stock, root = write_zips(tmp_path / "stock"), write_zips(tmp_path / "data")
    (root / "images_evaluation.zip").unlink()
    calls = []

    def fetch(target, url, checksum, advice):
        calls.append(url)
        assert len(checksum) == len("md5:") + 32
        shutil.copy(stock / url.rpartition("/")[2], target)

    monkeypatch.setattr(data_files, "download", fetch)
    assert len(by_name(Omniglot(str(root)))) == 7
    assert len(calls) == 1
    assert calls[0].startswith("https://")
    assert {path.name for path in root.glob("*.zip")} == {f"{name}.zip" for name in SMALL}


def test_failing_download_says_where_to_put_the_files(tmp_path, monkeypatch, capfd):
    def refuse(*args, **options):
        raise requests.HTTPError("network is\nunreachable")

    monkeypatch.setattr(requests, "get", refuse)
    root = tmp_path / "new"
    refused(
        lambda: Omniglot(str(root)),
        "images_background.zip",
        f"into {root}",
        "network is unreachable",
        "dataset.root",
    )
    assert not [path for path in root.iterdir() if path.suffix != ".lock"]
    assert capfd.readouterr() == ("", "")


def broken_zip(root, members):
    (root / "images_evaluation.zip").write_bytes(b"PK\3\4 not an archive")
    return ["images_evaluation.zip", "not a readable zip file"]


def damaged_directory(root, members):
    path = root / "images_evaluation.zip"
    data = bytearray(path.read_bytes())
    data[data.index(b"PK\1\2") + 6] = 99  # the version that is needed to extract a member
    path.write_bytes(data)
    return ["images_evaluation.zip", "not a readable zip file"]


def damaged_member(root, members):
    path = root / "images_evaluation.zip"
    data = bytearray(path.read_bytes())
    start = data.index(b"IHDR")
    data[start + 20 : start + 40] = bytes(20)
    path.write_bytes(data)
    return ["images_evaluation.zip", "cannot be read", ".png"]


def not_an_image(root, members):
    name = sorted(members)[33]
    write_zip(root / "images_evaluation.zip", members | {name: b"GIF89a nothing"})
    return [name, "images_evaluation.zip", "cannot be decoded"]


def truncated_image(root, members):
    name = sorted(members)[7]
    write_zip(root / "images_evaluation.zip", members | {name: members[name][:60]})
    return [name, "images_evaluation.zip", "cannot be decoded"]


def huge_member(root, members):
    name = sorted(members)[7]
    write_zip(root / "images_evaluation.zip", members | {name: bytes(2 << 20)})
    return [name, "images_evaluation.zip", "larger than 1 MiB"]


def nineteen_images(root, members):
    name = sorted(members)[7]
    write_zip(root / "images_evaluation.zip", {m: data for m, data in members.items() if m != name})
    return [name.rpartition("/")[0], "images_evaluation.zip", "has 19 images where Omniglot has 20"]


def twenty_one_images(root, members):
    name = sorted(members)[7]
    more = {name.replace(".png", "a.png"): members[name]}
    write_zip(root / "images_evaluation.zip", members | more)
    return [name.rpartition("/")[0], "images_evaluation.zip", "has 21 images where Omniglot has 20"]


def missing_character(root, members):
    write_zip(
        root / "images_evaluation.zip",
        {m: data for m, data in members.items() if "character02" not in m},
    )
    return ["images_evaluation.zip", "is 2, in Omniglot 3, in files like"]


def zip_of_something_else(root, members):
    write_zip(root / "images_evaluation.zip", {"README": b"hello"})
    return ["images_evaluation.zip", "is 0, in Omniglot 3"]


@pytest.mark.parametrize(
    "harm",
    [
        broken_zip,
        damaged_directory,
        damaged_member,
        not_an_image,
        truncated_image,
        huge_member,
        nineteen_images,
        twenty_one_images,
        missing_character,
        zip_of_something_else,
    ],
)
def test_bad_files_are_named(tmp_path, harm):
    root = write_zips(tmp_path / "data")
    parts = harm(root, images("images_evaluation"))
    refused(lambda: Omniglot(str(root)), root, *parts)
    assert not list(root.glob("*.npy"))
    assert not list(root.glob(".*.part"))


def test_a_bad_image_in_a_folder_is_named(tmp_path):
    root = write_folders(tmp_path / "data")
    bad = sorted((root / "images_background").rglob("*.png"))[5]
    bad.write_bytes(b"")
    refused(lambda: Omniglot(str(root)), bad.relative_to(root), "cannot be decoded")


def test_members_that_do_not_belong_are_left_alone(tmp_path, decodings):
    root = write_zips(tmp_path / "data")
    before = by_name(Omniglot(str(root)))
    with zipfile.ZipFile(root / "images_background.zip", "a") as archive:
        for name in (
            "../../escaped.png",
            "/images_background/Alpha/character02/x.png",
            "images_background/../Alpha/character02/x.png",
            "__MACOSX/images_background/Alpha/character02/x.png",
            "images_evaluation/Alpha/character02/x.png",
            "images_background/Alpha/character02/",
            "images_background/Alpha/character02/deep/x.png",
            "images_background/Alpha/character02/x.txt",
        ):
            archive.writestr(name, b"harmful")
    after = by_name(Omniglot(str(root)))
    assert len(decodings) == 2
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not list(tmp_path.rglob("escaped*"))
