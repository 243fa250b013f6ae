"""Worlds of real processes for the tests, as torchrun would start them, but quickly.

The processes fork from a server that has imported torch and metadist already.
"""

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(
    [
        "torch.distributed.rpc",
        "metadist.cli",
        "hydra.main",
        "matplotlib.figure",
        "matplotlib.backends.backend_agg",
        "torch.nn.parallel",
        "metadist.cli.main",
        "metadist.config.build",
        "metadist.training.sanity_check",
        "metadist.training.run_plots",
        "metadist.algorithms.maml",
        "metadist.models.conv4",
        "metadist.tasks.glyphs",
        "torch.utils.tensorboard",
        "torch._dynamo",  # what any optimizer imports, for two seconds
        "pytest",  # what any module of tests imports
    ]
)


def run_world(
    function: Callable[..., Any],
    size: int,
    *args: Any,
    timeout: float = 180.0,
    environment: dict[str, str] | None = None,
    store: dist.TCPStore | None = None,
    may_fail: bool = False,
) -> list[Any]:
    """Call `function(*args)` in each of `size` new processes of one job.

    Returns:
        What each rank returned, in the order of the ranks. With `may_fail`, a rank that raised
        or died gives an exception in its place; without, the first such is raised.
    """
    store = store or open_store()
    receivers, processes = [], []
    for rank in range(size):
        receiver, sender = _context.Pipe(duplex=False)
        variables = {
            "RANK": rank,
            "WORLD_SIZE": size,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": size,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True,
            "OMP_NUM_THREADS": 1,
            **(environment or {}),
        }
        process = _context.Process(
            target=_run_rank,
            args=(sender, {name: str(value) for name, value in variables.items()}, function, args),
        )
        process.start()
        sender.close()
        receivers.append(receiver)
        processes.append(process)
    deadline = time.monotonic() + timeout
    outcomes: list[Any] = []
    try:
        for rank, receiver in enumerate(receivers):
            try:
                if not receiver.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"rank {rank} gave no result within {timeout} s")
                outcomes.append(pickle.loads(receiver.recv_bytes()))
            except EOFError:
                outcomes.append(ProcessLookupError(f"rank {rank} died without a result"))
            except TimeoutError as error:
                outcomes.append(error)
    finally:
        for process in processes:
            process.join(5.0)
            if process.is_alive():
                process.kill()
                process.join()
    if not may_fail:
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
    return outcomes


def on_rank_zero(function: Callable[..., Any], size: int, *args: Any, **options: Any) -> Any:
    """Call `function(*args)` on rank zero of an RPC world of `size` workers; its result.

    Options are those of `run_world`. The other ranks only respond to calls.
    """
    return run_world(_in_rpc_on_rank_zero, size, function, args, **options)[0]


def _in_rpc_on_rank_zero(function: Callable[..., Any], args: tuple) -> Any:
    import metadist

    @metadist.auto_init_rpc()
    def main() -> Any:
        return function(*args) if metadist.get_rank() == 0 else None

    return main()


def open_store() -> dist.TCPStore:
    """A store such as torchrun's agent keeps, on a free port."""
    return dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60)
    )


class RankFailed(Exception):
    """What a rank raised, with its traceback as text."""


def _run_rank(sender: Any, variables: dict[str, str], function: Callable, args: tuple) -> None:
    import torch

    os.environ.update(variables)
    torch.set_num_threads(1)
    try:
        outcome = function(*args)
    except BaseException as error:
        outcome = RankFailed(f"{type(error).__name__}: {error}\n{traceback.format_exc()}")
    # Plain bytes: multiprocessing's own pickler would share tensors' memory and need this process.
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    os._exit(0)
