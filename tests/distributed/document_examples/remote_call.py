# fmt: off
# ruff: noqa
"""Documents 000 and 001, "Remote Procedure Call (RPC)": both calls."""
import metadist as todist

seen = {}


def func(a, b, *, c=0):
    return todist.get_rank(), a + b + c


def worker_init_fn():
    seen['initialized'] = True


@todist.auto_init_rpc(worker_init_fn)
def main_async():
    worker_id, arg1, arg2 = todist.get_world_size() - 1, 1, 2

    # Execute the function on the remote worker (asynchronously)
    future = todist.remote_async_call(
        func,
        args=(arg1, arg2),
        kwargs={'c': 30},
        partitioner=worker_id,
    )

    # Wait for the result
    result = future.wait()

    seen['async'] = result


@todist.auto_init_rpc(worker_init_fn)
def main_sync():
    worker_id, arg1, arg2 = 'worker1', 1, 2

    # Execute the function on the remote worker
    result = todist.remote_sync_call(
        func,
        args=(arg1, arg2),
        kwargs={'c': 300},
        partitioner=worker_id,
    )

    seen['sync'] = result


def main():
    main_async()
    main_sync()
