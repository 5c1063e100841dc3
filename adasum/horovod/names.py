"""Names of calls under way: as in Horovod, a second one of the same name is an error."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from collectives import Group

# By group, kind of call and name. Whoever runs a call holds its work until it has ended.
_under_way: weakref.WeakKeyDictionary[Group, weakref.WeakValueDictionary[tuple[str, str], Any]] = (
    weakref.WeakKeyDictionary()
)


def start_named(kind: str, name: str | None, group: Group, start: Callable[[], Any]) -> Any:
    """Start a call, asynchronously, and return its work.

    Calls of different kinds, which are the functions' names, may share a name; None is a call that
    the script has not named. ValueError: a call of this kind and name is under way in the group;
    nothing was started.
    """
    if not isinstance(name, str):
        return start()
    named = _under_way.setdefault(group, weakref.WeakValueDictionary())
    earlier = named.get((kind, name))
    if earlier is not None and not earlier.is_completed():
        raise ValueError(
            f"name {name!r} is that of another {kind} which is still under way: call synchronize "
            "on its handle first, or give this one a name of its own"
        )
    work = start()
    named[kind, name] = work
    return work
