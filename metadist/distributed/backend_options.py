"""The options of the TensorPipe backend that a world is opened with."""

from torch.distributed import rpc
from torch.distributed.rpc import constants

CALL_TIMEOUT = 300.0
"""Seconds a remote call may take, unless the call or the backend options say otherwise."""

NUM_WORKER_THREADS = 256
"""Calls inside an autograd context hold a thread of the agent's until their own calls are answered:
so many can be under way on a worker at once. An idle thread costs next to nothing."""


def backend_options(
    given: rpc.TensorPipeRpcBackendOptions | None = None,
) -> rpc.TensorPipeRpcBackendOptions:
    """New options: the user's, where they say something, else metadist's.

    Args:
        given: the user's options, which stay as they are. Device maps, devices, and a number of
            threads and a timeout other than torch's defaults (16 and 60 s) are kept; ranks meet
            and messages travel as in any world of metadist.
    """
    given = given or rpc.TensorPipeRpcBackendOptions()
    threads, timeout = given.num_worker_threads, given.rpc_timeout
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=(
            NUM_WORKER_THREADS if threads == constants.DEFAULT_NUM_WORKER_THREADS else threads
        ),
        rpc_timeout=CALL_TIMEOUT if timeout == constants.DEFAULT_RPC_TIMEOUT_SEC else timeout,
        init_method="metadist://",
        device_maps=given.device_maps,
        devices=given.devices,
        # The shared-memory transport keeps a thread a process spinning, on cores that the
        # workers compute on.
        _transports=["uv"],
    )
