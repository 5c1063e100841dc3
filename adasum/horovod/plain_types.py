"""Plain types that Horovod's users broadcast, in a form that torch's restricted unpickler reads.

For `torch.save(..., pickle_module=...)`. This module's Pickler writes objects of these types as
calls of the module's functions with plain arguments. `torch.load(..., weights_only=True)` calls no
other functions, and these only make data and run no code, whatever their arguments.
"""

from __future__ import annotations

import io
import pathlib
import pickle
from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import torch

_PATHS = ("Path", "PosixPath", "WindowsPath", "PurePath", "PurePosixPath", "PureWindowsPath")
_NAMESPACES = {each.__name__: each for each in (Namespace, SimpleNamespace)}
_FACTORIES: dict[str, Any] = {
    each.__name__: each for each in (bool, dict, float, int, list, set, str, tuple)
}


def array(content: torch.Tensor, number: bool) -> Any:
    """Make a NumPy array or number from the content of an .npy file, uint8 [bytes]."""
    found = np.load(io.BytesIO(content.numpy().tobytes()), allow_pickle=False)
    return found[()] if number else found


def path(kind: str, text: str) -> pathlib.PurePath:
    """Make a path."""
    if kind not in _PATHS:
        raise ValueError(f"{kind!r} is not a kind of path")
    made: pathlib.PurePath = getattr(pathlib, kind)(text)
    return made


def duration(days: int, seconds: int, microseconds: int) -> timedelta:
    """Make a timedelta."""
    return timedelta(days, seconds, microseconds)


def day(text: str) -> date:
    """Make a date from ISO 8601."""
    return date.fromisoformat(text)


def moment(kind: str, text: str, fold: int, zone: timedelta | str | None) -> datetime | time:
    """Make a datetime or time from ISO 8601, with the offset or name of its zone."""
    where: tzinfo | None = timezone(zone) if isinstance(zone, timedelta) else None
    if isinstance(zone, str):
        where = ZoneInfo(zone)
    if kind == "time":
        return time.fromisoformat(text).replace(fold=fold, tzinfo=where)
    return datetime.fromisoformat(text).replace(fold=fold, tzinfo=where)


def namespace(kind: str, values: dict[str, Any]) -> Any:
    """Make a Namespace or a SimpleNamespace."""
    return _NAMESPACES[kind](**values)


def default_dict(factory: str | None, items: dict[Any, Any]) -> defaultdict[Any, Any]:
    """Make a defaultdict whose factory is a built-in type or None."""
    return defaultdict(None if factory is None else _FACTORIES[factory], items)


# Allowed in the whole process, because a temporary permission is not safe with threads.
torch.serialization.add_safe_globals([array, path, duration, day, moment, namespace, default_dict])


def _array(value: Any) -> tuple[Any, ...]:
    buffer = io.BytesIO()
    np.save(buffer, value, allow_pickle=False)
    content = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    return array, (content, isinstance(value, np.generic))


def _moment(value: Any) -> tuple[Any, ...]:
    zone = value.tzinfo
    if isinstance(zone, ZoneInfo):
        zone = zone.key
    elif type(zone) is timezone:
        zone = zone.utcoffset(None)
    if not isinstance(zone, str | timedelta | None):
        raise TypeError(f"the zone {zone!r} cannot be sent: use datetime.timezone or zoneinfo")
    text = value.replace(tzinfo=None).isoformat()
    return moment, (type(value).__name__, text, value.fold, zone)


def _default_dict(value: Any) -> tuple[Any, ...]:
    factory = value.default_factory
    if factory is not None and _FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
        raise TypeError(f"the default_factory {factory!r} cannot be sent: pass dict(...)")
    return default_dict, (factory and factory.__name__, dict(value))


_WRITERS: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    np.ndarray: _array,
    timedelta: lambda value: (duration, (value.days, value.seconds, value.microseconds)),
    date: lambda value: (day, (value.isoformat(),)),
    datetime: _moment,
    time: _moment,
    defaultdict: _default_dict,
    **{
        each: lambda value: (namespace, (type(value).__name__, vars(value)))
        for each in _NAMESPACES.values()
    },
    **{
        getattr(pathlib, each): lambda value: (path, (type(value).__name__, str(value)))
        for each in _PATHS
    },
}


class Pickler(pickle.Pickler):
    """Writes objects of these types, but not of their subclasses, as calls of this module."""

    def reducer_override(self, obj: Any) -> Any:
        """Return the call that rebuilds an object; NotImplemented for pickle's own way."""
        if isinstance(obj, np.generic):
            return _array(obj)
        write = _WRITERS.get(type(obj))
        return NotImplemented if write is None else write(obj)
