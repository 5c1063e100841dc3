"""Where one algorithm becomes cheaper than another: specifications, and the table of `auto`.

A row of the table is for many machines, which differ in ranks and links. At every size it has the
algorithm that loses least on the machine where it loses most, beside the best one there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache

from collectives.cost import ASSUMED, Cost, LinkRates, Profile, Rate, estimate, walk
from collectives.cost.library import library_cost
from collectives.schedules import binomial_tree, bruck, ring
from collectives.schedules.auto import Key, key_of, takes_tree_table
from collectives.schedules.topology import Topology

Machine = tuple[LinkRates, Topology]
Price = Callable[[str, int, LinkRates, Topology], Cost]
Range = tuple[str, int]

# Bytes: from where nothing but latency counts to the largest buffers of a training.
_SIZES = tuple(1 << power for power in range(10, 31))
# Up to here nobody minds how much extra memory a call takes. Beyond, the algorithm that takes least
# is chosen where it is no more than so much worse than the best.
SMALL_BYTES = 1 << 20
_ALIKE = 1.05
_MAX_NODES = 12

_STEP, _SUM = 4.2e-4, Rate(2e-5, 3.2e-11)
_HOST = Rate(2.1e-4, 4.8e-10, 512 * 1024, 1.7e-9)
RECORDED = {
    "cuda": (ASSUMED,),
    "cpu": tuple(
        LinkRates(_HOST, Rate(_STEP, beta), _SUM, _SUM, nic=beta, call=2 * _STEP)
        for beta in (8.0e-9, 1.9e-9)
    ),
}
"""The links that the table is for, by device.

cuda: assumptions. cpu: TCP between two ranks on one host, and between four hosts that were network
namespaces, on links shaped to 1 and to 10 Gbit/s, by `bench.collectives.link_rates` on two cores of
an AMD EPYC that other programs used, too: what the second lacks of 10 Gbit/s is the processors'.
The ranks of a host share its link. call: the negotiation, in the two steps that four ranks need.
"""

MEASURED: dict[Key, str] = {("cpu", "a rank a node", "2^k"): "rd:256k:rechd:4M:xring"}
"""The rows of sums where times decide instead of the model, which has rechd up to 16 MiB.

Between 8 hosts at 1 Gbit/s the ring takes 0.87 times as long as rechd at 8 MiB, and 0.85 at 16 MiB,
where the model has 1.03 and 1.01. At 10 Gbit/s it takes 1.09 times as long at both sizes, and 1.10
at 16 MiB between 4 hosts. Medians of `tests.network_namespaces.algorithms` on two cores.
"""


def candidates(op: str, topology: Topology) -> tuple[str, ...]:
    """Return the specifications that compute the same as `op` over all ranks.

    Sums may be grouped in any way, on two levels too. Adasum's order is part of its answer: `rd`,
    `vhdd` and `direct` are the same tree, two levels and the ring's line are others. Of
    "tree sum", a sum of order="tree", two levels are that tree where all ranks are a power of two.
    """
    if op == "adasum":
        return ("rd", "vhdd", "direct") if takes_tree_table(topology) else ("rd", "vhdd")
    if op == "tree sum":
        if _is_flat(topology) or topology.size & (topology.size - 1):
            return ("rd", "oneshot", "rechd", "direct")
        return ("rd", "oneshot", "rechd/rd", "rechd/rechd", "direct/rd", "direct/direct")
    flat = ("rd", "rechd", "xring")
    if _is_flat(topology):
        return flat
    return (*flat, "rechd/rd", "rechd/rechd", "xring/xring")


def _is_flat(topology: Topology) -> bool:
    return 1 in (topology.num_nodes, topology.local_size)


def best_specification(op: str, rates: LinkRates, topology: Topology, itemsize: int = 4) -> str:
    """Return the specification of least price on a machine, for elements of so many bytes."""
    found = _ranges(candidates(op, topology), [(rates, topology)], _all_reduce(op))
    return _specification(found, itemsize)


def tree_table() -> dict[Key, str]:
    """Return the table of `auto` for operators that read trees, by the price of Adasum."""
    topologies = (*_topologies(), *_more_ranks())
    return _table("adasum", filter(takes_tree_table, topologies))


def order_table() -> dict[Key, str]:
    """Return the table of `auto` for sums of order="tree"."""
    return _table("tree sum", _topologies())


def table() -> dict[Key, str]:
    """Return the table of `auto`: specifications whose limits count bytes."""
    made = _table("sum", _topologies(), ("nccl",))
    return {key: MEASURED.get(key, row) for key, row in made.items() if row != "nccl"}


def _table(
    op: str, topologies: Iterable[Topology], library: tuple[str, ...] = ()
) -> dict[Key, str]:
    rows: dict[Key, list[Topology]] = {}
    for topology in topologies:
        for device in (*RECORDED, *library):
            rows.setdefault(key_of(device, topology), []).append(topology)
    answer = {}
    for key, alike in rows.items():
        names = candidates(op, alike[0])
        if key[0] in library:
            names = (*library, *names)
        rates = RECORDED["cpu" if key[0] == "cpu" else "cuda"]
        machines = [(each, topology) for topology in alike for each in rates]
        answer[key] = _specification(_ranges(names, machines, _all_reduce(op)), 1)
    return {key: answer[key] for key in sorted(answer)}


def tree_bytes(device: str) -> int:
    """Return up to how many bytes a reduction to one rank goes by a tree, not along a line."""
    machines = [(rates, topology) for rates in RECORDED[device] for topology in _topologies()]
    # Beyond SMALL_BYTES the line is taken for its memory in any case.
    return min(SMALL_BYTES, _ranges(("tree", "line"), machines, _other)[0][1])


def bruck_bytes(device: str) -> int:
    """Return up to how many bytes, of all ranks together, a gather on two levels is Bruck's."""
    two_levels = [each for each in _topologies() if 1 not in (each.local_size, each.num_nodes)]
    machines = [(rates, topology) for rates in RECORDED[device] for topology in two_levels]
    return _ranges(("bruck", "ring"), machines, _other)[0][1]


def _ranges(names: Sequence[str], machines: Sequence[Machine], price: Price) -> list[Range]:
    """Return which of the names to take up to how many bytes; of equal ones the first."""
    ranges: list[Range] = []
    for nbytes in _SIZES:
        worst, memory = dict.fromkeys(names, 0.0), dict.fromkeys(names, 0.0)
        for machine in machines:
            costs = {name: price(name, nbytes, *machine) for name in names}
            best = min(cost.seconds for cost in costs.values())
            for name, cost in costs.items():
                worst[name] = max(worst[name], cost.seconds / best)
                memory[name] = max(memory[name], cost.memory)
        alike = [name for name in names if worst[name] <= _ALIKE * min(worst.values())]
        before, smallest = ranges[-1][0] if ranges else "", min(names, key=memory.__getitem__)
        if nbytes > SMALL_BYTES and smallest in alike:
            chosen = smallest
        else:
            # The one before goes on, so that there are few ranges.
            chosen = before if before in alike else min(alike, key=worst.__getitem__)
        if chosen == before:
            ranges.pop()
        ranges.append((chosen, nbytes))
    return ranges


def _specification(ranges: Sequence[Range], unit: int) -> str:
    """Return the ranges as a specification whose limits count units of so many bytes."""
    *limited, (last, _) = ranges
    parts = [f"{name}:{_general_int(nbytes // unit)}:" for name, nbytes in limited]
    return "".join([*parts, last])


def _general_int(number: int) -> str:
    for power, suffix in ((30, "G"), (20, "M"), (10, "k")):
        if number % (1 << power) == 0:
            return f"{number >> power}{suffix}"
    return str(number)


def _all_reduce(op: str) -> Price:
    def price(name: str, nbytes: int, rates: LinkRates, topology: Topology) -> Cost:
        if name == "nccl":
            return library_cost(nbytes, rates, topology)
        # A sum costs the same in any order.
        return estimate(name, nbytes, rates, topology, "adasum" if op == "adasum" else "sum")

    return price


def _other(name: str, nbytes: int, rates: LinkRates, topology: Topology) -> Cost:
    return _profile(name, topology).cost(nbytes, rates)


@lru_cache(maxsize=256)
def _profile(name: str, topology: Topology) -> Profile:
    """Return the profile of a reduction to rank 0, or of a gather."""
    size = topology.size
    if name in ("tree", "line"):
        reduce = binomial_tree.reduce if name == "tree" else ring.reduce
        return walk(reduce(size, 0), topology)
    return walk((bruck if name == "bruck" else ring).all_gather(size), topology)


def _topologies() -> Iterator[Topology]:
    """Yield what the table is made for: few nodes, on whose links messages are slow."""
    for size in (2, 3, 4, 5, 6, 7, 8, 9, 12, 16):
        for local in sorted({1, 2, 3, 4, 8, size}):
            if size % local == 0 and size // local <= _MAX_NODES:
                yield Topology(size, local)
    # Powers of two beyond have a row to themselves.
    for size in (16, 32, 64):
        yield Topology(size, 1)


def _more_ranks() -> Iterator[Topology]:
    """Yield topologies whose trees are climbed in levels, as those of more ranks are.

    On one node, where so many are rare, they would decide for fewer, of which one level is faster.
    """
    for size in (24, 32, 48, 64):
        yield from (Topology(size, local) for local in (1, 8))
