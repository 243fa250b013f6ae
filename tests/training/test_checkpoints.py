"""Checkpoints: whole or not there, checked when read, never unpickled."""

import pytest
import torch

from metadist.errors import UserError
from metadist.training import checkpoints
from metadist.training.checkpoints import Checkpoints, read_checkpoint, write_checkpoint

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


@pytest.mark.parametrize("keep", [0, 1, 50, 500, -1])
def test_a_truncated_file_is_refused(tmp_path, keep):
    path = tmp_path / "a.pt"
    write_checkpoint(path, CONTENTS)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(UserError, match=r"a\.pt is damaged") as caught:
        read_checkpoint(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("place", [0, 200, -80, -1])
def test_a_changed_byte_is_noticed(tmp_path, place):
    path = tmp_path / "a.pt"
    write_checkpoint(path, CONTENTS)
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match="damaged"):
        read_checkpoint(path)


class Trap:
    def __reduce__(self):
        return exec, ("raise SystemExit('code in a checkpoint was run')",)


def test_code_in_a_checkpoint_is_not_run(tmp_path):
    path = tmp_path / "a.pt"
    write_checkpoint(path, {"trap": Trap()})
    with pytest.raises(UserError, match="not opened"):
        read_checkpoint(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"b\.pt cannot be read"):
        read_checkpoint(tmp_path / "b.pt")


def test_another_format_names_the_version_that_wrote_it(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints, "FORMAT", 99)
    write_checkpoint(tmp_path / "a.pt", {"version": "9.9"})
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"format 99, written by metadist 9\.9"):
        read_checkpoint(tmp_path / "a.pt")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    path = tmp_path / "a.pt"
    write_checkpoint(path, CONTENTS)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints.os, "fsync", full)
    with pytest.raises(UserError, match="No space left on device"):
        write_checkpoint(path, {"iteration": 4})
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["a.pt"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    saved = Checkpoints(tmp_path, keep=2)
    for iteration in (5, 10, 100):
        saved.save(iteration, {"iteration": iteration})
    saved.save_best({"iteration": 10})
    assert [iteration for iteration, _ in saved.iterations()] == [10, 100]
    assert read_checkpoint(saved.newest())["iteration"] == 100
    assert read_checkpoint(saved.best)["iteration"] == 10
    assert Checkpoints(tmp_path / "none", 1).newest() is None
