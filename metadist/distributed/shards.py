"""What a partitioner makes of a call, and what comes back: shards and their results."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

WorkerID = int | str
"""A worker's number (its rank) or its name."""


class Shard(tuple):
    """A triple `(worker, args, kwargs)` that also knows how much it holds.

    Attributes:
        size: the number of items in the shard: its weight in a mean.
    """

    size: float

    def __new__(
        cls, worker: WorkerID, args: tuple = (), kwargs: dict | None = None, size: float = 1
    ) -> "Shard":
        """Args: the worker's number or name, the call's arguments, the items in the shard."""
        shard = super().__new__(cls, (worker, args, kwargs or {}))
        shard.size = size
        return shard

    def __reduce__(self) -> tuple:
        return Shard, (*self, self.size)


Partitioner = Callable[..., Sequence[tuple[WorkerID, tuple, dict]]]
"""(*args, **kwargs) -> [(worker, args, kwargs), …]; plain triples count as holding one item."""


def as_shards(triples: Iterable[tuple[WorkerID, tuple, dict]]) -> list[Shard]:
    """The triples of any partitioner as `Shard`s. A plain triple holds one item.

    Raises:
        TypeError: something else than triples.
    """
    shards = []
    for triple in triples:
        if not isinstance(triple, tuple) or len(triple) != 3:
            raise TypeError(
                "a partitioner must return a list of (worker, args, kwargs); "
                f"it returned {type(triple).__name__} {triple!r:.80}."
            )
        shards.append(triple if isinstance(triple, Shard) else Shard(*triple))
    return shards


class ShardResults(list):
    """The results of a call in the shards' order, with what each shard held.

    To a reducer it is a plain list; one that weighs reads `sizes`.

    Attributes:
        sizes: the number of items of each shard.
    """

    def __init__(self, results: Iterable[Any], sizes: Iterable[float] | None = None) -> None:
        super().__init__(results)
        self.sizes = [1.0] * len(self) if sizes is None else [float(size) for size in sizes]


Reducer = Callable[[list], Any]
"""(results in the shards' order) -> result."""
