"""Handles of asynchronous operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from collectives import Work

# The result of the operation.
T_co = TypeVar("T_co", covariant=True)


class Handle(Generic[T_co]):
    """A started operation; the `_async` functions return it.

    It waits for `works`, which may be other handles, and passes their results to `finish`, which
    returns the result of the operation.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[..., T_co]) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> T_co:
        """Block until the operation ends; return its result or raise its error, at every call."""
        return self._finish(*[work.wait() for work in self._works])

    def is_completed(self) -> bool:
        """Return whether `wait` would return without blocking."""
        return all(work.is_completed() for work in self._works)


def synchronize(handle: Handle[T_co] | Work[T_co]) -> T_co:
    """Wait for an asynchronous operation and return its result.

    Examples:
        >>> hvd.init()
        >>> hvd.synchronize(hvd.allreduce_async(torch.ones(2)))
        tensor([1., 1.])
    """
    result: T_co = _checked(handle).wait()
    return result


def poll(handle: Handle[Any] | Work[Any]) -> bool:
    """Return whether `synchronize(handle)` would return without blocking.

    Examples:
        >>> hvd.init()
        >>> handle = hvd.allreduce_async(torch.ones(2))
        >>> result = hvd.synchronize(handle)
        >>> hvd.poll(handle)
        True
    """
    return bool(_checked(handle).is_completed())


def _checked(handle: Any) -> Any:
    if not (hasattr(handle, "wait") and hasattr(handle, "is_completed")):
        raise TypeError(
            f"handle must be the result of an _async function, got {type(handle).__name__}"
        )
    return handle
