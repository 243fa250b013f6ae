"""A board in Ray between the process that starts workers and the workers: words under topics."""

import asyncio
import io
import sys
import threading
import time
from collections import defaultdict
from typing import Any, TextIO

from metadist.launchers.ray.cluster import load_ray

_POLL_SECONDS = 0.02
_SAY_SECONDS = 0.2

SAID = "said"
"""Topic of what workers print: (name of the stream, text)."""


def _board_class() -> type:
    """The actor's class. Being made here it is sent by value: its process needs no torch."""

    class TopicBoard:
        """What was posted under each topic, in order. It lives until its owner ends."""

        def __init__(self) -> None:
            self._topics: dict[str, list[Any]] = defaultdict(list)

        async def post(self, topic: str, word: Any) -> None:
            self._topics[topic].append(word)

        async def read(self, topic: str, place: int, seconds: float) -> list[Any]:
            deadline = time.monotonic() + seconds
            while len(self._topics[topic]) <= place and time.monotonic() < deadline:
                await asyncio.sleep(_POLL_SECONDS)
            return self._topics[topic][place:]

        async def take(self, topic: str, seconds: float) -> list[Any]:
            words = await self.read(topic, 0, seconds)
            del self._topics[topic][: len(words)]
            return words

    return TopicBoard


class Board:
    """A handle on a board; it can be sent to Ray workers.

    Args:
        actor: Ray's handle. Default: of a new board, which ends with this process.
    """

    def __init__(self, actor: Any = None) -> None:
        ray = load_ray()
        # Words are of plain types, which the actor's process can read.
        self.actor = actor or ray.remote(num_cpus=0, max_concurrency=1000)(_board_class()).remote()

    def __reduce__(self) -> tuple:
        return Board, (self.actor,)

    def post(self, topic: str, word: Any) -> None:
        """Add a word to a topic, and wait until it is there."""
        load_ray().get(self.actor.post.remote(topic, word))

    def read(self, topic: str, place: int = 0, seconds: float = 0.0) -> list[Any]:
        """The words of a topic from a place on; if there are none, wait some seconds for them."""
        return load_ray().get(self.actor.read.remote(topic, place, seconds))

    def take(self, topic: str, seconds: float = 0.0) -> list[Any]:
        """The same from the topic's beginning, and remove them."""
        return load_ray().get(self.actor.take.remote(topic, seconds))

    def remove(self) -> None:
        """End the board."""
        load_ray().kill(self.actor)


class Voice:
    """While open, what this process writes to its standard streams goes to a board.

    Text goes several times a second, and at once when it is flushed. Any worker.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._waiting: list[tuple[str, str]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()

    def __enter__(self) -> "Voice":
        self._before = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Stream(self, "stdout"), _Stream(self, "stderr")
        threading.Thread(target=self._keep_saying, name="metadist-voice", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        sys.stdout, sys.stderr = self._before
        self.flush()

    def add(self, stream: str, text: str) -> None:
        """Say something soon."""
        with self._lock:
            self._waiting.append((stream, text))

    def flush(self) -> None:
        """Say what has not been said, and wait until it is on the board."""
        with self._lock:  # in order, whichever thread speaks
            words, self._waiting = self._waiting, []
            if words:
                self._board.post(SAID, words)

    def _keep_saying(self) -> None:
        while not self._closed.wait(_SAY_SECONDS):
            self.flush()


class _Stream(io.TextIOBase):
    """One of the standard streams of a process with a `Voice`."""

    encoding = "utf-8"

    def __init__(self, voice: Voice, name: str) -> None:
        self._voice = voice
        self._name = name

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self._voice.add(self._name, text)
        return len(text)

    def flush(self) -> None:
        self._voice.flush()


def print_said(board: Board, seconds: float, file: TextIO | None = None) -> None:
    """Print, in the process that started the workers, what they have said by now.

    Args:
        board: theirs.
        seconds: how long to wait for the first word.
        file: where standard output goes. Default: to this process's.
    """
    streams = {"stdout": file or sys.stdout, "stderr": sys.stderr}
    for words in board.take(SAID, seconds):
        for stream, text in words:
            streams[stream].write(text)
    for each in streams.values():
        each.flush()
