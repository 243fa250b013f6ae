"""Where a job's store is, who can write to it, and who leaves it last."""

import multiprocessing.util
import os
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from commands import ROOT
from faults.runs import listening
from worlds import open_store, run_world

import metadist as todist
from metadist.distributed import WorkerLostError, store
from metadist.distributed.interfaces import bound_to_interface
from metadist.distributed.job import begin_job, current_job
from metadist.distributed.rendezvous import rendezvous
from metadist.distributed.store import FileCounters, elastic_store, world_store
from metadist.errors import UserError


def worker_environment(directory: Path, **more: object) -> dict[str, str]:
    """What torchrun's agent sets on a node, besides the ranks."""
    variables = {
        "TORCHELASTIC_RUN_ID": "none",
        "TORCHELASTIC_ERROR_FILE": directory / "attempt_0" / "0" / "error.json",
        **more,
    }
    return {name: str(value) for name, value in variables.items()}


def rendezvous_and_exchange() -> tuple[str, bool, bool]:
    """A rendezvous; then what the agent's store has of it, and whether a started run is there."""
    store = rendezvous("test", 60)
    rank = todist.get_rank()
    store.set(f"address/{rank}", f"of {rank}")
    other = store.get(f"address/{1 - rank}").decode()
    agent, started = elastic_store(), "metadist/started/run"
    agent.set(started, "yes")
    return other, agent.check(["metadist/test/session"]), world_store().check([started])


def test_on_one_node_addresses_are_not_in_the_agents_store(tmp_path):
    tmp_path.chmod(0o700)
    seen = run_world(rendezvous_and_exchange, 2, environment=worker_environment(tmp_path))
    assert seen == [("of 1", False, False), ("of 0", False, False)]
    store = tmp_path / "metadist-store"
    assert store.exists() and stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


def refused() -> str:
    with pytest.raises(todist.UserError) as caught:
        world_store()
    return str(caught.value)


@pytest.mark.parametrize("case", ["mode", "owner", "link", "missing", "none"])
def test_a_log_directory_that_others_may_write_to_is_refused(tmp_path, case):
    directory = tmp_path / "log"
    directory.mkdir(mode=0o700)
    environment = worker_environment(directory)
    if case == "mode":
        directory.chmod(0o770)
    elif case == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give a directory away")
        os.chown(directory, 65534, -1)
    elif case == "link":
        directory.rename(tmp_path / "elsewhere")
        directory.symlink_to(tmp_path / "elsewhere")
    elif case == "missing":
        directory.rmdir()
    else:
        environment["TORCHELASTIC_ERROR_FILE"] = ""  # torchrun --log-dir=/dev/null
    for message in run_world(refused, 2, environment=environment):
        assert "torchrun's log directory" in message and "\n" not in message


def mark_start(is_worker: bool) -> tuple[str, bool]:
    """The first value of a key in the job's store; whether an earlier process started the run."""
    if is_worker:
        store.parent_is_agent = lambda: True
    had_started = current_job().has_started("run")
    current_job().mark_started("run")
    return world_store().compare_set("value", "", str(os.getpid())).decode(), had_started


@pytest.mark.parametrize(
    ("mode", "is_worker", "shared"),
    [(0o700, True, True), (0o755, True, False), (0o700, False, False)],
)
def test_a_single_worker_of_torchrun_shares_its_store_with_its_restarts_alone(
    tmp_path, mode, is_worker, shared
):
    tmp_path.chmod(mode)
    agent_store = open_store()
    [(before, had_started)], [(after, has_started)] = (
        run_world(
            mark_start, 1, is_worker, environment=worker_environment(tmp_path), store=agent_store
        )
        for _ in range(2)
    )
    assert not had_started
    assert (before == after, has_started) == (shared, shared)


PRINT_STORE = """
import os
import metadist as todist
from metadist.distributed.rendezvous import all_gather_object, rendezvous
from metadist.distributed.store import world_store
os.write(1, f"{todist.get_rank()} {type(world_store()).__name__}\\n".encode())  # in one piece
todist.init_rpc()
assert todist.remote_sync_call(pow, args=(2, 5), partitioner=todist.get_world_size() - 1) == 32
todist.shutdown_rpc()
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_torchruns_workers_find_the_file_by_themselves(tmp_path, workers):
    (tmp_path / "program.py").write_text(PRINT_STORE)
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={workers}", str(tmp_path / "program.py")),
        ],
        env={**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    expected = [f"{rank} FileStore" for rank in range(workers)]
    assert sorted(ended.stdout.split("\n")[:workers]) == expected


def full_disk(*_: object) -> int:
    raise OSError("no space")


def test_a_file_of_counters_does_not_grow(tmp_path, monkeypatch):
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    counters = FileCounters(tmp_path / "counters")
    assert not counters.check(["beat/0"])
    for value in ("0", "123456", "finished", "7"):
        counters.set("beat/0", value)
        counters.set("beat/1", "1")
        again = FileCounters(tmp_path / "counters")
        assert again.check(["beat/0", "beat/1"])
        assert again.multi_get(["beat/0", "beat/1"]) == [value.encode(), b"1"]
    assert {path.stat().st_size for path in (tmp_path / "counters").iterdir()} == {24}
    assert stat.S_IMODE((tmp_path / "counters").stat().st_mode) == 0o700
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full_disk)
        with pytest.raises(OSError, match="no space"):
            counters.set("beat/0", "8")
    assert counters.multi_get(["beat/0"]) == [b"7"]
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files  # a sweep has one for each job


# --- worlds without torchrun ----------------------------------------------------------------------


def finish() -> tuple[float, float]:
    """Run the handlers of this process's end; the times before and after them."""
    job = begin_job(5.0, lambda lost: os._exit(3))
    if todist.get_rank():
        time.sleep(1)  # rank zero has finished long before
    job.end()
    before = time.monotonic()
    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(threading.Thread, "start", start_no_thread)
        multiprocessing.util._run_finalizers(0)  # noqa: SLF001  # this process runs no atexit
    return before, time.monotonic()


def start_no_thread(thread: threading.Thread) -> None:
    raise RuntimeError("can't create new thread at interpreter shutdown")  # as Python 3.12 does


def test_rank_zero_which_hosts_the_store_exits_after_the_other_ranks_leave_it(free_port):
    variables = {"MASTER_PORT": str(free_port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    (_, zero_exits), (one_leaves, _) = run_world(finish, 2, environment=variables)
    assert zero_exits >= one_leaves


def finish_alone() -> float:
    """Host the store, and run the handlers of this process's end; the seconds that they take."""
    world_store()
    before = time.monotonic()
    multiprocessing.util._run_finalizers(0)  # noqa: SLF001
    return time.monotonic() - before


def test_rank_zero_does_not_wait_for_ranks_that_never_connected(free_port):
    variables = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": free_port}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = False
    assert run_world(finish_alone, 1, environment=variables)[0] < 20


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def stores_of_two_worlds() -> list[str]:
    """The types of the store of one process and, in the same process, of two."""
    variables = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
    os.environ.update(RANK="0", WORLD_SIZE="1")
    alone = world_store()
    os.environ.update(variables)
    stores = alone, world_store(), world_store()
    if todist.get_rank():
        world_store().set("arrived", "yes")
    else:  # which hosts the store
        world_store().get("arrived")
    return [type(each).__name__ for each in stores]


def test_another_world_in_the_same_process_has_another_store(free_port):
    variables = {"MASTER_PORT": str(free_port), "TORCHELASTIC_USE_AGENT_STORE": "False"}
    for names in run_world(stores_of_two_worlds, 2, environment=variables):
        assert names == ["HashStore", "TCPStore", "TCPStore"]


def test_an_address_that_is_taken_or_missing_is_named(monkeypatch):
    monkeypatch.setattr(store, "_store", None)
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(todist.UserError, match=r"must hold the address .* \('MASTER_PORT'\)"):
        world_store()
    monkeypatch.setenv("MASTER_PORT", "70000")
    with pytest.raises(todist.UserError, match=r"must hold the address .* \(there is no port 700"):
        world_store()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(todist.UserError, match=f"MASTER_PORT={port} cannot be bound"):
            world_store()


def own_address() -> str:
    """This machine's address for others; no packet is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            pytest.skip("this machine has no network address")
        return probe.getsockname()[0]


def listening_store(port: int) -> list[str]:
    if todist.get_rank() == 0:
        world_store().set("listens", "yes")
    world_store().get("listens")
    rendezvous("before the end", 60)
    return [address for address, number, _ in listening() if number == port]


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_store_of_rank_zero_listens_on_one_address(free_port, nodes):
    address = own_address()
    environment = {
        "MASTER_ADDR": address,
        "MASTER_PORT": str(free_port),
        "LOCAL_WORLD_SIZE": str(2 // nodes),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
        **({"LOCAL_RANK": "0"} if nodes == 2 else {}),
    }
    expected = ["127.0.0.1"] if nodes == 1 else [address]
    assert run_world(listening_store, 2, free_port, environment=environment)[0] == expected


def test_an_address_that_other_nodes_cannot_reach_is_not_listened_on(free_port, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert store._listen("127.0.0.1", free_port) is None  # noqa: SLF001
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    descriptor = store._listen("127.0.0.1", free_port)  # noqa: SLF001
    assert descriptor is not None
    os.close(descriptor)


def interfaces(**variables: str) -> dict[str, str]:
    names = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        patch.setattr(socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth1"), (3, "ib0")])
        with bound_to_interface():
            inside = {name: os.environ[name] for name in names if name in os.environ}
        assert {name for name in names if name in os.environ} == set(variables) & set(names)
    return inside


def test_rpc_gloo_and_nccl_bind_to_the_same_interface():
    names = ("TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    one_node = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    nodes = {**one_node, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    assert interfaces(**one_node) == dict.fromkeys(names, "lo")
    assert interfaces(**nodes) == {}
    assert interfaces(**nodes, GLOO_SOCKET_IFNAME="ib0") == dict.fromkeys(names, "ib0")
    chosen = {"TP_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "^docker"}
    assert interfaces(**nodes, **chosen) == {**dict.fromkeys(names, "eth1"), **chosen}


@pytest.mark.parametrize("variable", ["TP_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"])
def test_an_interface_that_the_machine_does_not_have_is_refused(variable):
    with pytest.raises(
        UserError, match=f"^{variable}=nosuch0: .* no network interface nosuch0: name one of lo,"
    ):
        interfaces(**{variable: "nosuch0"})


@pytest.mark.parametrize("local_world_size", ["1", "2"])
def test_ranks_that_cannot_connect_are_told_which_interface_to_name(monkeypatch, local_world_size):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", local_world_size)
    with pytest.raises(WorkerLostError) as caught, bound_to_interface():
        raise RuntimeError("Gloo connectFullMesh failed with SO_ERROR: Connection refused")
    assert "cannot connect to each other (Gloo connectFullMesh failed" in str(caught.value)
    assert ("set GLOO_SOCKET_IFNAME on every node" in str(caught.value)) == (
        local_world_size == "1"
    )
