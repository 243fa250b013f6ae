"""Worker-local objects, such as a dataset: calls transfer only their names."""

from typing import Any

from metadist.distributed.world import get_rank

_values: dict[str, Any] = {}


class WorkerLocal:
    """A handle to a value that each worker stores locally. Only the name is pickled.

    Each worker registers its own value under the name (`WorkerLocal("tasks", value)`); a function
    that receives the handle in a remote call reads the value of the worker it runs on.

    Args:
        name: the name, the same on all workers.
        value: this worker's value; it replaces an earlier value of the same name.
    """

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        _values[name] = value

    @property
    def value(self) -> Any:
        """This worker's value.

        Raises:
            RuntimeError: this worker has registered no value under the name.
        """
        if self.name not in _values:
            raise RuntimeError(
                f"worker {get_rank()} has no value named {self.name!r}: every worker must create "
                f"WorkerLocal({self.name!r}, value) before it is called."
            )
        return _values[self.name]

    def __reduce__(self) -> tuple:
        return _by_name, (self.name,)

    def __repr__(self) -> str:
        return f"WorkerLocal({self.name!r})"


def delete_worker_local(name: str) -> None:
    """Delete this worker's value of a name; if it ends in "/", all values with this prefix."""
    keys = [key for key in _values if key.startswith(name)] if name[-1:] == "/" else [name]
    for key in keys:
        _values.pop(key, None)


def _by_name(name: str) -> WorkerLocal:
    handle = WorkerLocal.__new__(WorkerLocal)
    handle.name = name
    return handle
