"""Collectives over many ranks: all-reduces as schedules over point-to-point messages.

::

    group = collectives.init()              # under a launcher, or one rank
    group.all_reduce(tensor)                # in place, op=Sum
    request = group.all_reduce_init(flat)   # planned once, started any number of times
    group.run(schedule, tensor)             # your own all-reduce
    collectives.run_threads(4, fn)          # four ranks in one process
    collectives.schedule("xring", 4).draw() # its steps as a picture; also .table(), .cost, .trace

A `Schedule` is plain data: `verify` checks it for all ranks without running it, and any transport
can run it with any `Reducer`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from collectives.bucketing import (
    Packing,
    extract_ranges,
    group_devices,
    pack_small_tensors,
    plan_groups,
    split_by_size,
    unpack_small_tensors,
)
from collectives.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    TransportError,
)
from collectives.fused_buffer import FusedBuffer, buffer_of
from collectives.group import Group
from collectives.initialize import (
    default_group,
    from_process_group,
    init,
    is_initialized,
    new_group,
    run_threads,
    shutdown,
)
from collectives.reducers import Average, Max, Min, Needs, Operands, Piece, Product, Reducer, Sum
from collectives.requests import Request
from collectives.schedules.levels import order_of
from collectives.schedules.schedule import Action, Collective, Step, Transfer, split_bounds
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec, parse_general_int
from collectives.schedules.topology import Topology, ring_permutations
from collectives.schedules.verify import verify
from collectives.work import Work
from kernels import __version__ as __version__
from kernels import logs
from kernels.validation import did_you_mean

if TYPE_CHECKING:
    from collectives.backend import BackendOptions
    from collectives.tools.flight.writer import dump_flight_record
    from collectives.tools.lab import Schedule, schedule

# `_own_packages.py` looks for this name: PyPI has another package named `collectives`.
__adasum__ = True

__all__ = [
    "Action",
    "AllReduceSpec",
    "Average",
    "BackendOptions",
    "Collective",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "FusedBuffer",
    "Group",
    "Max",
    "Min",
    "Needs",
    "Operands",
    "Packing",
    "Piece",
    "Product",
    "Reducer",
    "Request",
    "Schedule",
    "Step",
    "Sum",
    "Topology",
    "Transfer",
    "TransportError",
    "Work",
    "buffer_of",
    "default_group",
    "dump_flight_record",
    "extract_ranges",
    "from_process_group",
    "group_devices",
    "init",
    "is_initialized",
    "new_group",
    "order_of",
    "pack_small_tensors",
    "parse_all_reduce_spec",
    "parse_general_int",
    "plan_groups",
    "ring_permutations",
    "run_threads",
    "schedule",
    "shutdown",
    "split_bounds",
    "split_by_size",
    "unpack_small_tensors",
    "verify",
]

# Public names of tools and of the backend, which needs torch.distributed: imported on first use.
_LAZY = {
    "BackendOptions": "collectives.backend",
    "Schedule": "collectives.tools.lab",
    "dump_flight_record": "collectives.tools.flight.writer",
    "schedule": "collectives.tools.lab",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        advice = did_you_mean(name, [] if name.startswith("_") else [*__all__, *dir(Group)])
        if advice == f"did you mean {name}?":
            advice = f"it is a method of the Group that init returns: group.{name}"
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}" + (advice and f": {advice}")
        )
    return getattr(importlib.import_module(_LAZY[name]), name)


def _create_process_group(options: Any, pg_options: Any) -> Any:
    """Return the process group for torch's `init_process_group("adasum")`."""
    return importlib.import_module("collectives.backend").create(options, pg_options)


if dist.is_available():
    dist.Backend.register_backend(
        "adasum", _create_process_group, extended_api=True, devices=["cpu", "cuda"]
    )
logs.show(__name__)
