"""Device memory of kernels in addition to their tensors: tables and scratch memory."""

from __future__ import annotations

import threading
from array import array
from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernels.call import Call

_streams: dict[torch.device, torch.cuda.Stream] = {}
# The driver copies pageable memory of up to so many bytes without waiting for earlier work.
_COPIED_AT_ONCE = 1 << 16
_HOST = torch.device("cpu")


def _is_capturing(device: torch.device) -> bool:
    # Not by `device.type`, which takes a microsecond.
    return device != _HOST and torch.cuda.is_current_stream_capturing()


def upload(
    values: np.ndarray, device: torch.device, pinned: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Copy int64 `values` to `device`; return (device tensor, host tensor), which must be kept.

    Outside graph capture the copy goes through a stream of its own and is complete on return: every
    stream may read it, and it waits for no earlier work. During capture the copy becomes part of
    the graph: each replay reads the pinned host tensor again and fills the device tensor, which
    lies in the graph's own memory. Once that tensor is freed, later work of the graph may use its
    memory.

    Args:
        values: The values to copy.
        device: The device to copy to.
        pinned: A host tensor of equal values that another graph reads, to share with this one.
    """
    host = torch.from_numpy(np.ascontiguousarray(values, dtype=np.int64))
    if device.type != "cuda":
        return host, host
    host = host.pin_memory() if pinned is None else pinned
    if _is_capturing(device):
        return host.to(device, non_blocking=True), host
    stream = _streams.get(device)
    if stream is None:
        stream = _streams[device] = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        table = host.to(device, non_blocking=True)
    stream.synchronize()
    return table, host


class DeviceTables:
    """Tables by their whole content, so that none is uploaded twice.

    When a device has its limit of tables, the device is synchronized and the least recently used
    half is dropped, except tables that a CUDA graph may read at each replay. An event could not
    replace the synchronization, since plans run on streams that are not known here.

    Args:
        limit: Maximum number of tables per device that no graph reads.
        graph_limit: Maximum number of tables of different content per device that graphs read. The
            end of a graph is not known here, so these are kept for ever: tables from before the
            capture and, of tables made during it, the host tensors, which graphs with equal tables
            share.
    """

    def __init__(self, limit: int = 512, graph_limit: int = 4096) -> None:
        self._limit, self._graph_limit = limit, graph_limit
        # In order of last use.
        self._tables: defaultdict[torch.device, dict[Hashable, Any]] = defaultdict(dict)
        # Tables and host tensors that graphs read.
        self._kept: defaultdict[torch.device, dict[Hashable, Any]] = defaultdict(dict)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        both = self._tables, self._kept
        return len({(device, key) for each in both for device in each for key in each[device]})

    def fetch(
        self, key: Hashable, device: torch.device, make: Callable[[Tensor | None], Any]
    ) -> Any:
        """Return the table of `key`; `make` makes it if it does not exist.

        Args:
            key: All values that the content depends on.
            device: The table's device.
            make: Returns a tuple that begins with `upload`'s two tensors, called with `pinned`.

        Raises:
            RuntimeError: Graphs have read too many tables.
        """
        with self._lock:
            tables, kept = self._tables[device], self._kept[device]
            if not _is_capturing(device):
                table = tables.pop(key, None)
                if table is None:
                    self._make_room(device)
                    # Graphs with tables of this content go on reading their host tensor.
                    table = make(kept.get(key))
                tables[key] = table
                return table
            if key not in kept and len(kept) >= self._graph_limit:
                raise RuntimeError(
                    f"CUDA graphs have captured calls on {self._graph_limit} lists of tensors "
                    "or segments, whose tables stay: make a plan before the capture, and keep "
                    "it as long as the graph"
                )
            table = tables.get(key)
            if table is None:
                # Only this graph fills the device tensor, so no other graph may use it.
                table = make(kept.get(key))
                kept[key] = table[1]
            else:
                kept[key] = table
            return table

    def _make_room(self, device: torch.device) -> None:
        """Drop tables of a device if there is no room for one more."""
        tables, kept = self._tables[device], self._kept[device]
        droppable = [key for key in tables if key not in kept]
        if len(droppable) >= self._limit:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            for key in droppable[: -(-len(droppable) // 2)]:
                del tables[key]


TABLES = DeviceTables()


def write_addresses(call: Call, addresses: array[int]) -> Tensor:
    """Return a table of int64 addresses on a call's device.

    Any stream may read the table of a new plan. Other tables are written in the order of the
    current stream and are not kept, since most lists of tensors occur once.
    """
    device = call.out.device
    if call.planned or _is_capturing(device):
        found: Tensor = TABLES.fetch(
            ("addresses", addresses.tobytes()),
            device,
            lambda pinned: upload(np.array(addresses, dtype=np.int64), device, pinned),
        )[0]
        return found
    host = torch.frombuffer(addresses, dtype=torch.int64)
    # Up to 64 KiB, CUDA copies pageable memory before the call returns. Larger tables use pinned
    # memory, which torch keeps alive until the copy is done.
    if host.nbytes > _COPIED_AT_ONCE and device != _HOST:
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class Scratch:
    """Memory that a launch needs while it runs: one pair of tensors for each stream.

    Launches on one stream run one after the other and may share it. A CUDA graph has its own.
    """

    def __init__(self, limit: int = 64) -> None:
        self._limit = limit
        # With their lengths, since asking torch for each takes half a microsecond.
        self._kept: dict[Hashable, tuple[int, int, tuple[Tensor, Tensor]]] = {}

    def fetch(
        self, use: Hashable, device: torch.device, floats: int, counters: int, stream: int
    ) -> tuple[Tensor, Tensor]:
        """Return float64 and int64 memory, the latter zero before its first use.

        Args:
            use: A key that differs for kernels that leave the counters in different states.
            device: The memory's device.
            floats: Minimum number of float64.
            counters: Minimum number of int64.
            stream: The current stream.
        """
        # The default stream, 0, cannot be captured.
        if stream and _is_capturing(device):
            return _scratch(device, floats, counters)
        key = (use, device, stream)
        found = self._kept.get(key)
        if found is None or found[0] < floats or found[1] < counters:
            if found is not None:
                floats, counters = max(floats, found[0]), max(counters, found[1])
            elif len(self._kept) >= self._limit:
                # Each pair's memory returns to the stream that it was allocated and used on.
                self._kept.clear()
            found = self._kept[key] = floats, counters, _scratch(device, floats, counters)
        return found[2]


def _scratch(device: torch.device, floats: int, counters: int) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(floats, dtype=torch.float64, device=device),
        torch.zeros(counters, dtype=torch.int64, device=device),
    )
