"""Parse the PTX text of a kernel into instructions."""

from __future__ import annotations

import re
from typing import NamedTuple

_STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([\w.:]+)\s*(.*)", re.DOTALL)
_OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")
_REGISTER = re.compile(r"%(p|rs|r|rd)(\d+)$")
# Other threads may run after these: they wait, or others wait for them.
_SYNCHRONISES = re.compile(
    r"bra|ret|bar\.|atom\.|red\..*(add|release)|ld\.(.*\.)?(acquire|relaxed)\.|st\.release\."
)


class Register(NamedTuple):
    """A register of bank "p", "rs", "r" or "rd": predicates, 16, 32 and 64 bits."""

    bank: str
    number: int


class Immediate(NamedTuple):
    """The bits of a literal, as an unsigned or negative integer."""

    bits: int


class Name(NamedTuple):
    """A special register, a label or a symbol."""

    text: str


class Address(NamedTuple):
    """An address in memory: a register or symbol, and an offset in bytes."""

    base: Operand
    offset: int


class Vector(NamedTuple):
    """Registers that one instruction moves together."""

    parts: tuple[Operand, ...]


Operand = Register | Immediate | Name | Address | Vector


class Instruction(NamedTuple):
    """One instruction.

    Attributes:
        text: The instruction as the compiler wrote it.
        guard: The predicate under which it is executed and the value that lets it, if any.
        opcode: Name, modifiers and type: "ld.global.v4.b32".
        operands: The target first, where there is one.
    """

    text: str
    guard: tuple[Register, bool] | None
    opcode: str
    operands: tuple[Operand, ...]


class Program(NamedTuple):
    """A kernel.

    Attributes:
        name: The kernel's name.
        threads: Threads of a block.
        parameters: Names of the parameters.
        registers: How many registers each bank has.
        basic_blocks: Instructions that are entered at the first and left at the last only.
        labels: The basic block that each label stands before.
    """

    name: str
    threads: int
    parameters: tuple[str, ...]
    registers: dict[str, int]
    basic_blocks: tuple[tuple[Instruction, ...], ...]
    labels: dict[str, int]


def _literal(text: str) -> Immediate | None:
    if match := re.fullmatch(r"0[fFdD]([0-9A-Fa-f]+)", text):
        return Immediate(int(match[1], 16))
    if re.fullmatch(r"-?(0x[0-9A-Fa-f]+|\d+)U?", text):
        return Immediate(int(text.rstrip("U"), 0))
    return None


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return Vector(tuple(_operand(part) for part in _OPERAND.findall(text[1:-1])))
    if text.startswith("["):
        base, _, offset = re.sub(r"\s", "", text[1:-1]).partition("+")
        return Address(_operand(base), int(offset or "0", 0))
    if match := _REGISTER.match(text):
        return Register(match[1], int(match[2]))
    return _literal(text) or Name(text)


def _instruction(text: str) -> Instruction:
    match = _STATEMENT.fullmatch(text)
    if match is None:
        raise ValueError(f"cannot read {text!r}")
    guard = None
    if match[2]:
        register = _operand(match[2])
        assert isinstance(register, Register)
        guard = register, match[1] != "!"
    operands = tuple(_operand(part) for part in _OPERAND.findall(match[4]))
    return Instruction(text, guard, match[3], operands)


def parse(text: str) -> Program:
    """Return the one kernel of a module.

    Raises:
        ValueError: The text is no PTX as Triton writes it.
    """
    text = re.sub(r"//[^\n]*", "", text)
    head = re.search(r"\.visible\s+\.entry\s+(\w+)\(([^)]*)\)([^{]*)\{", text)
    if head is None:
        raise ValueError("no kernel in this module: .visible .entry is missing")
    body = text[head.end() : text.index("\n}", head.end())]
    threads = re.search(r"\.reqntid\s+(\d+)", head[3])
    if threads is None:
        raise ValueError(f"{head[1]} does not say how many threads it takes: .reqntid is missing")
    parameters = tuple(re.findall(r"\.param\s+\.u\d+[^,]*?(\w+)\s*(?:,|$)", head[2].strip()))
    registers = {
        kind: int(count) for kind, count in re.findall(r"\.reg\s+\.\w+\s+%(\w+)<(\d+)>", body)
    }
    blocks: list[list[Instruction]] = [[]]
    labels: dict[str, int] = {}
    for line in map(str.strip, body.splitlines()):
        if match := re.match(r"(\$L__BB\w+):", line):
            if blocks[-1]:
                blocks.append([])
            labels[match[1]] = len(blocks) - 1
        elif line.endswith(";") and not line.startswith("."):
            instruction = _instruction(line[:-1].rstrip())
            blocks[-1].append(instruction)
            if _SYNCHRONISES.match(instruction.opcode):
                blocks.append([])
        elif not re.fullmatch(r"[{}]?|\..*|[\w$]+:", line):
            raise ValueError(f"cannot read {line!r}")
    return Program(
        head[1], int(threads[1]), parameters, registers, tuple(map(tuple, blocks)), labels
    )
