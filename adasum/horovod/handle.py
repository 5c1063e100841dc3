"""Handles of asynchronous operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol


class Waitable(Protocol):
    """An operation that has been started."""

    def wait(self) -> Any:
        """Block until the operation is done and return its result."""
        ...

    def is_completed(self) -> bool:
        """Return whether `wait` would return without blocking."""
        ...


class Handle:
    """A started operation, as the `_async` functions return it."""

    def __init__(self, work: Waitable, finish: Callable[[Any], Any]) -> None:
        self._work = work
        self._finish = finish

    def wait(self) -> Any:
        """Block until the operation is done and return its result; may be called again.

        Raises:
            CollectiveError: The operation failed; every call raises it.
        """
        return self._finish(self._work.wait())

    def is_completed(self) -> bool:
        """Return whether `wait` would return without blocking."""
        return self._work.is_completed()


class _HandleList:
    def __init__(self, handles: Sequence[Handle]) -> None:
        self._handles = handles

    def wait(self) -> list[Any]:
        return [handle.wait() for handle in self._handles]

    def is_completed(self) -> bool:
        return all(handle.is_completed() for handle in self._handles)


def wait_for_all(handles: Sequence[Handle]) -> Handle:
    """Return one handle whose result is the list of all results."""
    return Handle(_HandleList(handles), lambda results: results)


def synchronize(handle: Waitable) -> Any:
    """Wait for an asynchronous operation and return its result."""
    return _checked(handle).wait()


def poll(handle: Waitable) -> bool:
    """Return whether `synchronize(handle)` would return without blocking."""
    return _checked(handle).is_completed()


def _checked(handle: Waitable) -> Waitable:
    if not (hasattr(handle, "wait") and hasattr(handle, "is_completed")):
        raise TypeError(
            f"handle must be what an _async function returned, not {type(handle).__name__}"
        )
    return handle
