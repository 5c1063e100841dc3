"""All all-reduce algorithms by the names of the specification string.

To add an algorithm, add its record here; the record is defined in the file with the steps.
"""

from __future__ import annotations

from collectives.reducers import Needs
from collectives.schedules import copying, direct, halving, ring
from collectives.schedules.algorithm import Algorithm, refusal

ALGORITHMS: dict[str, Algorithm] = {
    record.name: record
    for record in (
        ring.XRING,
        halving.RECHD,
        halving.VHDD,
        direct.DIRECT,
        halving.RD,
        copying.BRUCK,
        copying.ONE_SHOT,
        direct.PSGPU,
        direct.PSCPU,
        Algorithm(
            "collective", "torch.distributed's own all_reduce, k pieces in flight", outer=False
        ),
        Algorithm("nccl", "NCCL's own all-reduce", outer=False),
    )
}
"""The records by name, without `auto`, which chooses among them."""

SCHEDULES = tuple(name for name, record in ALGORITHMS.items() if not record.is_library)
"""The names of algorithms with a schedule."""

LIBRARIES = frozenset(ALGORITHMS) - frozenset(SCHEDULES)
"""The names of libraries' own all-reduces, which have no schedule."""


def carriers(needs: Needs, reads_tree: bool = False) -> tuple[str, ...]:
    """Return the names of the algorithms that can carry an operator over all ranks."""
    return tuple(name for name in SCHEDULES if not refusal(ALGORITHMS[name], needs, reads_tree))


ORDERED = carriers(Needs.ONE_TREE, reads_tree=True)
"""The names of the algorithms that carry Adasum."""


def algorithm(name: str) -> Algorithm:
    """Return the record of a name; raise ValueError for an unknown one."""
    if name not in ALGORITHMS:
        raise ValueError(f"{name!r} is not an algorithm: use {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
