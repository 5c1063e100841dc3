"""What `auto` stands for: a table by device, nodes, ranks and size, made by the cost model.

`python -m collectives.cost --table` prints it, from the link rates that
`collectives/cost/thresholds.py` records. So the choice is the same on all ranks and in every run; a
specification for other links, which `python -m collectives.cost` prints for their rates, is the
override. Operators that read trees have a table of their own; any other operator that is no plain
sum, or that says so itself, chooses by size alone, `Reducer.algorithm`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from collectives import validation
from collectives.reducers import TREE_RANKS, Reducer
from collectives.schedules import binomial_tree, bruck, ring
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import AllReduceSpec, parse_all_reduce_spec, spec_for
from collectives.schedules.topology import Topology

Key = tuple[str, str, str]

# By device ("nccl" for a GPU's where a library has its own all-reduce, which stands for every row
# that is not here), nodes and ranks. Unlike an argument's, these limits count bytes.
TABLE: dict[Key, str] = {
    ("cpu", "a rank a node", "16 up, 2^k"): "rd:128k:rechd:128M:xring",
    ("cpu", "a rank a node", "2"): "rd:2M:rechd",
    ("cpu", "a rank a node", "2^k"): "rd:256k:rechd:4M:xring",
    ("cpu", "a rank a node", "3"): "rd:32k:xring",
    ("cpu", "a rank a node", "5 to 7"): "rd:256k:xring",
    ("cpu", "a rank a node", "other"): "rd:128k:rechd:512k:xring",
    ("cpu", "one node", "2"): "rd:512k:rechd",
    ("cpu", "one node", "2^k"): "rd:512k:rechd:2M:xring",
    ("cpu", "one node", "3"): "rd:256k:xring",
    ("cpu", "one node", "5 to 7"): "rd:512k:xring",
    ("cpu", "one node", "other"): "rd:512k:rechd:1M:xring",
    ("cpu", "several ranks a node", "2^k"): "rd:16k:rechd/rd:256k:rechd:2M:xring/xring:16M:xring",
    ("cpu", "several ranks a node", "5 to 7"): "rd:8k:rechd/rd:64k:xring/xring:16M:xring",
    ("cpu", "several ranks a node", "other"): "rd:4k:rechd/rd:128k:xring/xring:8M:xring",
    ("cuda", "a rank a node", "16 up, 2^k"): "rd:4M:rechd",
    ("cuda", "a rank a node", "2"): "rd:32M:rechd",
    ("cuda", "a rank a node", "2^k"): "rd:8M:rechd:256M:xring",
    ("cuda", "a rank a node", "3"): "rd:1M:xring",
    ("cuda", "a rank a node", "5 to 7"): "rd:8M:xring",
    ("cuda", "a rank a node", "other"): "rd:8M:rechd:16M:xring",
    ("cuda", "one node", "2"): "rd:64M:rechd",
    ("cuda", "one node", "2^k"): "rd:32M:rechd",
    ("cuda", "one node", "3"): "rd:8M:xring",
    ("cuda", "one node", "5 to 7"): "rd:32M:xring",
    ("cuda", "one node", "other"): "rd:32M:rechd:64M:xring",
    ("cuda", "several ranks a node", "2^k"): "rd:4M:rechd/rd:16M:rechd",
    ("cuda", "several ranks a node", "5 to 7"): "rd:2M:rechd/rd:4M:xring/xring",
    ("cuda", "several ranks a node", "other"): "rd:1M:rechd/rd:8M:xring/xring",
    ("nccl", "a rank a node", "2"): "rd:4M:nccl",
    ("nccl", "one node", "2"): "rd:1M:nccl",
}

# The same for an operator that reads trees, by the price of Adasum.
TREE_TABLE: dict[Key, str] = {
    ("cpu", "a rank a node", "16 up, 2^k"): "rd:512k:vhdd",
    ("cpu", "a rank a node", "2^k"): "rd:512k:vhdd",
    ("cpu", "a rank a node", "3"): "rd:128k:direct",
    ("cpu", "a rank a node", "5 to 7"): "rd:512k:direct",
    ("cpu", "a rank a node", "other"): "rd:512k:direct",
    ("cpu", "one node", "2^k"): "rd:512k:vhdd",
    ("cpu", "one node", "3"): "rd:512k:direct",
    ("cpu", "one node", "5 to 7"): "rd:512k:direct",
    ("cpu", "one node", "other"): "rd:512k:vhdd:1M:direct",
    ("cpu", "several ranks a node", "2^k"): "rd:64k:vhdd",
    ("cpu", "several ranks a node", "5 to 7"): "rd:512k:direct",
    ("cpu", "several ranks a node", "other"): "rd:64k:vhdd",
    ("cuda", "a rank a node", "16 up, 2^k"): "rd:8M:direct",
    ("cuda", "a rank a node", "2^k"): "rd:8M:direct:256M:vhdd",
    ("cuda", "a rank a node", "3"): "rd:1M:direct",
    ("cuda", "a rank a node", "5 to 7"): "rd:1M:direct",
    ("cuda", "a rank a node", "other"): "rd:4M:direct",
    ("cuda", "one node", "2^k"): "rd:8M:direct",
    ("cuda", "one node", "3"): "rd:1M:direct",
    ("cuda", "one node", "5 to 7"): "direct",
    ("cuda", "one node", "other"): "direct",
    ("cuda", "several ranks a node", "2^k"): "rd:8M:direct",
    ("cuda", "several ranks a node", "5 to 7"): "rd:1M:direct",
    ("cuda", "several ranks a node", "other"): "rd:4M:direct",
}

# The same for sums of order="tree", of whose algorithms every one makes the same bits.
ORDER_TABLE: dict[Key, str] = {
    ("cpu", "a rank a node", "16 up, 2^k"): "rd:128k:rechd",
    ("cpu", "a rank a node", "2"): "rd:2M:rechd",
    ("cpu", "a rank a node", "2^k"): "rd:256k:rechd",
    ("cpu", "a rank a node", "3"): "oneshot:256k:direct",
    ("cpu", "a rank a node", "5 to 7"): "rd:256k:direct",
    ("cpu", "a rank a node", "other"): "rd:128k:rechd:512k:direct",
    ("cpu", "one node", "2"): "rd:512k:rechd",
    ("cpu", "one node", "2^k"): "rd:512k:rechd",
    ("cpu", "one node", "3"): "oneshot:256k:direct",
    ("cpu", "one node", "5 to 7"): "rd:512k:direct",
    ("cpu", "one node", "other"): "rd:512k:rechd:1M:direct",
    ("cpu", "several ranks a node", "2^k"): "rd:16k:rechd/rd:256k:rechd/rechd",
    ("cpu", "several ranks a node", "5 to 7"): "rd:64k:rechd:256k:direct",
    ("cpu", "several ranks a node", "other"): "rd:64k:rechd",
    ("cuda", "a rank a node", "16 up, 2^k"): "rd:4M:rechd",
    ("cuda", "a rank a node", "2"): "rd:32M:rechd",
    ("cuda", "a rank a node", "2^k"): "rd:4M:direct:32M:rechd",
    ("cuda", "a rank a node", "3"): "oneshot:1M:direct",
    ("cuda", "a rank a node", "5 to 7"): "oneshot:1M:direct",
    ("cuda", "a rank a node", "other"): "oneshot:512k:direct",
    ("cuda", "one node", "2"): "rd:64M:rechd",
    ("cuda", "one node", "2^k"): "oneshot:1M:direct",
    ("cuda", "one node", "3"): "oneshot:1M:direct",
    ("cuda", "one node", "5 to 7"): "oneshot:1M:direct",
    ("cuda", "one node", "other"): "oneshot:1M:direct",
    ("cuda", "several ranks a node", "2^k"): "oneshot:128k:rd:1M:direct/rd:16M:direct/direct",
    ("cuda", "several ranks a node", "5 to 7"): "oneshot:1M:direct",
    ("cuda", "several ranks a node", "other"): "oneshot:512k:direct",
}
# Of more ranks than that table is made for.
_MANY_IN_ORDER = "rd:256k:rechd"

# Up to here a reduction to one rank goes by a tree, whose root takes the whole buffer as extra
# memory; beyond along a line, where nobody takes more than one n-th.
TREE_BYTES = 1 << 20
# Up to here, of all ranks together, a gather on two levels is Bruck's, of few steps; beyond a
# ring's, of whose bytes fewer leave a node. On GPUs a step costs the host too much for a ring.
BRUCK_BYTES = {"cpu": 1 << 18, "cuda": 1 << 30}


def key_of(device: str, topology: Topology) -> Key:
    """Return the row of the table for "cpu", "cuda" or "nccl" on such ranks."""
    size = topology.size
    nodes = "a rank a node" if topology.local_size == 1 else "several ranks a node"
    if topology.num_nodes == 1:
        nodes = "one node"
    if not size & (size - 1):
        ranks = "2" if size == 2 else "2^k"
        # A ring between so many nodes takes steps that recursive halving does not.
        if size > 8 and topology.local_size == 1:
            ranks = "16 up, 2^k"
    elif size < 8:
        ranks = "3" if size == 3 else "5 to 7"
    else:
        ranks = "other"
    return device, nodes, ranks


def sum_algorithm(
    device: str, nbytes: int, topology: Topology, library: str | None = None
) -> AllReduceSpec:
    """Return the algorithm of a sum of so many bytes a rank, on "cpu" or "cuda".

    library: The name of a library's own all-reduce of the same; None where there is none.
    """
    limits, specs = _row(device, topology, library)
    return specs[bisect_left(limits, nbytes)]


def takes_tree_table(topology: Topology) -> bool:
    """Return whether `auto` of an operator that reads trees is in `TREE_TABLE`; else by size."""
    return topology.size >= TREE_RANKS[0]


def tree_algorithm(device: str, nbytes: int, topology: Topology) -> AllReduceSpec:
    """Return the algorithm of an operator that reads trees, where `takes_tree_table`.

    Arguments as for `sum_algorithm`.
    """
    limits, specs = _limited(TREE_TABLE[key_of(device, topology)])
    return specs[bisect_left(limits, nbytes)]


def order_algorithm(device: str, nbytes: int, topology: Topology) -> AllReduceSpec:
    """Return the algorithm of a sum of order="tree"; arguments as for `sum_algorithm`."""
    many = topology.size > TREE_RANKS[-1]
    limits, specs = _limited(_MANY_IN_ORDER if many else ORDER_TABLE[key_of(device, topology)])
    return specs[bisect_left(limits, nbytes)]


class _Adasum(Reducer):
    """What `auto` asks of Adasum, whose package is above this one."""

    needs_one_tree = True
    reads_tree = True


def range_for(
    text: str, topology: Topology, nbytes: float | None, device: str | None, *, one_tree: bool
) -> AllReduceSpec:
    """Return the range of a specification that is for a buffer, of `auto` what it stands for.

    That is what goes by messages: sums on GPUs leave most sizes to NCCL where it is there, and
    ranks that share memory reduce in it. Limits count elements of 4 bytes.

    nbytes, the length of each rank's buffer, and the device, "cpu" or "cuda", may be None where the
    one range is not `auto`; else that is a ValueError. one_tree: Whether the operator needs one
    tree, as Adasum does; else it is a sum.
    """
    specs = parse_all_reduce_spec(text)
    if nbytes is None and (len(specs) > 1 or specs[0].outer == "auto"):
        raise ValueError(f"specification {text!r} goes by size: give nbytes")
    validation.nbytes(nbytes or 0)
    size = int(nbytes or 0)
    spec = replace(spec_for(specs, size // 4), limit=-1)
    if spec.outer != "auto":
        return spec
    if device not in ("cpu", "cuda"):
        raise ValueError(f'auto goes by device: device must be "cpu" or "cuda", got {device!r}')
    if not one_tree:
        return sum_algorithm(device, size, topology)
    if takes_tree_table(topology):
        return tree_algorithm(device, size, topology)
    return parse_all_reduce_spec(_Adasum().algorithm(size, topology.size))[0]


# Of one group's topology, and what a training's calls ask for.
@lru_cache(maxsize=64)
def _row(
    device: str, topology: Topology, library: str | None
) -> tuple[Sequence[int], Sequence[AllReduceSpec]]:
    """Return the bytes up to which each but the last algorithm is taken, and the algorithms."""
    key = key_of("nccl" if library else device, topology)
    limits, row = _limited(TABLE.get(key, "nccl") if library else TABLE[key])
    names = {"nccl": library or "nccl"}
    return limits, [replace(spec, alg=names.get(spec.alg, spec.alg)) for spec in row]


@lru_cache(maxsize=64)
def _limited(row: str) -> tuple[Sequence[int], Sequence[AllReduceSpec]]:
    """Return the bytes up to which each but the last algorithm of a row is taken, and all of it."""
    specs = parse_all_reduce_spec(row)
    return [spec.limit for spec in specs[:-1]], [replace(spec, limit=-1) for spec in specs]


def all_gather_schedule(device: str, nbytes: int, topology: Topology) -> Schedule:
    """Return Bruck's all-gather or the ring's of so many bytes in all; both send as many.

    Where all links are alike that is Bruck's, of fewer steps.
    """
    alike = 1 in (topology.num_nodes, topology.local_size)
    if alike or nbytes <= BRUCK_BYTES[device]:
        return bruck.all_gather(topology.size)
    return ring.all_gather(topology.size)


def reduce_schedule(nbytes: int, root: int, size: int) -> Schedule:
    """Return the reduction of so many bytes of each of `size` ranks onto `root`."""
    return (binomial_tree if nbytes <= TREE_BYTES else ring).reduce(size, root)
