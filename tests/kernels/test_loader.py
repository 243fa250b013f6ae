"""Compilation of the kernels, and the fallback to PyTorch."""

import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from metadist.kernels import loader
from metadist.models.batched_layers import norm_relu


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path, single_thread):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    loader.library.cache_clear()
    yield
    loader.library.cache_clear()


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_pytorch_is_used_without_a_compiler(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    assert loader.library("norm_relu_pool") is None
    norm, inputs = nn.BatchNorm2d(16, track_running_stats=False), torch.randn(4, 16, 4, 4)
    assert not loader.can_call("norm_relu_pool", inputs)
    assert torch.equal(norm_relu(norm, inputs), F.relu(norm(inputs)))
    assert not list(tmp_path.iterdir())


def test_a_source_is_compiled_once_per_machine(tmp_path):
    if loader.library("unfold") is None:
        pytest.skip("there is no C++ compiler")
    (path,) = (tmp_path / "metadist" / "native").glob("*.so")
    compiled_at = path.stat().st_mtime_ns
    loader.library.cache_clear()
    assert loader.library("unfold") is not None
    assert path.stat().st_mtime_ns == compiled_at
    assert loader.can_call("unfold", torch.zeros(1))
    assert not loader.can_call("unfold", torch.zeros(1, dtype=torch.int64))
    torch.set_num_threads(2)
    assert not loader.can_call("unfold", torch.zeros(1))


def test_libraries_that_others_can_write_are_not_loaded(tmp_path):
    if loader.library("unfold") is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path / "metadist" / "native"
    (compiled,) = folder.glob("*.so")
    for path in (compiled, folder):
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        loader.library.cache_clear()
        assert loader.library("unfold") is None
        path.chmod(mode)
    loader.library.cache_clear()
    assert loader.library("unfold") is not None


def test_a_truncated_library_is_compiled_again(monkeypatch):
    compile_source, sizes = loader.compile_source, []

    def truncate_first(command, target):
        compile_source(command, target)
        sizes.append(target.stat().st_size)
        if len(sizes) == 1:
            target.write_bytes(b"")

    monkeypatch.setattr(loader, "compile_source", truncate_first)
    if loader.library("unfold") is None:
        pytest.skip("there is no C++ compiler")
    assert len(sizes) == 2


def test_a_hanging_compiler_is_killed_with_its_children(monkeypatch, tmp_path):
    compiler, children = tmp_path / "c++", tmp_path / "children"
    compiler.write_text(
        f'#!/bin/sh\ntest "$1" = --version && exit\nsleep 60 &\necho $! > {children}\nwait\n'
    )
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(loader, "TIMEOUT_SECONDS", 1)
    loader.compiler_version.cache_clear()
    assert loader.library("unfold") is None
    state = Path(f"/proc/{children.read_text().strip()}/stat")
    deadline = time.monotonic() + 30
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline, "the compiler's child is still running"
        time.sleep(0.05)
