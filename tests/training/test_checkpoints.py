"""Checkpoints: whole or not there, checked when read, never unpickled."""

import errno
import hashlib
import io
import os
import resource
import stat
import zipfile
from pathlib import Path

import pytest
import torch
from worlds import run_world

from metadist.errors import UserError
from metadist.training import checkpoints
from metadist.training.checkpoints import (
    Checkpoints,
    CorruptCheckpointError,
    read_checkpoint,
    write_checkpoint,
)

CONTENTS = {"iteration": 3, "learner": {"weight": torch.arange(1000.0)}, "best": {}}


def test_round_trip_keeps_every_bit(tmp_path):
    path = tmp_path / "a.pt"
    write_checkpoint(path, CONTENTS)
    found = read_checkpoint(path)
    assert torch.equal(found["learner"]["weight"], CONTENTS["learner"]["weight"])
    assert found["iteration"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_plain_torch_reads_it(tmp_path):
    write_checkpoint(tmp_path / "a.pt", CONTENTS)
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(found["learner"]["weight"], CONTENTS["learner"]["weight"])


@pytest.mark.parametrize("contents", [[1], {"iteration": 3}])
def test_a_file_with_a_digest_but_without_a_format_is_refused(tmp_path, contents):
    torch.save(contents, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    digest = hashlib.sha256(data).hexdigest().encode()
    (tmp_path / "a.pt").write_bytes(data + b"metadist-sha256:" + digest)
    with pytest.raises(CorruptCheckpointError, match="was not written by metadist"):
        read_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize("keep", [0, 1, 50, 500, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.pt"
    write_checkpoint(path, CONTENTS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"a\.pt is corrupt") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("offset", [0, 200, -80, -1])
def test_a_changed_byte_is_noticed(tmp_path, offset):
    path = tmp_path / "a.pt"
    write_checkpoint(path, CONTENTS)
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="corrupt"):
        read_checkpoint(path)


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('code in a checkpoint was run')",)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"trap": Trap()})
    with pytest.raises(UserError, match="not loaded"):
        read_checkpoint(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"b\.pt cannot be read"):
        read_checkpoint(tmp_path / "b.pt")


def test_another_format_names_the_version_that_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "FORMAT", 99)
    monkeypatch.setattr(checkpoints, "__version__", "9.9")
    write_checkpoint(tmp_path / "a.pt", {"iteration": 1})
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"format 99, written by metadist 9\.9"):
        read_checkpoint(tmp_path / "a.pt")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    write_checkpoint(path, CONTENTS)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_checkpoint(path, {"iteration": 4})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS, errno.EIO])
def test_a_file_system_without_fsync_of_directories(tmp_path, monkeypatch, number):
    fsync = os.fsync

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    if number == errno.EIO:  # the disk has failed
        with pytest.raises(UserError, match="could not be written"):
            write_checkpoint(tmp_path / "a.pt", CONTENTS)
        return
    write_checkpoint(tmp_path / "a.pt", CONTENTS)
    assert read_checkpoint(tmp_path / "a.pt")["iteration"] == 3


def test_the_newest_are_kept_and_for_each_the_best_until_then(tmp_path):
    saved = Checkpoints(tmp_path, keep=2)
    assert saved.newest() is None and saved.best is None and saved.candidates() == []
    for kind, iteration in [
        ("best", 2),
        ("", 5),
        ("best", 7),
        ("", 10),
        ("best", 12),
        ("best", 15),
    ]:
        save = saved.save_best if kind else saved.save
        save(iteration, {"iteration": iteration})
    assert [iteration for iteration, _ in saved.iterations()] == [5, 10]
    assert [iteration for iteration, _ in saved.bests()] == [2, 7, 15]
    saved.save(20, {"iteration": 20})
    assert [iteration for iteration, _ in saved.iterations()] == [10, 20]
    assert [iteration for iteration, _ in saved.bests()] == [7, 15]
    assert read_checkpoint(saved.newest())["iteration"] == 20
    assert read_checkpoint(saved.best)["iteration"] == 15
    names = [path.name for path in saved.candidates()]
    assert names == [
        f"{n}.pt"
        for n in ("iteration-00000020", "best-00000015", "iteration-00000010", "best-00000007")
    ]


def test_the_best_of_a_kept_checkpoints_own_iteration_is_kept(tmp_path):
    saved = Checkpoints(tmp_path, keep=1)
    saved.save_best(5, {"iteration": 5})
    saved.save(5, {"iteration": 5})
    saved.save_best(7, {"iteration": 7})
    assert [iteration for iteration, _ in saved.bests()] == [5, 7]


def test_the_best_before_the_newest_checkpoint_is_kept(tmp_path):
    saved = Checkpoints(tmp_path, keep=1)
    saved.save_best(2, {"iteration": 2})
    saved.save(4, {"iteration": 4, "best": 2})  # stopped in its validation, which is then repeated
    saved.save_best(4, {"iteration": 4})
    assert [iteration for iteration, _ in saved.bests()] == [2, 4]
    saved.save(4, {"iteration": 4, "best": 4})
    saved.save(6, {"iteration": 6, "best": 4})
    assert [iteration for iteration, _ in saved.bests()] == [4]


def test_later_checkpoints_are_renamed_and_never_lost(tmp_path):
    saved = Checkpoints(tmp_path, keep=2)
    for _ in range(2):
        for iteration in (5, 10):
            saved.save(iteration, {"iteration": iteration})
        saved.save_best(10, {"iteration": 10})
        (saved.directory / ".iteration-00000015.pt.part").write_bytes(b"half")
        saved.rename_later(5)
    assert sorted(path.name for path in saved.directory.iterdir()) == [
        "best-00000010.pt.superseded",
        "best-00000010.pt.superseded.1",
        "iteration-00000005.pt",
        "iteration-00000010.pt.superseded",
        "iteration-00000010.pt.superseded.1",
    ]


def test_what_grows_when_it_is_opened_is_refused(tmp_path):
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"learner": {"weight": torch.zeros(100_000)}})
    body = path.read_bytes()[:-80]
    bomb = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(body)) as old, zipfile.ZipFile(bomb, "w", 8) as new:
        for member in old.infolist():
            new.writestr(member.filename, old.read(member))
    sealed = bomb.getvalue() + b"metadist-sha256:"
    path.write_bytes(sealed + hashlib.sha256(bomb.getvalue()).hexdigest().encode())
    with pytest.raises(CorruptCheckpointError, match="uncompressed size exceeds"):
        read_checkpoint(path)


def big_file_within_a_small_limit(directory: str) -> str:
    """What becomes of a write for which the system has no room, for real."""
    path = Path(directory) / "a.pt"
    write_checkpoint(path, CONTENTS)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        write_checkpoint(path, {"learner": {"weight": torch.zeros(1_000_000)}})
    except UserError as error:
        return str(error)
    return "written"


def test_a_file_that_the_system_has_no_room_for(tmp_path):
    (message,) = run_world(big_file_within_a_small_limit, 1, str(tmp_path))
    assert "could not be written (File too large)" in message and "resume=auto" in message
    assert read_checkpoint(tmp_path / "a.pt")["iteration"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["a.pt"]


def peak_of_a_large_checkpoint(directory: str) -> int:
    """Memory beside the tensors that writing takes, in bytes."""
    weight = torch.zeros(20_000_000)
    path = Path(directory) / "a.pt"
    write_checkpoint(path, CONTENTS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    write_checkpoint(path, {"weight": weight})
    return 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


def test_writing_holds_no_copy_of_the_file(tmp_path):
    assert run_world(peak_of_a_large_checkpoint, 1, str(tmp_path))[0] < 20_000_000


def test_contents_reach_the_disk_before_the_name_and_the_name_afterwards(tmp_path, monkeypatch):
    path, synchronized = tmp_path / "a.pt", []

    def record(descriptor: int) -> None:
        status = os.fstat(descriptor)
        kind = "directory" if stat.S_ISDIR(status.st_mode) else status.st_size
        synchronized.append((kind, path.exists()))

    monkeypatch.setattr(os, "fsync", record)
    write_checkpoint(path, CONTENTS)
    assert synchronized == [(path.stat().st_size, False), ("directory", True)]


def test_the_directory_of_a_run_is_not_made_again(tmp_path):
    checkpoints = Checkpoints(tmp_path / "run")
    (tmp_path / "run").mkdir()
    checkpoints.save(1, CONTENTS)
    (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(UserError, match=r"could not be written \(No such file or directory\)"):
        checkpoints.save(2, CONTENTS)
    assert not (tmp_path / "run").exists()
