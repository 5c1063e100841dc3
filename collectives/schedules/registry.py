"""All all-reduce algorithms by the names of the specification string.

An algorithm is added by one line here; its names, shards and tree are in the record beside its
steps.
"""

from __future__ import annotations

from collectives.schedules import (
    bruck,
    direct,
    one_shot,
    parameter_server,
    recursive_doubling,
    recursive_halving,
    ring,
    swing,
)
from collectives.schedules.algorithm import Algorithm, Needs

_RECORDS = (
    ring.XRING,
    recursive_halving.RECHD,
    recursive_halving.VHDD,
    direct.DIRECT,
    swing.SWING,
    recursive_doubling.RD,
    bruck.BRUCK,
    one_shot.ONE_SHOT,
    parameter_server.PSGPU,
    parameter_server.PSCPU,
    Algorithm(
        "collective", "torch.distributed's own all_reduce, k pieces in flight", None, outer=False
    ),
    Algorithm("nccl", "NCCL's own all-reduce", None, outer=False),
)

ALGORITHMS: dict[str, Algorithm] = {record.name: record for record in _RECORDS}
"""The records by name; `auto`, which chooses among them, is none."""

SCHEDULES = tuple(name for name, record in ALGORITHMS.items() if not record.is_library)
"""The names that stand for a schedule, not for a library's own all-reduce."""

LIBRARIES = frozenset(ALGORITHMS) - frozenset(SCHEDULES)
"""The names that stand for a library's own all-reduce."""


def carriers(needs: Needs) -> tuple[str, ...]:
    """Return the names of the algorithms that can carry an operator with such needs."""
    return tuple(name for name, record in ALGORITHMS.items() if record.carries(needs))


ORDERED = carriers(Needs(one_tree=True, reads_tree=True))
"""The names of those that carry an operator that needs one expression tree and reads trees."""


def algorithm(name: str) -> Algorithm:
    """Return the record of a name; ValueError if there is none."""
    if name not in ALGORITHMS:
        raise ValueError(f"{name!r} is no algorithm: use {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
