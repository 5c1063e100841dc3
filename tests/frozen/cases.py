"""The cases of the table: a seeded sample of everything that a collective can be called with."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from typing import Any

# Weights by repetition: a deck hands out every entry equally often.
KINDS = (
    *("all_reduce",) * 12,
    *("grouped_all_reduce", "reduce_scatter", "all_reduce_init") * 2,
    *("all_gather", "all_to_all", "broadcast", "reduce", "reduce_to_owners"),
    *("broadcast_from_owners", "all_gather_bytes", "run", "grouped_all_reduce_init"),
    *("reduce_scatter_init", "broadcast_init", "reduce_to_owners_init", "run_init"),
)
OPS = (
    *("Sum", "Average", "Adasum") * 3,
    *("Adasum(weighted=False)", "Max", "Min", "Product"),
)
ALGORITHMS = (
    *("xring", "rechd", "vhdd", "rd", "bruck", "psgpu", "pscpu") * 3,
    *("auto", "-", "collective", "nccl"),
    *("xring#2", "xring#3", "rechd#2", "rd#3", "bruck#2", "vhdd#2"),
    *("psgpu#2", "psgpu#4", "pscpu#3", "collective#2"),
    *("rechd/vhdd", "xring/rd", "rechd#2/xring", "psgpu/rechd", "pscpu/vhdd", "rechd/rd") * 2,
    *("collective/vhdd", "xring#2/psgpu#2", "psgpu/pscpu", "xring/xring"),
    *("rd:16k:rechd", "rd:100:vhdd", "pscpu:2k:pscpu#2:64k:xring", "rd:8:rechd/vhdd"),
)
DTYPES = (
    *("float32", "float16", "bfloat16", "float64") * 4,
    *("int32", "int64", "uint8", "int8", "int16", "bool"),
    *("complex64", "complex128", "complex32"),
)
# The last ones are beyond 2 MiB of float32.
NUMELS = (
    *(0, 1, 2, 3, 5, 7, 8, 31, 64, 100, 257, 1023) * 2,
    *(4099, 16384, 20001, 70001, 70001, 600_011),
)
# Ranks of one host as threads of one process. Over gloo they are processes: see worlds.py.
TRANSPORTS = ("threads", "shm", "messages")
GLOO_SIZES = (2, 3)
SIZES = (1, 2, 2, 3, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9)
VALUES = ("plain", "plain", "plain", "plain", "special", "zero")
OPTIONS = ("-", "-", "scaled", "segments", "async", "other")


@dataclass(frozen=True)
class Case:
    """One call on all ranks.

    Attributes:
        kind: The Group's method; or "error", and `option` says which of errors.py.
        op: The operator's name.
        algorithm: The specification; "-" to give none.
        dtype: Of torch.
        numel: About how many elements there are in all.
        values: "plain", "special" with NaN and infinities among them, "zero" on rank 0.
        option: What else is given: see calls.py.
        transport: One of TRANSPORTS, or "gloo".
        size: Number of ranks.
        local_size: Of these on a node.
    """

    kind: str
    op: str
    algorithm: str
    dtype: str
    numel: int
    values: str
    option: str
    transport: str
    size: int
    local_size: int

    def __str__(self) -> str:
        if self.kind == "error":
            return f"error {self.option} {self.transport} {self.size}"
        return " ".join(str(each) for each in astuple(self))

    @classmethod
    def error(cls, name: str, transport: str, size: int) -> Case:
        """A call of errors.py."""
        return cls("error", "-", "-", "-", 0, "-", name, transport, size, size)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case whose string this is: a table says by itself what it holds."""
        fields = text.split(" ")
        if fields[0] == "error":
            return cls.error(fields[1], fields[2], int(fields[3]))
        kind, op, algorithm, dtype, numel, given, option, transport, size, local = fields
        where = (transport, int(size), int(local))
        return cls(kind, op, algorithm, dtype, int(numel), given, option, *where)

    @property
    def world(self) -> tuple[str, int, int]:
        """What the ranks of several cases can share."""
        return self.transport, self.size, self.local_size

    @property
    def takes_dot_products(self) -> bool:
        """Whether compiled C and torch's functions may give other bits."""
        return self.op.startswith("Adasum") and self.kind != "error"


def _deck(rng: random.Random, cards: Sequence[Any]) -> Iterator[Any]:
    """The cards in random order, again and again: a small sample has every value of every field."""
    while True:
        yield from rng.sample(list(cards), len(cards))


def _local_size(rng: random.Random, size: int, algorithm: str) -> int:
    """Nodes of equal size, most often several where the algorithm has two levels."""
    parts = [local for local in range(1, size) if size % local == 0]
    if not parts or rng.random() < (0.15 if "/" in algorithm else 0.6):
        return size
    return rng.choice(parts)


def draw(seed: int, count: int) -> list[Case]:
    """`count` different cases, the same ones for the same seed."""
    rng = random.Random(seed)
    fields = (KINDS, OPS, ALGORITHMS, DTYPES, NUMELS, VALUES, OPTIONS, TRANSPORTS, SIZES)
    decks = [_deck(rng, each) for each in fields]
    found: dict[Case, None] = {}
    while len(found) < count:
        kind, op, algorithm, dtype, numel, given, option, transport, size = map(next, decks)
        if rng.random() < 0.03 and algorithm != "auto":
            # What auto takes over gloo may follow from link rates that init has measured.
            transport, size = "gloo", rng.choice(GLOO_SIZES)
        local = size if transport == "gloo" else _local_size(rng, size, algorithm)
        if "all_reduce" not in kind:
            algorithm = "-"
        if kind.startswith(("all_gather", "all_to_all", "broadcast")):
            op = "-"
        if (op, algorithm, transport) != (op, "-", "gloo") or "all_reduce" not in kind:
            case = Case(kind, op, algorithm, dtype, numel, given, option, transport, size, local)
            found[case] = None
    return list(found)
