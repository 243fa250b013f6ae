"""Values that every worker keeps for itself, such as a dataset: calls carry only their names."""

from typing import Any

from metadist.distributed.world import get_rank

_values: dict[str, Any] = {}


class Resident:
    """A handle of a worker's own value. Pickled, it is the name alone.

    Each worker puts its own value under the name (`Resident("tasks", value)`); a function that
    gets the handle through a remote call finds the value of the worker it runs on.

    Args:
        name: the name, the same on all workers.
        value: this worker's value; it replaces an earlier one of that name.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        _values[name] = value

    @property
    def value(self) -> Any:
        """The value of the worker that asks.

        Raises:
            RuntimeError: this worker has put no value under the name.
        """
        if self.name not in _values:
            raise RuntimeError(
                f"worker {get_rank()} keeps no value named {self.name!r}: every worker must make "
                f"Resident({self.name!r}, value) before it is called."
            )
        return _values[self.name]

    def __reduce__(self) -> tuple:
        return _by_name, (self.name,)

    def __repr__(self) -> str:
        return f"Resident({self.name!r})"


def forget(prefix: str) -> None:
    """Drop this worker's values whose names begin so."""
    for name in [name for name in _values if name.startswith(prefix)]:
        del _values[name]


def _by_name(name: str) -> Resident:
    handle = Resident.__new__(Resident)
    handle.name = name
    return handle
