"""The cases of the table: a sample of everything that a collective can be called with.

A new one is its string in table.json, with any outcome: `python -m tests.frozen --update` fills it.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

# Ranks of one host as threads of one process. Over gloo they are processes: see worlds.py.
TRANSPORTS = ("threads", "shm", "messages")


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
