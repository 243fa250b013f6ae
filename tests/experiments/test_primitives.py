"""The scripts of `experiments/primitives/` under torchrun."""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PRIMITIVES = Path(__file__).resolve().parents[2] / "experiments" / "primitives"


def run(*command: str, **environment: str) -> list[str]:
    """Run a command; returns the lines of its output, sorted, because ranks write in any order."""
    clean = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")
    }
    ended = subprocess.run(
        command,
        env=clean | {"OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert ended.returncode == 0, ended.stderr
    return sorted(ended.stdout.splitlines())


def torchrun(*arguments: object, ranks: int = 2) -> list[str]:
    return run(
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        f"--nproc_per_node={ranks}",
        *map(str, arguments),
    )


def test_hello_world():
    (alone,) = run(sys.executable, str(PRIMITIVES / "hello_world.py"))
    assert alone.startswith("Hello from a single process")
    (one,) = run(sys.executable, str(PRIMITIVES / "hello_world.py"), RANK="1", WORLD_SIZE="3")
    assert one.startswith("Hello from rank 1 of 3")


@pytest.mark.slow
def test_hello_world_under_torchrun():
    lines = torchrun(PRIMITIVES / "hello_world.py", ranks=3)
    assert [re.sub(r"\d+\)", "N)", line) for line in lines] == [
        f"Hello from rank {rank} of 3 (process N)" for rank in range(3)
    ]
    assert len({re.search(r"(\d+)\)", line)[1] for line in lines}) == 3


@pytest.mark.slow
def test_environment():
    lines = torchrun(PRIMITIVES / "environment.py")
    for rank, share in ((0, [0, 2, 4, 6, 8]), (1, [1, 3, 5, 7, 9])):
        for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2}.items():
            assert f"[{rank}] {name}={value}" in lines
        assert f"[{rank}] share of ten items: {share}" in lines
        assert (
            f"[{rank}] WorldInfo(world_rank={rank}, world_size=2, local_rank={rank}, "
            "local_world_size=2)"
        ) in lines


def test_environment_without_torchrun():
    lines = run(sys.executable, str(PRIMITIVES / "environment.py"))
    assert "[0] RANK=(not set)" in lines
    assert f"[0] share of ten items: {list(range(10))}" in lines


@pytest.mark.slow
def test_arguments():
    lines = torchrun(PRIMITIVES / "arguments.py", 1, 2, "--name", "a b")
    assert lines == [f"[{rank}] numbers=[1, 2] name='a b'" for rank in range(2)]


@pytest.mark.slow
def test_any_executable():
    lines = torchrun("--no-python", PRIMITIVES / "any_executable.sh")
    assert [line.split(",")[0] for line in lines] == [
        "rank 0 of 2: bash",
        "rank 1 of 2: bash",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("barrier", [True, False])
def test_barrier(barrier):
    lines = torchrun(PRIMITIVES / "barrier.py", *(["--barrier"] if barrier else []))
    times = {
        tuple(line.split(" s: ")[1].split()[i] for i in (1, 2, 4)): float(line.split(" s: ")[0])
        for line in lines
    }
    assert len(times) == 8
    fast_starts, slow_ends = times["0", "starts", "second"], times["1", "ends", "first"]
    assert fast_starts >= slow_ends if barrier else fast_starts < slow_ends


@pytest.mark.slow
def test_collectives():
    lines = torchrun(PRIMITIVES / "collectives.py")
    for rank in range(2):
        own = [line.removeprefix(f"[{rank}] ") for line in lines if line[1] == str(rank)]
        assert [re.sub(r"\s+", " ", line) for line in own] == [
            "all_gather [[0], [0, 1]]",
            "all_reduce max [1, 1]",
            "all_reduce mean {'loss': tensor(1.), 'items': 1.5}",
            "all_reduce sum [1, 1]",
            "broadcast from 0 [0, 0]",
            f"gradient {4.0 * (rank + 1)}",
            f"input {[rank] * 2}",
        ]


@pytest.mark.slow
def test_multi_node():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    lines = run(str(PRIMITIVES / "multi_node.sh"), PYTHON=sys.executable, PORT=str(port))
    locations = [f"rank {rank} of 2 (node {rank}, local rank 0)" for rank in range(2)]
    assert lines == [
        f"{locations[0]} called {locations[1]}; sum of ranks 1",
        f"{locations[1]} called {locations[0]}; sum of ranks 1",
    ]


@pytest.mark.slow
def test_restarts(tmp_path):
    state = tmp_path / "state.json"
    lines = torchrun("--max-restarts=1", PRIMITIVES / "restarts.py", state)
    assert lines == [
        "restart count 0, rank 0: starts at step 0",
        "restart count 0, rank 1: crashes after step 3",
        "restart count 0, rank 1: starts at step 0",
        "restart count 1, rank 0: starts at step 3",
        "restart count 1, rank 0: total 30",
        "restart count 1, rank 1: starts at step 3",
        "restart count 1, rank 1: total 30",
    ]
    assert state.read_text() == '{"step": 6, "total": 30}'


@pytest.mark.parametrize("path", sorted(PRIMITIVES.iterdir()), ids=lambda path: path.name)
def test_each_script_is_short_and_has_a_usage_example(path):
    if path.suffix in (".py", ".sh"):
        text = path.read_text(encoding="utf-8")
        assert len(text.splitlines()) < 60
        assert path.name in text
