"""Atomic writes, and errors that name the file."""

import errno
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from metadist.errors import UserError
from metadist.files import (
    atomic_write,
    atomic_writer,
    locked_directory,
    open_regular,
    partial_path,
    prepare_output,
    read_regular,
    replace_closed_streams,
    wrap_write_errors,
)


def test_the_new_content_replaces_the_old_one(tmp_path):
    for content in (b"old", b"new"):
        atomic_write(tmp_path / "a", content)
        assert (tmp_path / "a").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failed_write_leaves_the_old_file_alone(tmp_path, monkeypatch):
    atomic_write(tmp_path / "a", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*/a \(No space left on device\)"):
        atomic_write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_file_system_without_fsync_of_directories(tmp_path, monkeypatch):
    fsync = os.fsync

    def only_files(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", only_files)
    atomic_write(tmp_path / "a", b"whole")
    assert (tmp_path / "a").read_bytes() == b"whole"


def test_the_content_is_on_disk_before_the_file_is_replaced(tmp_path, monkeypatch):
    path, events = tmp_path / "a.txt", []
    fsync, replace = os.fsync, type(path).replace

    def sync(descriptor: int) -> None:
        events.append(Path(f"/proc/self/fd/{descriptor}").readlink().name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(
        type(path), "replace", lambda *args: events.append("replace") or replace(*args)
    )
    atomic_write(path, b"new")
    temporary, *others = events
    assert re.fullmatch(r"\.a\.txt\.\w+\.part", temporary)
    assert others == ["replace", tmp_path.name]


def test_the_whole_content_is_on_disk_before_the_file_is_replaced(tmp_path, monkeypatch):
    sizes = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: sizes.append(os.fstat(descriptor).st_size))
    atomic_write(tmp_path / "a", b"seven b")
    assert sizes[0] == 7  # nothing is left in Python's buffer


def test_a_directory_that_a_broken_disk_does_not_sync_is_an_error(tmp_path, monkeypatch):
    def broken(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(UserError, match=r"cannot write .*/a \(Input/output error\)"):
        atomic_write(tmp_path / "a", b"new")


def test_processes_that_write_one_file_each_write_a_whole_one(tmp_path):
    path = tmp_path / "a"
    with atomic_writer(path) as file:
        file.write(b"first")
        file.flush()
        write = f"from metadist.files import *; atomic_write(Path({str(path)!r}), b'second')"
        subprocess.run([sys.executable, "-c", write], check=True, timeout=180)
        assert path.read_bytes() == b"second"
    assert path.read_bytes() == b"first"
    assert list(tmp_path.iterdir()) == [path]


def test_write_errors_name_the_file():
    with (
        pytest.raises(UserError, match=r"cannot write a\.txt \(No space left on device\): free"),
        wrap_write_errors("a.txt"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(ZeroDivisionError), wrap_write_errors("a.txt"):
        _ = 1 // 0


def test_a_directory_is_locked_by_one_at_a_time(tmp_path):
    directory = tmp_path / "run"
    with locked_directory(directory):
        with pytest.raises(BlockingIOError), locked_directory(directory):
            pass
        assert list(directory.iterdir()) == []
    with locked_directory(directory):  # the lock has ended with the block
        pass


def test_a_file_system_without_locks(tmp_path, monkeypatch):
    def no_locks(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", no_locks)
    with locked_directory(tmp_path):
        pass


def test_the_output_of_a_command_is_checked_before_it_starts(tmp_path):
    prepare_output(tmp_path / "new" / "a.json")
    assert (tmp_path / "new").is_dir()
    with pytest.raises(UserError, match=r"--output .* is a directory: give the path of a file\."):
        prepare_output(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"create its directory, or choose another file with --out"):
        prepare_output(tmp_path / "file" / "b" / "a.json")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"--output .*/pipe is a pipe or a device: give the path"):
        prepare_output(tmp_path / "pipe")
    with pytest.raises(UserError, match=r"--output - does not stand for the standard output"):
        prepare_output(Path("-"))
    with pytest.raises(UserError, match=r"File name too long"):  # with the temporary suffix
        prepare_output(tmp_path / ("a" * 250))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "new", "pipe"]


def test_a_link_in_place_of_the_temporary_file_is_not_followed(tmp_path):
    own, path = tmp_path / "own", tmp_path / "a"
    own.write_text("mine")
    partial_path(path).symlink_to(own)
    with atomic_writer(path, partial_path(path)) as file:
        file.write(b"new")
    assert own.read_text() == "mine" and path.read_text() == "new" and not path.is_symlink()


def test_pipes_are_not_read(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a pipe or a device"):
        open_regular(tmp_path / "pipe")
    with pytest.raises(IsADirectoryError):
        open_regular(tmp_path)
    (tmp_path / "a").write_bytes(b"b\xff")
    assert read_regular(tmp_path / "a", "replace") == "b\ufffd"


def test_streams_that_were_closed_at_the_start_are_empty(monkeypatch):
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    replace_closed_streams()
    print("discarded", file=sys.stderr)
    assert not sys.stdin.isatty() and sys.stdin.read() == ""


def test_links_out_of_a_directory_are_not_read(tmp_path):
    run = tmp_path / "run"
    (run / "below").mkdir(parents=True)
    (run / "own").write_text("mine")
    (tmp_path / "private").write_text("a secret")
    (run / "link").symlink_to(run / "own")
    (run / "out").symlink_to(tmp_path / "private")
    (run / "up").symlink_to(tmp_path)
    (tmp_path / "linked").symlink_to(run)
    for name in ("own", "link"):
        assert read_regular(tmp_path / "linked" / name, within=tmp_path / "linked") == "mine"
    for name in ("out", "up/private", "below/../../private"):
        with pytest.raises(OSError, match="it is a link to a file outside of"):
            read_regular(run / name, within=run)
        assert read_regular(run / name) == "a secret"
