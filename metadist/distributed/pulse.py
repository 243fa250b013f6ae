"""Signs of life in the world's store, so that nobody waits for the dead, whatever it waits in.

Every rank counts upwards in the store and looks at rank zero's count; rank zero looks at all. Two
threads do it, for a rank may be waiting inside torch, or compute for minutes: a long task is no
fault as long as its process gives signs of life.
"""

import os
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from metadist.distributed.world import get_world_info, launched_by_torchrun

_DONE = "done"

_GRACE_SECONDS = 5.0
"""How long a rank may take to end by itself once another one has named the cause."""


class Pulse:
    """This rank's signs of life, and its eye on the others'.

    Args:
        store: a key space of the ranks that are alive, over a connection of its own.
        hosts: the machine of each rank, for messages.
        timeout: seconds within which a rank that died, froze or cannot be reached is to be found;
            somewhat less may pass between two of its signs.
        on_lost: called, in a thread, with a sentence about who was lost; with "" when another
            rank has named a cause and this one still has not ended. It must end the process.
    """

    def __init__(
        self, store: dist.Store, hosts: list[str], timeout: float, on_lost: Callable[[str], None]
    ) -> None:
        self._store = store
        self._hosts = hosts
        self._on_lost = on_lost
        self._rank = get_world_info().rank
        self._interval = min(1.0, timeout / 20)
        self._silence = 0.9 * timeout
        self._parent = os.getppid()
        self._ended = threading.Event()
        self._lost = threading.Lock()
        self._named = 0.0  # when this rank learnt that some rank has named a cause
        self._wake()
        watched = range(1, len(hosts)) if self._rank == 0 else range(1)
        self._seen = dict.fromkeys(watched, "")
        self.stop_wanted = 0
        """Set by a signal's handler on this rank: its number, for all ranks to know."""
        self.stop_asked = 0
        """On rank zero: the number of the signal that another rank passed on."""
        store.set(self._key(self._rank), "0")

    def start(self) -> None:
        """Begin. The threads die with the process."""
        for loop in (self._beat, self._watch):
            threading.Thread(target=loop, name="metadist-pulse", daemon=True).start()

    def end(self) -> None:
        """End well: the others shall not miss this rank."""
        self._ended.set()
        finishing = threading.Thread(
            target=lambda: self._store.set(self._key(self._rank), _DONE), daemon=True
        )
        finishing.start()
        finishing.join(_GRACE_SECONDS)

    def silent(self, seconds: float) -> list[int]:
        """The ranks, of those that this one looks at, without a sign of life for so long."""
        now = time.monotonic()
        return [rank for rank in self._seen if now - self._since[rank] > seconds]

    @staticmethod
    def _key(rank: int) -> str:
        return f"pulse/{rank}"

    def _wake(self) -> None:
        """Give everyone the full time, at first and after this process itself was suspended."""
        self._reached = time.monotonic()
        self._since = dict.fromkeys(range(len(self._hosts)), self._reached)

    def _beat(self) -> None:
        count, stop_told = 0, False
        try:
            while not self._ended.wait(self._interval):
                count += 1
                self._store.set(self._key(self._rank), str(count))
                if self.stop_wanted and not stop_told:
                    self._store.set("stop", str(self.stop_wanted))
                    stop_told = True
                if self._rank == 0 and not self.stop_asked and self._store.check(["stop"]):
                    self.stop_asked = int(self._store.get("stop"))
                self._look()
                self._reached = time.monotonic()
                if self._store.check(["cause"]):
                    self._named = self._named or self._reached
                    if self._reached - self._named > _GRACE_SECONDS:
                        self._lose("")
        except RuntimeError as error:
            if not self._ended.is_set():
                reason = str(error).strip().splitlines()[0]
                self._lose(f"the world's store, which torchrun's agent keeps, is gone ({reason}).")

    def _look(self) -> None:
        keys = [self._key(rank) for rank in self._seen]
        if not keys or not self._store.check(keys):
            return  # somebody has not begun yet: the meeting's business
        now = time.monotonic()
        signs = [sign.decode() for sign in self._store.multi_get(keys)]
        for rank, sign in zip(self._seen, signs, strict=True):
            if sign != self._seen[rank] or sign == _DONE:
                self._seen[rank], self._since[rank] = sign, now
            elif now - self._since[rank] > self._silence:
                self._lose(
                    f"rank {rank} on {self._hosts[rank]} has given no sign of life for "
                    f"{now - self._since[rank]:.0f} s: it died, froze or cannot be reached."
                )

    def _watch(self) -> None:
        """See that `_beat` itself is not stuck in a connection that leads nowhere."""
        tick = time.monotonic()
        while not self._ended.wait(self._interval):
            now = time.monotonic()
            if now - tick > self._interval + self._silence / 4:
                self._wake()
            elif now - self._reached > self._silence:
                self._lose(
                    f"the world's store cannot be reached from {self._hosts[self._rank]} since "
                    f"{now - self._reached:.0f} s: rank zero's machine or the network is gone."
                )
            if launched_by_torchrun() and os.getppid() != self._parent:
                self._lose("torchrun's agent, which started this process, died.")
            tick = now

    def _lose(self, sentence: str) -> None:
        with self._lost:
            if not self._ended.is_set():
                self._ended.set()
                self._on_lost("" if self._named else sentence)
