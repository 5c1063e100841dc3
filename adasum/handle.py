"""Handles of asynchronous operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from collectives import Work


class Handle:
    """A started operation, as the `_async` functions return it.

    Args:
        works: What it waits for: works, or other handles.
        finish: Called with the works' results; returns the operation's.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[..., Any]) -> None:
        self._works = works
        self._finish = finish

    def wait(self) -> Any:
        """Block until the operation is done and return its result; may be called again.

        Raises:
            CollectiveError: The operation failed; every call raises it.
        """
        return self._finish(*[work.wait() for work in self._works])

    def is_completed(self) -> bool:
        """Return whether `wait` would return without blocking."""
        return all(work.is_completed() for work in self._works)


def wait_for_all(handles: Sequence[Handle]) -> Handle:
    """Return one handle whose result is the list of all results."""
    return Handle(handles, lambda *results: list(results))


def synchronize(handle: Handle | Work[Any]) -> Any:
    """Wait for an asynchronous operation and return its result."""
    return _checked(handle).wait()


def poll(handle: Handle | Work[Any]) -> bool:
    """Return whether `synchronize(handle)` would return without blocking."""
    return _checked(handle).is_completed()


def _checked(handle: Any) -> Any:
    if not (hasattr(handle, "wait") and hasattr(handle, "is_completed")):
        raise TypeError(
            f"handle must be what an _async function returned, not {type(handle).__name__}"
        )
    return handle
