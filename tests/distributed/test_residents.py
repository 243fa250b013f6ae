"""Values that stay where they are: only their names travel."""

import pickle

import pytest
from worlds import run_world

import metadist as todist
from metadist.distributed.residents import Resident, forget


def own_value(resident: Resident, factor: int) -> int:
    return resident.value * factor


@todist.auto_init_rpc()
def ask_every_worker() -> list | None:
    resident = Resident("number", todist.get_rank() + 10)
    todist.barrier()
    answer = None
    if todist.get_rank() == 0:
        answer = [
            todist.remote_sync_call(own_value, args=(resident, 2), partitioner=worker)
            for worker in range(todist.get_world_size())
        ]
    return answer


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_function_finds_the_value_of_its_own_worker(size):
    assert run_world(ask_every_worker, size)[0] == [2 * (10 + rank) for rank in range(size)]


@todist.auto_init_rpc()
def ask_a_worker_without() -> str | None:
    if todist.get_rank() == 0:
        with pytest.raises(todist.RemoteError) as caught:
            todist.remote_sync_call(own_value, args=(Resident("mine", 1), 1), partitioner=1)
        return str(caught.value)
    return None


def test_a_worker_without_the_value_says_so():
    message = run_world(ask_a_worker_without, 2)[0]
    assert "worker 1 keeps no value named 'mine'" in message


def test_the_value_does_not_travel_and_is_replaced():
    resident = Resident("large", bytes(1_000_000))
    assert len(pickle.dumps(resident)) < 200
    handle = pickle.loads(pickle.dumps(resident))
    assert handle.value is resident.value and repr(handle) == "Resident('large')"
    Resident("large", "another")
    assert handle.value == "another"


def test_values_of_a_job_are_forgotten_by_their_names():
    kept = Resident("a job/tasks/1", 1), Resident("another/tasks/1", 2)
    forget("a job/")
    assert kept[1].value == 2
    with pytest.raises(RuntimeError, match="keeps no value"):
        kept[0].value  # noqa: B018
