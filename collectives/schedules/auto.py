"""What `auto` stands for: the same on all ranks and in every run; `algorithm=` overrides it.

Recursive doubling (`rd`) has the fewest steps and takes small buffers. A larger sum goes by
recursive halving (`rechd`), or by a ring if it is large for its ranks and recursive halving would
fold some of them. Nodes of several ranks reduce inside the nodes first. Operators that read trees
go by `direct`, which rounds once, on up to 16 ranks.
"""

from __future__ import annotations

from functools import lru_cache

from collectives.reducers import TREE_RANKS, Needs
from collectives.schedules import copying, direct, halving, ring
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec
from collectives.schedules.topology import Topology

STEP_BYTES = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Up to so many bytes a buffer's steps take longer than its bytes, by device.

By the cost model and by `python -m bench.collectives.all_reduce`; a buffer that is cut in slices
pays for more steps.
"""
# Up to here a reduction to one rank goes in pairs, with half of the buffer as extra memory, or all
# of it if ranks are folded; beyond by a ring, with one n-th.
PAIRS_BYTES = 1 << 20


# Every call asks, and few differ.
@lru_cache(maxsize=256)
def sum_algorithm(
    device: str,
    nbytes: int,
    topology: Topology,
    library: str | None = None,
    *,
    ordered: bool = False,
) -> AllReduceSpec:
    """Return the algorithm of a sum.

    Args:
        device: "cpu" or "cuda".
        nbytes: Length of each rank's buffer.
        topology: Where the ranks are.
        library: The name of a library's own sum, if there is one.
        ordered: Whether it has order="tree"; all its algorithms give the same bits.
    """
    size, local, step = topology.size, topology.local_size, STEP_BYTES[device]
    power = not size & (size - 1)
    two_levels = 1 not in (topology.num_nodes, local) and (power or not ordered)
    if library is not None:
        name = library
    elif nbytes <= (step // 16 if two_levels else step):
        name = "rd"
    elif two_levels and nbytes <= step * local:
        name = "rechd/rd"
    elif two_levels:
        name = "rechd/rechd" if ordered else "xring/xring"
    elif ordered:
        name = "direct" if size in TREE_RANKS and (device == "cuda" or not power) else "rechd"
    else:
        name = "rechd" if power or nbytes < step // 4 * size else "xring"
    return parse_all_reduce_spec(name)[0]


def tree_algorithm(device: str, nbytes: int, size: int) -> AllReduceSpec:
    """Return the algorithm of an operator that reads trees, as Adasum does."""
    if size in TREE_RANKS:
        # At any size: the first levels of `rd` round what later levels may cancel.
        name = "direct"
    elif nbytes <= STEP_BYTES[device]:
        name = "rd"
    else:
        name = "direct" if device == "cuda" and size > 2 else "vhdd"
    return parse_all_reduce_spec(name)[0]


def all_gather_schedule(device: str, nbytes: int, topology: Topology) -> Schedule:
    """Return the all-gather of so many bytes in all: Bruck's, of few steps, or a ring's.

    Both send as many bytes, but fewer of a ring's leave a node. On GPUs a ring's steps cost the
    host too much.
    """
    alike = 1 in (topology.num_nodes, topology.local_size)
    if alike or device == "cuda" or nbytes <= STEP_BYTES[device]:
        return copying.all_gather(topology.size)
    return ring.all_gather(topology.size)


def reduce_schedule(nbytes: int, root: int, size: int, needs: Needs) -> Schedule:
    """Return the reduction of so many bytes of each rank onto `root`, in the order of `needs`."""
    if Needs.ALL_OPERANDS in needs:
        return direct.scatter_gather(size).reduce(root)
    in_pairs = needs or nbytes <= PAIRS_BYTES
    return (halving if in_pairs else ring).scatter_gather(size).reduce(root)
