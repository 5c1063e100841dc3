"""Count a thread's loads, stores, instructions and bytes in flight in a kernel's machine code.

The code is as nvdisasm prints it: one instruction a line, `/*0160*/ @!P1 BRA `(.L_x_0) ;`, and
labels on their own lines. NVIDIA's "CUDA Binary Utilities" guide lists the opcodes in its section
"Instruction Set Reference". All counts are per thread.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import NamedTuple

_LINE = re.compile(
    r"/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@(?P<predicate>!?U?P\w+)\s+)?(?P<opcode>[A-Z][\w.]*)"
    r"\s*(?P<operands>[^;]*?)\s*\}?\s*;"
)
_LABEL = re.compile(r"^(\.L_\w+):")
_TARGET = re.compile(r"\((\.L_\w+)\)")
_REGISTER = re.compile(r"\bR(\d+)\b")
_JUMPS = ("BRA", "CALL", "BRX", "JMP", "JMX", "EXIT", "RET", "KILL")
VECTOR_SIZES = frozenset({16, 32})


class Instruction(NamedTuple):
    """One instruction; its predicate is "" if it always runs.

    ptxas also jumps by CALL, to a label within the kernel that never returns.
    """

    predicate: str
    opcode: str
    operands: str

    @property
    def target(self) -> str:
        """The label that a branch goes to, or ""."""
        found = _TARGET.search(self.operands)
        return found.group(1) if found and self.opcode.startswith(("BRA", "CALL")) else ""

    @property
    def registers(self) -> list[int]:
        """Numbers of the registers in its operands."""
        return [int(number) for number in _REGISTER.findall(self.operands)]

    @property
    def access_bytes(self) -> int:
        """Bytes that a thread moves in a global load or store; 0 for other instructions."""
        name, *modifiers = self.opcode.split(".")
        if name not in ("LDG", "STG"):
            return 0
        sizes = [int(m.lstrip("SU")) for m in modifiers if re.fullmatch(r"[SU]?\d+", m)]
        return max(sizes) // 8 if sizes else 4

    @property
    def is_load(self) -> bool:
        """Whether it is a global load."""
        return self.opcode.startswith("LDG")

    @property
    def is_fp64(self) -> bool:
        """Arithmetic, comparison or conversion on the float64 units."""
        name = self.opcode.split(".")[0]
        return name in ("DADD", "DMUL", "DFMA", "DSETP", "DMNMX") or (
            name not in ("LDG", "STG", "ATOMG", "RED") and bool(re.search(r"F64|64H", self.opcode))
        )


class Block(NamedTuple):
    """A basic block: its instructions and the numbers of the blocks that may follow."""

    instructions: list[Instruction]
    successors: list[int]


class Path(NamedTuple):
    """One path from entry to exit, with each loop's body at most once.

    All fields are 0 if there is no such path. instructions: all on the path; moved: bytes of global
    accesses that have the path's widths; in_flight: the most bytes of such loads that are requested
    before the first of them is used; fp64: instructions on the float64 units; shared: accesses to
    shared memory; barriers: of the whole program.
    """

    instructions: int
    moved: int
    in_flight: int
    fp64: int
    shared: int
    barriers: int


NO_PATH = Path(0, 0, 0, 0, 0, 0)


def parse(text: str) -> list[Block]:
    """Return the basic blocks of nvdisasm's output for one kernel, in the order of addresses.

    Subroutines that the kernel calls are blocks without a predecessor. Raises ValueError if there
    is no instruction, or a branch to an unknown target.
    """
    blocks: list[Block] = []
    labels: dict[str, int] = {}
    current: list[Instruction] = []

    def close() -> None:
        nonlocal current
        if current:
            blocks.append(Block(current, []))
            current = []

    for line in text.splitlines():
        label = _LABEL.match(line.strip())
        if label:
            close()
            labels[label.group(1)] = len(blocks)
        found = _LINE.search(line)
        if found:
            fields = found.groupdict(default="")
            current.append(Instruction(fields["predicate"], fields["opcode"], fields["operands"]))
            if fields["opcode"].startswith(_JUMPS):
                close()
    close()
    if not blocks:
        raise ValueError("no instruction found: pass the output of `nvdisasm -c` for a cubin")
    for i, block in enumerate(blocks):
        last = block.instructions[-1]
        if last.target:
            block.successors.append(labels[last.target])
        elif last.opcode.startswith(("BRX", "JMP", "JMX", "BRA")):
            raise ValueError(f"{last.opcode} {last.operands}: only direct branches are known")
        conditional = last.predicate or (last.target and not last.operands.startswith("`("))
        if (
            conditional or last.opcode.startswith("CALL") or not last.opcode.startswith(_JUMPS)
        ) and i + 1 < len(blocks):
            block.successors.append(i + 1)
    return blocks


def _search(successors: list[set[int]]) -> tuple[list[int], list[tuple[int, int]]]:
    """Return the blocks that the entry reaches, sorted topologically, and the loops' last edges."""
    order: list[int] = []
    back: list[tuple[int, int]] = []
    on_stack: set[int] = {0}
    done: set[int] = set()
    stack = [(0, iter(sorted(successors[0])))]
    while stack:
        node, rest = stack[-1]
        for follower in rest:
            if follower in on_stack:
                back.append((node, follower))
            elif follower not in done:
                on_stack.add(follower)
                stack.append((follower, iter(sorted(successors[follower]))))
                break
        else:
            stack.pop()
            on_stack.discard(node)
            done.add(node)
            order.append(node)
    return order[::-1], back


def _acyclic(blocks: list[Block]) -> tuple[list[int], list[set[int]]]:
    """Return the topological order, and successors in which each loop's end leaves the loop."""
    successors = [set(block.successors) for block in blocks]
    _, back = _search(successors)
    result = [set(followers) for followers in successors]
    for last, head in back:
        loop, found = {head, last}, [last]
        while found:
            node = found.pop()
            before = {i for i, followers in enumerate(successors) if node in followers} - loop
            if node != head:
                loop |= before
                found += before
        outside = successors[head] - loop
        for node in loop if not outside else ():
            outside |= successors[node] - loop
        result[last] = (result[last] - {head}) | outside
    order, left = _search(result)
    if left:
        raise ValueError(f"the loops of blocks {left} are entangled: no order of blocks is known")
    return order, result


def _in_flight(instructions: list[Instruction], sizes: Set[int]) -> int:
    """Return the most bytes of loads of these sizes requested before the first of them is used.

    Loads are assumed to return in order: using one waits for all before it. A register counts as
    used when it is named again, as source or destination.
    """
    waiting: list[tuple[set[int], int]] = []
    most = 0
    for instruction in instructions:
        named = set(instruction.registers)
        size = instruction.access_bytes
        loads = instruction.is_load and size in sizes
        if loads:
            first, *addresses = instruction.registers
            named = set(addresses)
        used = [k for k, (registers, _) in enumerate(waiting) if registers & named]
        if used:
            del waiting[: used[-1] + 1]
        if loads:
            waiting.append((set(range(first, first + max(1, size // 4))), size))
            most = max(most, sum(held for _, held in waiting))
    return most


def _best(blocks: list[Block], counted: Set[int], barred: Set[int]) -> list[Instruction]:
    """Return the path that moves most bytes in accesses of `counted` bytes; the shortest if equal.

    It enters no block of `barred`; it is empty if every path enters one.
    """
    order, successors = _acyclic(blocks)
    best: dict[int, tuple[int, int]] = {}
    following: dict[int, int] = {}
    for i in reversed(order):
        if i in barred:
            continue
        instructions = blocks[i].instructions
        ways = [(best[j], j) for j in successors[i] if j in best]
        (moved, length), follower = max(ways, default=((0, 0), -1))
        ends = instructions[-1].opcode.startswith("EXIT")
        if not ways and not ends:
            continue
        if ends and (moved, length) <= (0, 0):
            moved, length, follower = 0, 0, -1
        here = sum(x.access_bytes for x in instructions if x.access_bytes in counted)
        best[i] = (moved + here, length - len(instructions))
        following[i] = follower
    taken: list[Instruction] = []
    node = 0 if 0 in best else -1
    while node >= 0:
        taken += blocks[node].instructions
        node = following[node]
    return taken


def _summary(taken: list[Instruction], counted: Set[int], loads: Set[int]) -> Path:
    sizes = [x.access_bytes for x in taken if x.access_bytes in counted]
    return Path(
        instructions=len(taken) if sizes else 0,
        moved=sum(sizes),
        in_flight=_in_flight(taken, loads),
        fp64=sum(x.is_fp64 for x in taken) if sizes else 0,
        shared=sum(x.opcode.startswith(("LDS", "STS")) for x in taken) if sizes else 0,
        barriers=sum(x.opcode.startswith("BAR.SYNC") for x in taken) if sizes else 0,
    )


def vector_path(blocks: list[Block]) -> Path:
    """Return the path of tiles that are read and written in 16-byte accesses."""
    return _summary(_best(blocks, VECTOR_SIZES, frozenset()), VECTOR_SIZES, VECTOR_SIZES)


def scalar_path(blocks: list[Block], itemsizes: Set[int]) -> Path:
    """Return the path of tiles that are read by element; `itemsizes` are in bytes.

    They are written by element or in 16-byte accesses. Other accesses of an element's size, such
    as reads of tables, count as well.
    """
    counted = itemsizes | VECTOR_SIZES
    vectors = {
        i
        for i, block in enumerate(blocks)
        if any(x.is_load and x.access_bytes in VECTOR_SIZES for x in block.instructions)
    }
    return _summary(_best(blocks, counted, vectors), counted, itemsizes)
