"""Heartbeats in the job's store, which detect a lost rank no matter what other ranks wait for."""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch.distributed as dist

from metadist.deadlines import call_within
from metadist.distributed.rendezvous import read_present
from metadist.distributed.store import Counters
from metadist.distributed.world import get_world_info, launched_by_torchrun
from metadist.errors import first_line

FIRST_FAILURE, REPORTED, STOP = "first_failure", "reported", "stop"
"""Keys of a job's store: the rank that failed first, a mark that this was reported, and a signal's
number."""

_FINISHED = "finished"

_GRACE_SECONDS = 5.0
"""Seconds that a rank may take to exit by itself after another rank's failure."""


class WatchPlan(NamedTuple):
    """The heartbeats that a rank reads and writes.

    Attributes:
        own_node: the ranks of its node whose counters it reads.
        other_nodes: the ranks of the other nodes whose values it reads, by each node's first rank.
        writes_node: whether it writes the value of its node.
        watched: the ranks that it expects heartbeats from.
    """

    own_node: list[int]
    other_nodes: dict[int, list[int]]
    writes_node: bool
    watched: list[int]


def watch_plan(rank: int, leaders: Sequence[int]) -> WatchPlan:
    """The plan of a rank; see `Heartbeat`.

    Args:
        rank: the rank.
        leaders: the first rank of each rank's node.
    """
    nodes: dict[int, list[int]] = {}
    for member, leader in enumerate(leaders):
        nodes.setdefault(leader, []).append(member)
    if leaders[rank] != rank:
        return WatchPlan([leaders[rank]], {}, False, [leaders[rank]])
    other_nodes = {
        leader: members
        for leader, members in nodes.items()
        if leader != rank and 0 in (leader, rank)
    }
    watched = {*range(len(leaders))} if rank == 0 else {*nodes[rank], *other_nodes}
    return WatchPlan(nodes[rank], other_nodes, len(nodes) > 1, sorted(watched - {rank}))


class Heartbeat:
    """Writes this rank's heartbeats, and detects other ranks whose heartbeats stop.

    Every rank increments a counter that the ranks of its node can read. The first rank of a node
    reads the counters of its node and writes them to the store as one value. Rank zero reads these
    values, so it watches all ranks with one request; a node's first rank watches its node and rank
    zero; the other ranks watch the first rank of their node. Two daemon threads do this, so that a
    rank may compute or wait for minutes.

    Args:
        store: the store that the live ranks share, with its own connection.
        hosts: the machine of each rank, for messages.
        timeout: seconds within which a rank that died, froze or cannot be reached is detected.
        on_lost: the function called in a thread with a sentence about what was lost, or with "" if
            another rank failed and this one has not exited. It must end the process.
        clock: a function that returns monotonic seconds.
        counters: the store of the node's heartbeat counters. Default: `store`.
        leaders: the first rank of each rank's node. Default: all ranks are on one node.
    """

    def __init__(
        self,
        store: dist.Store,
        hosts: list[str],
        timeout: float,
        on_lost: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        counters: Counters | None = None,
        leaders: Sequence[int] | None = None,
    ) -> None:
        self._store = store
        self._node_counters: Counters = store if counters is None else counters
        self._hosts = hosts
        self._timeout = timeout
        self._on_lost = on_lost
        self._rank = get_world_info().rank
        self._clock = clock
        self.interval = min(1.0, timeout / 20)
        """Seconds between two heartbeats."""
        self._max_silence = 0.9 * timeout
        self._parent = os.getppid()
        self._ended = threading.Event()
        self._write_lock = threading.Lock()
        self._lost_lock = threading.Lock()
        self._grace = _GRACE_SECONDS
        self._failed_at = 0.0  # when this rank first read of a failure
        self._count = 0
        self._watched = clock()
        self._plan = watch_plan(self._rank, [0] * len(hosts) if leaders is None else leaders)
        self._counters = dict.fromkeys(self._plan.watched, "")
        self._reset_deadlines()
        self._signal_passed = False
        self.stop_signal = 0
        """The number of a signal that this rank received, for rank zero."""
        self.received_stop_signal = 0
        """On rank zero: the number of a signal that another rank received."""
        self.store_lost = False
        """Whether the store has not answered for too long."""
        self._node_counters.set(self._key(self._rank), "0")

    def start(self) -> None:
        """Start the threads, which call `beat` and `watch` every `interval` seconds."""
        for step in (self.beat, self.watch):
            threading.Thread(
                target=self._repeat, args=(step,), name="metadist-heartbeat", daemon=True
            ).start()

    def _repeat(self, step: Callable[[], None]) -> None:
        while not self._ended.wait(self.interval):
            step()

    def end(self) -> None:
        """Stop the threads. Other ranks no longer expect heartbeats from this one."""
        self._ended.set()
        call_within(_GRACE_SECONDS, self._write_finished)

    def _write_finished(self) -> None:
        # The lock waits for a beat in progress. Without a store no rank expects a heartbeat.
        with self._write_lock, contextlib.suppress(RuntimeError, OSError):
            self._node_counters.set(self._key(self._rank), _FINISHED)
            if self._plan.writes_node:  # no rank is left to read the node's counters
                self._store.set(self._node_key(self._rank), _FINISHED)

    def extend_grace(self) -> None:
        """Allow this rank to wait longer, after a failure, for other ranks to leave the job."""
        self._grace = self._timeout

    def silent_ranks(self, seconds: float) -> list[int]:
        """The watched ranks without a heartbeat for `seconds`."""
        now = self._clock()
        return [rank for rank in self._counters if now - self._last_beat[rank] > seconds]

    @staticmethod
    def _key(rank: int) -> str:
        return f"heartbeat/{rank}"

    @staticmethod
    def _node_key(leader: int) -> str:
        return f"heartbeat/node/{leader}"

    def _reset_deadlines(self) -> None:
        self._store_reached = self._clock()
        self._last_beat = dict.fromkeys(range(len(self._hosts)), self._store_reached)

    def beat(self) -> None:
        """Write a heartbeat, pass signals on, and check for silent and failed ranks."""
        try:
            with self._write_lock:
                if self._ended.is_set():
                    return
                self._count += 1
                self._node_counters.set(self._key(self._rank), str(self._count))
            if self._was_suspended():
                self._reset_deadlines()
            self._pass_signals()
            self._check_counters()
            self._store_reached = self._clock()
            self._check_first_failure()
        except (RuntimeError, OSError) as error:
            self._lose(f"the job's store cannot be reached ({first_line(error)}).")

    def _pass_signals(self) -> None:
        if self.stop_signal and not self._signal_passed:
            self._store.set(STOP, str(self.stop_signal))
            self._signal_passed = True
        if self._rank == 0 and not self.received_stop_signal and self._store.check([STOP]):
            self.received_stop_signal = int(self._store.get(STOP))

    def _check_counters(self) -> None:
        now = self._clock()
        read = self._read_counters()
        for rank in self._counters:
            counter = read.get(rank, "")  # "": its heartbeats have not started
            if counter != self._counters[rank] or counter == _FINISHED:
                self._counters[rank], self._last_beat[rank] = counter, now
            elif now - self._last_beat[rank] > self._max_silence:
                self._lose(
                    f"rank {rank} on {self._hosts[rank]} was lost: no heartbeat for "
                    f"{now - self._last_beat[rank]:.0f} s (it died, froze or cannot be reached)."
                )

    def _read_counters(self) -> dict[int, str]:
        """The counters of the watched ranks whose heartbeats have started."""
        keys = {rank: self._key(rank) for rank in self._plan.own_node}
        counters = read_present(self._node_counters, keys)
        if self._plan.writes_node:
            with self._write_lock:
                if not self._ended.is_set():
                    values = [counters.get(rank, "0") for rank in self._plan.own_node]
                    self._store.set(self._node_key(self._rank), " ".join(values))
        keys = {leader: self._node_key(leader) for leader in self._plan.other_nodes}
        for leader, value in read_present(self._store, keys).items():
            # _FINISHED is one value for all ranks of a node
            counters |= zip(self._plan.other_nodes[leader], itertools.cycle(value.split()))
        return counters

    def _check_first_failure(self) -> None:
        """End this process if it is still running some seconds after the first failure."""
        if not self._store.check([FIRST_FAILURE]):
            return
        now = self._clock()
        self._failed_at = self._failed_at or now
        failed_first = self._store.get(FIRST_FAILURE).decode() == str(self._rank)
        unreported = failed_first and not self._store.check([REPORTED])
        if now - self._failed_at > (self._timeout if unreported else self._grace):
            self._lose("")

    def watch(self) -> None:
        """Detect that `beat` hangs in a dead connection, or that torchrun's agent died."""
        now = self._clock()
        if self._was_suspended():
            self._reset_deadlines()
        elif now - self._store_reached > self._max_silence:
            self.store_lost = True
            self._lose(
                f"the job's store cannot be reached from {self._hosts[self._rank]} (no answer for "
                f"{now - self._store_reached:.0f} s): rank zero's machine or the network failed."
            )
        if launched_by_torchrun() and os.getppid() != self._parent:
            self._lose("torchrun's agent, which started this process, died.")
        self._watched = now

    def _was_suspended(self) -> bool:
        """Whether this process was suspended for a while, and missed other ranks' heartbeats."""
        return self._clock() - self._watched > self.interval + self._max_silence / 4

    def _lose(self, message: str) -> None:
        with self._lost_lock:
            if not self._ended.is_set():
                self._ended.set()
                self._on_lost("" if self._failed_at else message)
