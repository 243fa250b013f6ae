"""Compiling on the machine that runs, and doing without."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metadist.kernels import loader
from metadist.models.norm_relu import norm_relu


@pytest.fixture(autouse=True)
def afresh(monkeypatch, tmp_path, single_thread):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loader.library.cache_clear()
    yield
    loader.library.cache_clear()


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_without_a_compiler_pytorch_does_it(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    assert loader.library("norm_relu_pool") is None
    norm, maps = nn.BatchNorm2d(16, track_running_stats=False), torch.randn(4, 16, 4, 4)
    assert not loader.can_call("norm_relu_pool", maps)
    assert torch.equal(norm_relu(norm, maps), F.relu(norm(maps)))
    assert not list(tmp_path.iterdir())


def test_a_source_is_compiled_once_a_machine(tmp_path):
    if loader.library("patches") is None:
        pytest.skip("there is no C++ compiler")
    (made,) = (tmp_path / "metadist" / "native").glob("*.so")
    born = made.stat().st_mtime_ns
    loader.library.cache_clear()
    assert loader.library("patches") is not None
    assert made.stat().st_mtime_ns == born
    assert loader.can_call("patches", torch.zeros(1))
    assert not loader.can_call("patches", torch.zeros(1, dtype=torch.int64))
    torch.set_num_threads(2)
    assert not loader.can_call("patches", torch.zeros(1))


def test_what_others_can_write_is_not_loaded(tmp_path):
    if loader.library("patches") is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path / "metadist" / "native"
    (made,) = folder.glob("*.so")
    for path in (made, folder):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        loader.library.cache_clear()
        assert loader.library("patches") is None
        path.chmod(mode)
    loader.library.cache_clear()
    assert loader.library("patches") is not None


def test_a_file_that_was_cut_short_is_made_again(monkeypatch):
    whole, sizes = loader._compile, []

    def cut_short(command, target):
        whole(command, target)
        sizes.append(target.stat().st_size)
        if len(sizes) == 1:
            target.write_bytes(b"")

    monkeypatch.setattr(loader, "_compile", cut_short)
    if loader.library("patches") is None:
        pytest.skip("there is no C++ compiler")
    assert len(sizes) == 2


def test_a_compiler_that_hangs_is_ended_with_what_it_started(monkeypatch, tmp_path):
    compiler, children = tmp_path / "c++", tmp_path / "children"
    compiler.write_text(
        f'#!/bin/sh\ntest "$1" = --version && exit\nsleep 60 &\necho $! > {children}\nwait\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(loader, "_SECONDS", 1)
    loader._version.cache_clear()
    assert loader.library("patches") is None
    state = Path(f"/proc/{children.read_text().strip()}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"
