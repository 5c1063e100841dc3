"""The algorithms that `auto` chooses: the same on all ranks and in every run.

Small buffers use recursive doubling (`rd`), which has the fewest steps. Larger sums use recursive
halving (`rechd`), or a ring if they are large for the number of ranks and recursive halving would
fold some of them. If nodes have several ranks, these reduce inside their node first. Operators that
read trees use `direct`, which rounds once, on up to 16 ranks.
"""

from __future__ import annotations

from functools import lru_cache

from collectives.reducers import TREE_RANKS, Needs
from collectives.schedules import copying, direct, halving, ring
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec
from collectives.schedules.topology import Topology

STEP_BYTES = {"cpu": 1 << 18, "cuda": 1 << 23}
"""Up to this number of bytes, by device, the steps of a buffer take longer than its bytes.

From the cost model and `python -m bench.collectives.all_reduce`; slicing a buffer adds steps.
"""
# For slices that launches have reduced within each of two nodes: `rd` sends no more bytes than
# other algorithms, and needs one step only.
BETWEEN_TWO_NODES = parse_all_reduce_spec("rd")[0]
# Up to this size a reduction to one rank runs in pairs, with half of the buffer as extra memory, or
# all of it if ranks are folded; beyond it, by a ring with one n-th.
PAIRS_BYTES = 1 << 20


# Called by every collective, with few different arguments.
@lru_cache(maxsize=256)
def sum_algorithm(
    device: str,
    nbytes: int,
    topology: Topology,
    library: str | None = None,
    *,
    ordered: bool = False,
) -> AllReduceSpec:
    """Return the algorithm for a sum.

    Args:
        device: "cpu" or "cuda".
        nbytes: Length of each rank's buffer.
        topology: The nodes of the ranks.
        library: The name of a library's own sum, if there is one.
        ordered: Whether it has order="tree"; the algorithms chosen for it give the same bits.
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
    """Return the algorithm for an operator that reads trees, such as Adasum."""
    if size in TREE_RANKS:
        # For small buffers too: `rd` rounds at each level, and later levels may cancel.
        name = "direct"
    elif nbytes <= STEP_BYTES[device]:
        name = "rd"
    else:
        name = "direct" if device == "cuda" and size > 2 else "vhdd"
    return parse_all_reduce_spec(name)[0]


def all_gather_schedule(device: str, nbytes: int, topology: Topology) -> Schedule:
    """Return the all-gather for `nbytes` in all: Bruck's, with few steps, or a ring's.

    Both send equally many bytes, but the ring sends fewer between nodes. On GPUs the ring's steps
    cost the host too much.
    """
    alike = 1 in (topology.num_nodes, topology.local_size)
    if alike or device == "cuda" or nbytes <= STEP_BYTES[device]:
        return copying.all_gather(topology.size)
    return ring.all_gather(topology.size)


def reduce_schedule(nbytes: int, root: int, size: int, needs: Needs) -> Schedule:
    """Return the reduction of `nbytes` from each rank to `root`, in the order of `needs`."""
    if Needs.ALL_OPERANDS in needs:
        return direct.scatter_gather(size).reduce(root)
    in_pairs = needs or nbytes <= PAIRS_BYTES
    return (halving if in_pairs else ring).scatter_gather(size).reduce(root)
