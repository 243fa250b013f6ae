"""The documents' examples as printed: only their import line is changed, and `...` filled in.

The code is in `document_examples/`; each of its files leaves what it saw in `seen`.
"""

import contextlib
import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import run_world

EXAMPLES = Path(__file__).parent / "document_examples"


class TorchWithGpus:
    """`torch` for an example that uses GPUs, on a machine without GPUs."""

    def __init__(self, chosen: list[int]) -> None:
        self.cuda = type("cuda", (), {"set_device": staticmethod(chosen.append)})

    def device(self, name: str) -> torch.device:
        assert name == f"cuda:{os.environ['LOCAL_RANK']}"
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def run_example(name: str) -> dict:
    sys.argv = [f"{name}.py"]
    example = importlib.import_module(f"document_examples.{name}")
    gpus: list[int] = []
    if hasattr(example, "torch"):
        example.torch = TorchWithGpus(gpus)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        example.main()
    return {**example.seen, "printed": printed.getvalue(), "gpus": gpus}


@pytest.fixture(params=[pytest.param(2, marks=pytest.mark.slow), 3])
def run(request):
    """Runs an example in worlds of two and of three; gives what each rank saw."""
    return lambda name: run_world(run_example, request.param, name)


def assert_all_close(results, expected) -> None:
    assert len(results) == len(expected) > 0
    for result, reference in zip(results, expected, strict=True):
        torch.testing.assert_close(result, reference, rtol=1e-5, atol=1e-7)


def test_raw_distributed_autograd(run):
    seen = run("raw_distributed_autograd")[0]
    t1, t2, t4 = seen["inputs"]
    assert_all_close(seen["gradients"], [t4, t4, t1 + t2])


def test_initialization(run):
    for seen in run("initialization"):
        assert seen["initialized"] and seen["epochs"] == 3


def test_local_rank(run):
    ranks = run("local_rank")
    size = len(ranks)
    for rank, seen in enumerate(ranks):
        assert seen["gpus"] == [rank]
        assert seen["info"] == seen["one by one"] == (rank, size, rank, size)
        assert seen["rank"] == seen["worker id"] == rank


def test_worker_selection(run):
    zero, *others = run("worker_selection")
    assert zero["printed"] == "" and zero["results"] == ["results"] * 2
    assert zero["saved"] == ["model"] * 2
    for rank, seen in enumerate(others, start=1):
        assert seen["printed"] == f"Greetings from worker(rank={rank})!\n"
        assert seen["results"] == seen["saved"] == []


def test_remote_calls(run):
    ranks = run("remote_call")
    for seen in ranks:
        assert seen["async"] == (len(ranks) - 1, 33) and seen["sync"] == (1, 303)


@pytest.mark.parametrize("name", ["data_parallelism", "inner_loop", "parallelized_functions"])
def test_losses_are_those_of_one_process(run, name):
    zero, *others = run(name)
    assert_all_close(zero["losses"], zero["expected"])
    assert all(seen["losses"] == [] for seen in others)


def test_distributed_autograd_equals_the_single_process_examples(run):
    seen = run("autograd_recap")[0]
    assert_all_close(seen["raw gradients"], seen["expected gradients"])
    assert_all_close(seen["gradients"], seen["expected gradients"])
    assert_all_close(seen["parameters"], seen["expected parameters"])


def test_a_parameter_is_detached_and_its_clone_is_not(run):
    seen = run("parameters_detach")[0]
    assert seen["values"][0] == seen["values"][1]
    # Were both connected, it would be 0.5.
    assert_all_close([seen["gradient"]], [torch.full((2, 2), 0.25)])


def test_a_module_is_detached_and_its_clone_is_not(run):
    seen = run("module_clone")[0]
    assert seen["types"] == ["Parameter", "Parameter", "Tensor", "Tensor"]
    assert seen["graphs"] == ["CloneBackward0", "CloneBackward0"]
    assert seen["values"][0] == pytest.approx(seen["values"][1])
    # Were both connected, it would be twice as much.
    assert_all_close(seen["gradients"], [torch.full((2, 2), 0.5), torch.full((2,), 0.5)])


def expected_losses() -> list[float]:
    """The full example in this process, with torch alone."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1))
    losses = []
    for _ in range(4):
        for batch in data:
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[-1] < losses[0]
    return losses


def test_the_full_example(run):
    zero, *others = run("full_example")
    assert zero["losses"] == pytest.approx(expected_losses(), rel=1e-5)
    assert zero["titles"] == ["Worker0"]
    for rank, seen in enumerate(others, start=1):
        assert seen["losses"] == [] and seen["titles"] == [f"Worker{rank}"]


@pytest.mark.slow
def test_the_full_example_as_a_script_under_torchrun(tmp_path):
    """Its functions are then those of `__main__`."""
    script = tmp_path / "training.py"
    printed = (EXAMPLES / "full_example.py").read_text(encoding="utf-8")
    script.write_text(printed.replace("f'cuda:{todist.get_local_rank()}'", "'cpu'"))
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nnodes=1", "--nproc_per_node=2", str(script), "--epochs=4"),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    assert json.loads(ended.stdout) == pytest.approx(expected_losses(), rel=1e-5)
