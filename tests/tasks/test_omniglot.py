import os
import shutil
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from filelock import FileLock
from omniglot_tree import SMALL, images, ink, png, write_folders, write_zip, write_zips

from metadist.errors import UserError
from metadist.tasks import FewShotTasks, Omniglot, array_cache, omniglot_files, task_keys

SPLITS = ("train", "validation", "test")
pytestmark = pytest.mark.usefixtures("small_omniglot")


@pytest.fixture
def decodings(monkeypatch):
    """Counts how often the images are decoded."""
    made = []
    decode = omniglot_files.decode
    monkeypatch.setattr(
        omniglot_files, "decode", lambda sources, size: made.append(size) or decode(sources, size)
    )
    return made


def by_name(dataset):
    """Each character's images by its name, from all splits."""
    return {
        name: pixels.copy()  # not a view of a file that a test may go on to harm
        for split in SPLITS
        for name, pixels in zip(
            dataset.characters[split], dataset.split_classes(split), strict=True
        )
    }


def one_line(error, *words):
    message = str(error.value)
    assert "\n" not in message and len(message) < 900
    assert all(str(word) in message for word in words), message


@pytest.mark.parametrize(
    "put", [write_zips, write_folders, lambda root: write_folders(root / "omniglot-py")]
)
def test_zip_files_and_folders_give_the_images_as_pillow_decodes_them(tmp_path, put):
    root = tmp_path / "data"
    put(root)
    found = by_name(Omniglot(str(root), size=20, download=False))
    members = images("images_background") | images("images_evaluation")
    assert set(found) == {name.rpartition("/")[0] for name in members}
    for name, pixels in found.items():
        files = sorted(m for m in members if m.startswith(f"{name}/"))
        assert np.array_equal(pixels, [ink(members[file], 20) for file in files])
    assert max(pixels.max() for pixels in found.values()) > 200


def test_split_follows_from_seed_and_names(tmp_path):
    zips = Omniglot(str(write_zips(tmp_path / "zips")), seed=5)
    folders = Omniglot(str(write_folders(tmp_path / "folders").parent / "folders"), seed=5)
    assert zips.characters == folders.characters
    assert [len(zips.characters[split]) for split in SPLITS] == [3, 2, 2]
    assert len(set().union(*zips.characters.values())) == 7
    assert any(
        Omniglot(str(tmp_path / "zips"), seed=seed).characters != zips.characters
        for seed in range(3)
    )
    assert zips.protocol() == {
        "dataset": "omniglot",
        "rotations": True,
        "test_rotations": True,
        "class_split": "random",
        "split_seed": 5,
        "within_alphabet": False,
        "classes": {"train": 3, "validation": 2, "test": 2},
        "image_size": 28,
    }


def test_decoded_once_and_again_when_a_source_changes(tmp_path, decodings):
    root = write_zips(tmp_path / "data")
    before = by_name(Omniglot(str(root)))
    again = Omniglot(str(root))
    assert decodings == [28] and isinstance(array_base(again.images), np.memmap)
    assert not again.images.flags.writeable
    Omniglot(str(root), size=14)
    assert decodings == [28, 14]
    members = images("images_evaluation")
    changed = next(iter(members))
    write_zip(root / "images_evaluation.zip", members | {changed: png(9, 9)})
    after = by_name(Omniglot(str(root)))
    assert decodings == [28, 14, 28]
    different = [name for name in before if not np.array_equal(before[name], after[name])]
    assert different == [changed.rpartition("/")[0]]


def array_base(array):
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def test_cache_lies_in_root_or_where_it_is_told_or_in_the_users(tmp_path, monkeypatch, decodings):
    root = write_zips(tmp_path / "data")
    Omniglot(str(root))
    [cache] = root.glob("*.npy")
    names = cache.with_suffix(".json")
    for file in (cache, names):
        file.rename(tmp_path / file.name)
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "chosen"))
    Omniglot(str(root))
    assert (tmp_path / "chosen" / cache.name).exists() and not cache.exists()
    monkeypatch.delenv("METADIST_CACHE")
    root.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        Omniglot(str(root))
        assert (tmp_path / "xdg" / "metadist" / cache.name).exists() and not cache.exists()
        assert len(decodings) == 3
    finally:
        root.chmod(stat.S_IRWXU)
    # What is found in a root counts, wherever new files would go.
    for file in (cache, names):
        (tmp_path / file.name).rename(file)
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "other"))
    Omniglot(str(root))
    assert len(decodings) == 3
    # Nothing but the decoded images is enough.
    for name in SMALL:
        (root / f"{name}.zip").unlink()
    assert len(by_name(Omniglot(str(root), download=False))) == 7
    with pytest.raises(UserError):
        Omniglot(str(root), size=14, download=False)


@pytest.mark.parametrize("harm", ["truncate", "flip", "names", "no names", "pickle"])
def test_a_damaged_cache_is_made_anew(tmp_path, decodings, harm):
    root = write_zips(tmp_path / "data")
    before = by_name(Omniglot(str(root)))
    [cache] = root.glob("*.npy")
    data = bytearray(cache.read_bytes())
    if harm == "truncate":
        cache.write_bytes(data[: len(data) // 2])
    elif harm == "flip":
        data[-100] ^= 1
        cache.write_bytes(data)
    elif harm == "names":
        cache.with_suffix(".json").write_text('{"names": ["a"')
    elif harm == "no names":
        cache.with_suffix(".json").unlink()
    else:
        with cache.open("wb") as file:
            np.save(file, np.array([{"a": 1}]), allow_pickle=True)
    after = by_name(Omniglot(str(root)))
    assert len(decodings) == 2
    assert all(np.array_equal(before[name], after[name]) for name in before)
    assert not list(root.glob(".*.part"))


CHILD = """
import sys, time, zlib
from pathlib import Path
from metadist.tasks import Omniglot, omniglot_files, omniglot_splits
root, log = map(Path, sys.argv[1:3])
omniglot_files.CHARACTERS = {"images_background": 4, "images_evaluation": 3}
omniglot_splits.TRAINING, omniglot_splits.HELD_OUT = 5, 2
decode = omniglot_files.decode
def slowly(*args):
    with log.open("a") as file:
        file.write("decoded\\n")
    time.sleep(0.4)
    return decode(*args)
omniglot_files.decode = slowly
print("ready", flush=True)
sys.stdin.readline()
print(zlib.crc32(Omniglot(str(root)).images))
"""


def test_of_two_processes_one_decodes_and_the_other_waits(tmp_path):
    root, log = write_zips(tmp_path / "data"), tmp_path / "log"
    path = os.pathsep.join(filter(None, sys.path))
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CHILD, str(root), str(log)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )
        for _ in range(2)
    ]  # fmt: skip
    try:
        for child in children:
            assert child.stdout.readline() == "ready\n"
        for child in children:
            child.stdin.write("\n")
            child.stdin.flush()
        sums = [child.communicate(timeout=60)[0] for child in children]
    finally:
        for child in children:
            child.kill()
    assert [child.returncode for child in children] == [0, 0]
    assert log.read_text() == "decoded\n"
    assert sums[0] == sums[1] and sums[0].strip().isdigit()


def test_waiting_for_another_process_ends(tmp_path, monkeypatch):
    root = write_zips(tmp_path / "data")
    Omniglot(str(root))
    [cache] = root.glob("*.npy")
    cache.unlink()
    monkeypatch.setattr(array_cache, "LOCK_SECONDS", 0.2)
    with (
        FileLock(root / f".{cache.name}.lock"),
        pytest.raises(UserError) as error,
    ):
        Omniglot(str(root))
    one_line(error, cache.name, "another process")


def test_missing_root(tmp_path):
    with pytest.raises(UserError) as error:
        Omniglot(str(tmp_path / "none"), download=False)
    one_line(error, tmp_path / "none", "images_background.zip", "images_evaluation.zip", "put")
    assert not (tmp_path / "none").exists()


def test_root_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        Omniglot(str(tmp_path / "file"))
    one_line(error, tmp_path / "file", "is a file")


def test_only_one_zip(tmp_path):
    root = write_zips(tmp_path / "data")
    (root / "images_evaluation.zip").unlink()
    with pytest.raises(UserError) as error:
        Omniglot(str(root), download=False)
    one_line(error, root, "has no images_evaluation of", "put images_evaluation.zip from")


def test_download_fetches_what_is_missing_under_a_name_of_its_own(tmp_path, monkeypatch):
    from torchvision.datasets import utils

    stock, root = write_zips(tmp_path / "stock"), write_zips(tmp_path / "data")
    (root / "images_evaluation.zip").unlink()
    calls = []

    def fetch(url, folder, filename, md5):
        calls.append(url)
        assert len(md5) == 32 and filename != "images_evaluation.zip"
        shutil.copy(stock / url.rpartition("/")[2], Path(folder, filename))

    monkeypatch.setattr(utils, "download_url", fetch)
    assert len(by_name(Omniglot(str(root)))) == 7
    assert len(calls) == 1 and calls[0].startswith("https://")
    assert {path.name for path in root.glob("*.zip")} == {f"{name}.zip" for name in SMALL}


def test_failing_download_says_where_to_put_the_files(tmp_path, monkeypatch, capfd):
    from torchvision.datasets import utils

    def refuse(url, folder, filename, md5):
        Path(folder, filename).write_text("half")
        raise OSError("network is\nunreachable")

    monkeypatch.setattr(utils, "download_url", refuse)
    root = tmp_path / "new"
    with pytest.raises(UserError) as error:
        Omniglot(str(root))
    one_line(
        error, "images_background.zip", f"into {root}", "network is unreachable", "dataset.root"
    )
    assert not [path for path in root.iterdir() if path.suffix != ".lock"]
    assert capfd.readouterr() == ("", "")


def broken_zip(root, members):
    (root / "images_evaluation.zip").write_bytes(b"PK\3\4 not an archive")
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
    return [name.rpartition("/")[0], "images_evaluation.zip", "has 19 images, expected 20"]


def missing_character(root, members):
    write_zip(
        root / "images_evaluation.zip",
        {m: data for m, data in members.items() if "character02" not in m},
    )
    return ["images_evaluation.zip", "has 2 characters where Omniglot has 3"]


def zip_of_something_else(root, members):
    write_zip(root / "images_evaluation.zip", {"README": b"hello"})
    return ["images_evaluation.zip", "has 0 characters"]


@pytest.mark.parametrize(
    "harm",
    [
        broken_zip,
        damaged_member,
        not_an_image,
        truncated_image,
        huge_member,
        nineteen_images,
        missing_character,
        zip_of_something_else,
    ],
)
def test_bad_files_are_named(tmp_path, harm):
    root = write_zips(tmp_path / "data")
    words = harm(root, images("images_evaluation"))
    with pytest.raises(UserError) as error:
        Omniglot(str(root))
    one_line(error, root, *words)
    assert not list(root.glob("*.npy")) and not list(root.glob(".*.part"))


def test_a_bad_image_in_a_folder_is_named(tmp_path):
    root = write_folders(tmp_path / "data")
    bad = sorted((root / "images_background").rglob("*.png"))[5]
    bad.write_bytes(b"")
    with pytest.raises(UserError) as error:
        Omniglot(str(root))
    one_line(error, bad.relative_to(root), "cannot be decoded")


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


@pytest.mark.parametrize(("argument", "value"), [("seed", -1), ("size", 0), ("size", 500)])
def test_arguments_out_of_bounds(tmp_path, argument, value):
    with pytest.raises(UserError, match=f"dataset.{argument}"):
        Omniglot(str(tmp_path), **{argument: value})


def test_cache_directory_that_cannot_be_made(tmp_path, monkeypatch):
    root = write_zips(tmp_path / "data")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("METADIST_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError) as error:
        Omniglot(str(root))
    one_line(error, tmp_path / "file", "METADIST_CACHE")


def test_disk_full(tmp_path, monkeypatch):
    root = write_zips(tmp_path / "data")

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(array_cache.np.lib.format, "write_array_header_1_0", full)
    with pytest.raises(UserError) as error:
        Omniglot(str(root))
    one_line(error, "No space left on device", root, "METADIST_CACHE")
    assert not list(root.glob(".*.part"))


def test_rotations_reach_the_episodes(tmp_path):
    root = str(write_zips(tmp_path / "data"))
    for rotations, test_rotations in ((True, False), (False, True)):
        dataset = Omniglot(root, rotations=rotations, test_rotations=test_rotations)
        tasks = FewShotTasks(dataset, 2, 1, 3)
        for split, turned in (("train", rotations), ("validation", test_rotations)):
            drawn = dataset.split_classes(split).reshape(-1, 28, 28)
            upright = {image.tobytes() for image in drawn}
            inputs = torch.cat(
                [tasks.draw(key).query.inputs for key in task_keys(0, split, 0, range(20))]
            )
            pixels = (inputs[:, 0] * 255).round().to(torch.uint8).numpy()
            assert all(image.tobytes() in upright for image in pixels) == (not turned)
