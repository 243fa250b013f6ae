"""Decorators that run a function of one shard on all shards."""

import functools
import importlib
import pickle
from collections.abc import Callable
from typing import Any, ParamSpec

from torch.futures import Future

from metadist.distributed.calls import GradientMode, remote_async_call, remote_sync_call
from metadist.distributed.partitioners import Partitioner, Reducer, WorkerID
from metadist.distributed.requests import FANOUT

_P = ParamSpec("_P")


class _Parallelized:
    """A decorated function, whose calls run on the workers. It is pickled by its name."""

    __qualname__: str
    __wrapped__: Callable[..., Any]

    def __init__(
        self, function: Callable[..., Any], *others: Any, call: Callable[..., Any], **options: Any
    ) -> None:
        # Without brackets, these are the arguments of the function's call, such as a module.
        if others or not hasattr(function, "__qualname__"):
            raise TypeError(
                "parallelize takes options first, and then a function that workers can import by "
                "its name: write @parallelize() above a function."
            )
        functools.update_wrapper(self, function)
        self._call = call
        self._options = options

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(_Original(self), args=args, kwargs=kwargs, **self._options)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __reduce__(self) -> tuple:
        try:
            function = _find(self.__module__, self.__qualname__)
        except (ImportError, AttributeError):
            function = None
        if function is not self:
            raise pickle.PicklingError(f"workers cannot import {self!r} by its name")
        return _find, (self.__module__, self.__qualname__)

    def __repr__(self) -> str:
        return f"<parallelized {self.__module__}.{self.__qualname__}>"


class _Original:
    """The undecorated function, pickled by the name of the decorated one."""

    def __init__(self, parallelized: _Parallelized) -> None:
        self.parallelized = parallelized
        self.__qualname__ = parallelized.__qualname__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.parallelized.__wrapped__(*args, **kwargs)


def _find(module: str, qualname: str) -> Any:
    function = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    # Other decorators may wrap it: `@rank_zero_only` above `@parallelize(…)`.
    while not isinstance(function, _Parallelized):
        function = function.__wrapped__
    return function


def parallelize_sync(
    partitioner: Partitioner | WorkerID | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
    gradient: GradientMode = "dist_autograd",
    fanout: int = FANOUT,
) -> Callable[[Callable[_P, Any]], Callable[_P, Any]]:
    """Decorator: a call of the function partitions its arguments, runs it on the workers and
    reduces the results.

    See `remote_async_call` for the arguments. The undecorated function is `function.__wrapped__`.
    """
    return functools.partial(
        _Parallelized,
        call=remote_sync_call,
        partitioner=partitioner,
        reducer=reducer,
        timeout=timeout,
        gradient=gradient,
        fanout=fanout,
    )


def parallelize_async(
    partitioner: Partitioner | WorkerID | None = None,
    reducer: Reducer | None = None,
    timeout: float | None = None,
    gradient: GradientMode = "dist_autograd",
    fanout: int = FANOUT,
) -> Callable[[Callable[_P, Any]], Callable[_P, Future]]:
    """Like `parallelize_sync`, but a call returns a future."""
    return functools.partial(
        _Parallelized,
        call=remote_async_call,
        partitioner=partitioner,
        reducer=reducer,
        timeout=timeout,
        gradient=gradient,
        fanout=fanout,
    )


parallelize = parallelize_sync
