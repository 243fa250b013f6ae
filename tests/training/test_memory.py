"""A worker's memory does not grow with the tasks of a meta-batch: a few tasks' graphs at a time."""

import gc
from pathlib import Path

import pytest
from tiny import compose
from worlds import run_world

from metadist.config import build_experiment
from metadist.tasks import task_keys
from metadist.training.task_mapper import MetaBatch

LARGE_TASKS = (
    "logger=jsonl",
    "model=conv4",
    "model.filters=64",
    "model.pooling=max",
    "task.ways=5",
    "task.shots=1",
    "task.queries=15",
)
GRAPH = 10.0
"""MB that the graph of one such task holds, at the least."""


def peak(
    directory: str, strategy: tuple[str, ...], tasks: int, batches: int, by_hand: bool = False
) -> float:
    """This rank's greatest resident memory, in MB, after some meta-batches of so many tasks."""
    size = f"trainer.meta_batch_size={tasks}"
    x = build_experiment(compose(*LARGE_TASKS, *strategy, size), Path(directory), "maml")
    gc.collect()
    x.strategy.open()
    for iteration in range(1, batches + 1) if x.strategy.is_driver else ():
        keys = task_keys(0, "train", iteration, range(tasks))
        if by_hand:
            x.optimizer.zero_grad()
            for key in keys:
                (x.learner.train()(x.tasks.sample(key)).loss / tasks).backward()
        else:
            x.strategy.forward_backward(x.train_mapper, x.learner, MetaBatch(keys))
        x.optimizer.step()
    x.strategy.close()
    status = Path("/proc/self/status").read_text(encoding="ascii")
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["rpc", "allreduce"])
def test_peak_memory_does_not_grow_with_the_tasks_of_a_meta_batch(tmp_path, strategy):
    # As many tasks in all: what the allocator's fragments add in time is then the same.
    few, many = (
        run_world(peak, 2, str(tmp_path), (f"strategy={strategy}",), *size, timeout=400)
        for size in ((32, 8), (128, 2))
    )
    print(f"{strategy}: {few} MB with 32 tasks, {many} MB with 128")
    assert max(many) <= 1.1 * max(few)


@pytest.mark.slow
def test_one_by_one_it_is_that_of_a_loop_by_hand(tmp_path):
    one, two = (("trainer.task_chunk_size=1", f"strategy={name}") for name in ("local", "rpc"))
    (alone,) = run_world(peak, 1, str(tmp_path), one, 16, 2, True, timeout=200)
    (local,) = run_world(peak, 1, str(tmp_path), one, 16, 2, timeout=200)
    rpc = run_world(peak, 2, str(tmp_path), two, 32, 2, timeout=200)
    print(f"by hand {alone} MB, local {local} MB, rpc {rpc} MB")
    assert local - alone < 3 * GRAPH
    # The RPC world itself takes some: its libraries, buffers and threads.
    assert max(rpc) - alone < 100  # the threads and buffers of RPC


@pytest.mark.slow
def test_in_a_context_every_task_keeps_its_graph(tmp_path):
    """The memory that strategy.gradient=worker saves, and that this measurement shows it."""
    option = ("strategy=rpc", "strategy.gradient=dist_autograd")
    few, many = (
        run_world(peak, 2, str(tmp_path), option, tasks, 1, timeout=200) for tasks in (16, 64)
    )
    print(f"context: {few} MB with 16 tasks, {many} MB with 64")
    assert all(after - before > 6 * GRAPH for before, after in zip(few, many, strict=True))
