"""A job of this world: which live ranks carry it out, and which of them says what ended it.

A process may run several jobs one after the other, and torchrun may start processes anew, with
restart counts that differ from agent to agent; so each job begins with a meeting.
"""

import secrets
import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from metadist.distributed.meeting import another_connection, exchange, meet, world_store
from metadist.distributed.pulse import Pulse
from metadist.distributed.residents import forget
from metadist.distributed.world import attempt, get_rank, get_world_info, host_name

T = TypeVar("T")

_ANSWER_SECONDS = 2.0


class Job:
    """The live ranks of one job.

    Attributes:
        store: a key space that they alone share.
        hosts: the machine of each.
        restarted: whether torchrun has restarted any of them before.
        key: its name, no other job's.
        owns_cause: whether this rank has claimed what ends the job.
    """

    def __init__(
        self, store: dist.Store, hosts: list[str], restarted: bool = False, key: str = ""
    ) -> None:
        self.store = store
        self.hosts = hosts
        self.restarted = restarted
        self.key = key
        self._named = 0
        self.owns_cause = False
        self._pulse: Pulse | None = None
        self._stop_wanted = 0

    def watch(self, pulse: Pulse) -> None:
        """Let a pulse keep an eye on the others until `end`."""
        self._pulse = pulse
        pulse.start()

    def end(self) -> None:
        """This rank's part is over. Any rank, any time; it waits for nobody."""
        pulse, self._pulse = self._pulse, None
        if pulse is not None:
            pulse.end()

    def new_name(self, what: str) -> str:
        """A name for a `Resident` of this job, the same on all ranks that ask as often."""
        self._named += 1
        return f"{self.key}/{what}/{self._named}"

    def claim_cause(self) -> bool:
        """Claim that what this rank raised is what ends the job; any rank, after an error.

        Returns:
            Whether no other rank has claimed it before: then this one is to say what it was. A
            rank that cannot reach the others any more is to speak as well.
        """
        me = str(get_world_info().rank)
        owner = _soon(lambda: self.store.compare_set("cause", "", me).decode(), me)
        self.owns_cause = owner == me
        return self.owns_cause

    def cause_is_claimed(self) -> bool:
        """Whether any rank has claimed the cause."""
        return _soon(lambda: self.store.check(["cause"]), False)

    def note_said(self) -> None:
        """The rank that owns the cause has told the user."""
        _soon(lambda: self.store.set("said", "yes"), None)

    def cause_is_said(self) -> bool:
        """Whether the user knows."""
        return _soon(lambda: self.store.check(["said"]), False)

    def is_reachable(self) -> bool:
        """Whether the store that the ranks share answers."""
        return _soon(lambda: self.store.check(["cause"]) or True, False)

    def silent_ranks(self) -> list[str]:
        """Who has given no sign of life for three seconds, of those that this rank looks at."""
        ranks = self._pulse.silent(3.0) if self._pulse is not None else []
        return [f"rank {rank} on {self.hosts[rank]}" for rank in ranks]

    def note_begun(self, run: str) -> None:
        """Remember, over restarts, that work on a run has begun. Rank zero."""
        world_store().set(f"metadist/begun/{run}", "yes")

    def has_begun(self, run: str) -> bool:
        """Whether work on a run began in these processes or in others before a restart."""
        return world_store().check([f"metadist/begun/{run}"])

    def ask_to_stop(self, number: int) -> None:
        """Pass a signal that this rank got on to rank zero. Safe in a signal's handler."""
        self._stop_wanted = number
        if self._pulse is not None:
            self._pulse.stop_wanted = number

    @property
    def asked_to_stop(self) -> int:
        """On rank zero, the number of a signal that any rank passed on; 0 for none."""
        own = self._stop_wanted if get_rank() == 0 else 0
        return own or (self._pulse.stop_asked if self._pulse is not None else 0)


def _soon(ask: Callable[[], T], otherwise: T) -> T:
    """What the store answers, or `otherwise` if it does not answer soon."""
    answers: list[T] = []

    def wait() -> None:
        try:
            answers.append(ask())
        except RuntimeError:
            answers.append(otherwise)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(_ANSWER_SECONDS)
    return answers[0] if answers else otherwise


_current = Job(dist.HashStore(), [host_name()])


def current_job() -> Job:
    """The job that this process works on; one of its own as long as none has begun."""
    return _current


def begin_job(timeout: float, on_lost: Callable[[str], None]) -> Job:
    """Meet the other ranks for a job. Every rank calls it; an earlier job is over then.

    Args:
        timeout: seconds that ranks may arrive apart, and within which a rank that is lost later
            is found.
        on_lost: see `Pulse`.

    Raises:
        NeverCame: some ranks did not come.
    """
    global _current
    _current.end()
    if _current.key:
        forget(f"{_current.key}/")
    word = {"host": host_name(), "attempt": attempt(), "key": secrets.token_hex(8)}
    words = exchange(meet("job", timeout), "word", word, timeout)
    prefix = f"metadist/job/{words[0]['key']}"
    _current = Job(
        dist.PrefixStore(prefix, world_store()),
        [each["host"] for each in words],
        any(each["attempt"] > 0 for each in words),
        words[0]["key"],
    )
    if len(words) > 1:
        store = dist.PrefixStore(prefix, another_connection(timeout))
        _current.watch(Pulse(store, _current.hosts, timeout, on_lost))
    return _current
