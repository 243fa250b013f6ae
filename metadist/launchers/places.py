"""Numbers for what runs at the same time in this process."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Places:
    """Gives each taker the lowest number that nobody holds. Any thread."""

    def __init__(self) -> None:
        self._taken: set[int] = set()
        self._lock = threading.Lock()

    @contextmanager
    def one(self) -> Iterator[int]:
        """A number, from 0, held until the end of the context."""
        with self._lock:
            place = next(n for n in range(len(self._taken) + 1) if n not in self._taken)
            self._taken.add(place)
        try:
            yield place
        finally:
            with self._lock:
                self._taken.remove(place)
