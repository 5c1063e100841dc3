"""Write bench/results/compiled.md from the records in compiled.json."""

from __future__ import annotations

from bench.static_analysis.cases import Case
from bench.static_analysis.compiled import Record
from bench.static_analysis.occupancy import ARCHITECTURES, LATENCY_NS, residency
from bench.static_analysis.sass import Path

WIDTHS = ("16", "8", "4", "2", "1")
_A_PATH = ("in flight KiB", "of need", "instr. a byte", "of issue", "barriers")
_HEAD = (
    *("dtype", "variant", "sm", "registers", "warps", "shared", "spills", "instructions"),
    *("loads 16/8/4/2/1 B", "stores 16/8/4/2/1 B", "atomics", "fp64", "programs an SM (limit)"),
    *_A_PATH,
    *(f"scalar: {_A_PATH[0]}", *_A_PATH[1:]),
)


def _introduction(version: str) -> str:
    parts = "".join(
        f"| sm_{capability} | {part.part} | {part.sms} | {part.gigabytes_per_second:.0f} "
        f"| {part.gigahertz} | {part.bytes_needed / 1024:.1f} "
        f"| {part.instructions_per_byte:.1f} |\n"
        for capability, part in ARCHITECTURES.items()
    )
    return f"""# What the compiler makes of the kernels

Written by `make bench-compiled` with Triton {version}: compiled and disassembled, **never run**.
No figure here is a time.

- **registers, shared, spills:** registers a thread, bytes of shared memory a program, bytes of
  stack and local memory.
- **instructions:** all of the kernel's machine code; **fp64:** those on the float64 units;
  **loads, stores:** global accesses by bytes a thread.
- **programs an SM:** resident at once, and what limits them (`bench/static_analysis/occupancy.py`).
- **in flight:** the most bytes a thread has requested before it uses the first of them, read off
  the machine code on the path of aligned tiles, times all resident threads. An upper bound:
  programs are not all at that point at once.
- **of need:** that over bandwidth times latency over SMs, Little's law as if memory only read.
  Bold below 1: not enough to hide the latency; of a copy only half is reads, so half will do.
- **instr. a byte:** instructions on that path over the bytes it moves, every loop's body once;
  **of issue:** over what the SM issues while memory moves a byte. Bold above 50%. **barriers:**
  times that path waits for the whole program, to reduce or to change a layout.
- **scalar:** the same for the path of elementwise accesses, taken by misaligned tensors and odd
  tails; for float64 it counts reads of tables as well. "-": no such path.

**Assumptions, not measurements:** a latency of {LATENCY_NS:.0f} ns with memory near its limit, and

| sm | part | SMs | GB/s | GHz | need: KiB in flight an SM | instructions issued a byte |
|---|---|---:|---:|---:|---:|---:|
{parts}"""


def _path(record: Record, path: Path, capability: int, programs: int) -> list[str]:
    if path.moved == 0:
        return ["-"] * 5
    part = ARCHITECTURES[capability]
    held = programs * record.warps * 32 * path.in_flight
    a_byte = path.instructions / path.moved
    need, issue = held / part.bytes_needed, a_byte / part.instructions_per_byte
    return [
        f"{held / 1024:.0f}",
        f"**{need:.2f}**" if need < 1 else f"{need:.2f}",
        f"{a_byte:.2f}",
        f"**{issue:.0%}**" if issue > 0.5 else f"{issue:.0%}",
        str(path.barriers),
    ]


def _row(case: Case, record: Record) -> list[str]:
    programs, limit = residency(case.capability, record.registers, record.warps, record.shared)
    spilled = record.stack + record.local
    return [
        case.dtype,
        case.variant,
        str(case.capability),
        str(record.registers),
        str(record.warps),
        str(record.shared),
        f"**{spilled}**" if spilled else "0",
        str(record.instructions),
        "/".join(str(record.loads.get(width, 0)) for width in WIDTHS),
        "/".join(str(record.stores.get(width, 0)) for width in WIDTHS),
        str(len(record.atomics)),
        str(record.fp64),
        f"{programs} ({limit})",
        *_path(record, record.vector, case.capability, programs),
        *_path(record, record.scalar, case.capability, programs),
    ]


def render(version: str, records: dict[str, Record]) -> str:
    """Return the whole file, with a table for each kernel."""
    tables: dict[str, list[str]] = {}
    for name, record in records.items():
        case = Case.parse(name)
        row = "| " + " | ".join(_row(case, record)) + " |"
        tables.setdefault(case.kernel, []).append(row)
    text = _introduction(version)
    for kernel, rows in tables.items():
        head = "| " + " | ".join(_HEAD) + " |"
        text += "\n".join(["", f"## {kernel}", "", head, "|" + "---|" * len(_HEAD), *rows, ""])
    return text
