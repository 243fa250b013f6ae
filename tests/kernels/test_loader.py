"""Compilation of the kernels, and the fallback to PyTorch."""

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from metadist.kernels import loader, pytorch_operations
from metadist.kernels.convolution import Geometry, convolve
from metadist.kernels.matmul import matmul
from metadist.models.batched_layers import norm_relu


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    clear_caches()
    yield
    clear_caches()


def clear_caches():
    loader.library.cache_clear()
    loader.has_cpp.cache_clear()


@pytest.mark.parametrize("compiler", ["/nowhere/c++", "false"])
def test_pytorch_is_used_without_a_compiler(compiler, monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", compiler)
    assert loader.library("norm_relu_pool") is None
    norm, inputs = nn.BatchNorm2d(16, track_running_stats=False), torch.randn(4, 16, 4, 4)
    assert loader.backend(inputs) is None
    torch.testing.assert_close(norm_relu(norm, inputs), F.relu(norm(inputs)))
    assert not list(tmp_path.iterdir())


def test_a_source_is_compiled_once_per_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(loader, "SOURCES", ("unfold",))
    if loader.library("unfold") is None:
        pytest.skip("there is no C++ compiler")
    (path,) = (tmp_path / "metadist" / "native").glob("*.so")
    compiled_at = path.stat().st_mtime_ns
    loader.library.cache_clear()
    assert loader.library("unfold") is not None
    assert path.stat().st_mtime_ns == compiled_at
    assert loader.backend(torch.zeros(1)) == "cpp"
    assert loader.backend(torch.zeros(1, dtype=torch.int64)) is None
    assert loader.backend(torch.zeros(1), torch.zeros(1).double()) is None
    torch.set_num_threads(2)
    assert loader.backend(torch.zeros(1)) is None


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


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="instruction sets of x86")
@pytest.mark.parametrize("without", ["avx512f", "avx"])
def test_kernels_for_narrower_vectors(without, monkeypatch):
    monkeypatch.setenv("CXX", f"c++ -mno-{without}")
    sources = ("winograd", "direct", "few_channels", "matmul", "norm_relu_pool")
    with ThreadPoolExecutor() as pool:
        if None in pool.map(loader.library, sources):
            pytest.skip("there is no C++ compiler for these flags")
    torch.manual_seed(0)
    for channels, stride in ((3, 1), (16, 1), (16, 2)):
        weight = torch.randn(48, channels, 3, 3, dtype=torch.float64, requires_grad=True)
        images = torch.randn(2, 5, 7, channels, dtype=torch.float64)
        geometry = Geometry((3, 3), (stride, stride), (1, 1))
        convolved = convolve(images[None], weight[None], None, geometry)[0].permute(0, 3, 1, 2)
        expected = F.conv2d(images.permute(0, 3, 1, 2), weight, stride=stride, padding=1)
        torch.testing.assert_close(convolved, expected, rtol=1e-10, atol=1e-10)
        upstream = torch.randn_like(expected)
        found, gradient = (
            torch.autograd.grad(each, weight, upstream)[0] for each in (convolved, expected)
        )
        torch.testing.assert_close(found, gradient, rtol=1e-10, atol=1e-10)
    expected = expected.detach()
    a = torch.randn(2, 13, 21, dtype=torch.float64)
    b = torch.randn(2, 21, 37, dtype=torch.float64)
    torch.testing.assert_close(matmul(a, b), a @ b, rtol=1e-10, atol=1e-10)
    norm = nn.BatchNorm2d(48, track_running_stats=False, dtype=torch.float64)
    torch.testing.assert_close(norm_relu(norm, expected), F.relu(norm(expected)))


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


def test_a_hanging_compiler_is_given_up(monkeypatch, tmp_path):
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ntest "$1" = --version || exec sleep 60\n')
    compiler.chmod(0o700)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setattr(loader, "TIMEOUT_SECONDS", 1)
    loader.compiler_version.cache_clear()
    assert loader.library("unfold") is None


def test_another_compiler_another_processor_and_another_source_are_compiled_apart(monkeypatch):
    targets = []
    monkeypatch.setattr(loader, "compile_source", lambda _, target: targets.append(target.name))
    monkeypatch.setenv("CXX", "c++")

    def name_of_library():
        loader.library.cache_clear()
        loader.library("unfold")
        return targets[-1]

    monkeypatch.setattr(loader, "compiler_version", lambda compiler: "1")
    first = name_of_library()
    assert name_of_library() == first and first.startswith("unfold-")
    names = [first]
    for attribute in ("compiler_version", "_cpu_features"):
        monkeypatch.setattr(loader, attribute, lambda *_, attribute=attribute: attribute)
        names.append(name_of_library())
    monkeypatch.setenv("CXX", "c++ -O1")
    names.append(name_of_library())
    read = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *args: read(path, *args) + "//" * (path.suffix == ".h")
    )
    names.append(name_of_library())
    assert len(set(names)) == len(names) == 5


def test_what_pytorch_traces_or_casts_is_not_computed_by_kernels(monkeypatch):
    inputs = torch.zeros(3, 2)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "has_cpp", lambda: True)
        assert loader.backend(inputs) == "cpp"
        with torch.autocast("cpu"):
            assert loader.backend(inputs) is None
        with pytorch_operations():
            assert loader.backend(inputs) is None
        found = torch.func.vmap(lambda row: row + (loader.backend(inputs) is not None))(inputs)
        assert torch.equal(found, inputs)
        assert loader.backend(inputs) == "cpp"
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        assert loader.backend(inputs) is None


class OnGPU(torch.Tensor):
    """A tensor on a GPU without memory, which needs no GPU."""

    @staticmethod
    def __new__(cls, *shape):
        return torch.Tensor._make_wrapper_subclass(cls, shape, device="cuda")  # noqa: SLF001

    @classmethod
    def __torch_dispatch__(cls, *_):
        raise NotImplementedError


def test_tensors_with_a_dispatch_of_their_own_are_not_passed_to_kernels(monkeypatch):
    inputs = torch.zeros(3, 2)
    with monkeypatch.context() as patch:
        patch.setattr(loader, "has_cpp", lambda: True)
        for without_memory in (TwoTensor(inputs, inputs), FakeTensorMode().from_tensor(inputs)):
            assert loader.backend(without_memory) is None
            assert loader.backend(inputs, nn.Parameter(without_memory)) is None
        assert loader.backend(inputs, nn.Parameter(inputs), nn.Buffer(inputs), None) == "cpp"
    assert OnGPU(3, 2).is_cuda and loader.backend(OnGPU(3, 2)) is None
