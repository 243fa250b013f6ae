"""Worker-local values: only their names are pickled."""

import pickle

import pytest
from worlds import on_rank_zero, run_world

import metadist as todist
from metadist.distributed.worker_local import WorkerLocal, delete_worker_local


def own_value(local: WorkerLocal, factor: int) -> int:
    return local.value * factor


@todist.auto_init_rpc()
def ask_every_worker() -> list | None:
    local = WorkerLocal("number", todist.get_rank() + 10)
    todist.barrier()
    answer = None
    if todist.get_rank() == 0:
        answer = [
            todist.remote_sync_call(own_value, args=(local, 2), partitioner=worker)
            for worker in range(todist.get_world_size())
        ]
    return answer


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_function_finds_the_value_of_its_own_worker(size):
    assert run_world(ask_every_worker, size)[0] == [2 * (10 + rank) for rank in range(size)]


def ask_a_worker_without() -> str:
    with pytest.raises(todist.RemoteError) as caught:
        todist.remote_sync_call(own_value, args=(WorkerLocal("mine", 1), 1), partitioner=1)
    return str(caught.value)


def test_a_worker_without_the_value_says_so():
    message = on_rank_zero(ask_a_worker_without, 2)
    assert "worker 1 has no value named 'mine'" in message


def test_the_value_does_not_travel_and_is_replaced():
    local = WorkerLocal("large", bytes(1_000_000))
    assert len(pickle.dumps(local)) < 200
    handle = pickle.loads(pickle.dumps(local))
    assert handle.value is local.value and repr(handle) == "WorkerLocal('large')"
    WorkerLocal("large", "another")
    assert handle.value == "another"


def test_values_of_a_job_are_forgotten_by_their_names():
    kept = WorkerLocal("a job/tasks/1", 1), WorkerLocal("another/tasks/1", 2)
    delete_worker_local("a job/")
    delete_worker_local("another/tasks")  # the name of none
    assert kept[1].value == 2
    with pytest.raises(RuntimeError, match="has no value"):
        kept[0].value  # noqa: B018
