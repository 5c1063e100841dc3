"""Compile every kernel without a GPU and read its machine code: `make bench-compiled`.

Each kernel is compiled as its launcher compiles it, for every dtype and architecture. The results
are bench/results/compiled.json and compiled.md, which is made only from the former.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.static_analysis import sass
from bench.static_analysis.cases import DTYPES, ITEMSIZES, KERNELS, Case, values_of
from kernels.gpu import launcher

RESULTS = Path(__file__).parents[1] / "results"
_NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
# For each pointer argument, the constexpr that names its dtype, or the dtype itself.
_POINTERS = {"a": "A", "b": "B", "x": "DTYPE", "out": "OUT", "buffer": "BUFFER"}
_POINTERS |= dict.fromkeys(("table", "addresses", "arrivals", "tree"), "i64")
_POINTERS |= dict.fromkeys(("targets", "pads", "state", "sources", "held"), "i64")
_POINTERS["copies"] = "u8"
_POINTERS |= dict.fromkeys(("partials", "dots", "matrices", "coefficients", "spread"), "fp64")


@dataclass
class Record:
    """The figures of one compilation.

    registers: per thread; warps: per program; shared: bytes of shared memory per program; stack,
    local: bytes of spilled registers on the stack and in local memory; spills: instructions that
    access them; instructions: all except padding; loads, stores: counts of global accesses, by
    bytes per thread; atomics: opcodes; fp64: instructions on the float64 units; vector: the path of
    aligned tiles; scalar: the path of all other tiles, which are moved by element.
    """

    registers: int
    warps: int
    shared: int
    stack: int
    local: int
    spills: int
    instructions: int
    loads: dict[str, int]
    stores: dict[str, int]
    atomics: list[str]
    fp64: int
    vector: sass.Path
    scalar: sass.Path


def compile_case(case: Case, amd: str | None = None) -> Any:
    """Compile as the launcher does; raise ValueError for an argument without a rule above.

    amd: an AMD architecture with warps of 64, to compile for instead of the case's.
    """
    values, warps = values_of(case)
    kernel = KERNELS[case.kernel]
    function = kernel.function
    signature: dict[str, Any] = {}
    constexprs: dict[tuple[int, ...], Any] = {}
    for i, (name, parameter) in enumerate(zip(function.arg_names, function.params, strict=True)):
        if name == "found_inf" and values[name] is not None:
            signature[name] = f"*{values[name]}"
        elif name in values:
            signature[name] = "constexpr"
            value = values[name]
            constexprs[(i,)] = getattr(launcher.tl, _NAMES[value]) if value in _NAMES else value
        elif parameter.annotation_type:
            signature[name] = parameter.annotation_type
        elif name in _POINTERS:
            kind = _POINTERS[name]
            signature[name] = f"*{values.get(kind, kind)}"
        else:
            raise ValueError(
                f"{function.__name__} has an argument {name!r} that {__name__} does not "
                "know: annotate it, or add it to _POINTERS or the kernel's values"
            )
    own = kernel.options(case.capability) if callable(kernel.options) else kernel.options
    options = {**launcher.OPTIONS, **own, "num_warps": warps}
    if amd is not None:
        options["num_warps"] = max(1, warps // 2)
    return compile_source(function, signature, constexprs, amd or case.capability, options)


def compile_source(
    function: Any,
    signature: Mapping[str, Any],
    constexprs: Mapping[tuple[int, ...], Any],
    architecture: int | str,
    options: Mapping[str, Any],
) -> Any:
    """Return Triton's compiled kernel; raise RuntimeError if this process interprets kernels.

    architecture: a number for NVIDIA, a name for AMD.
    """
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("an interpreted kernel is not compiled: unset TRITON_INTERPRET")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(function, dict(signature), dict(constexprs))
    nvidia = isinstance(architecture, int)
    target = GPUTarget("cuda" if nvidia else "hip", architecture, 32 if nvidia else 64)
    return launcher.triton.compile(source, target=target, options=dict(options))


def _tool(name: str, *arguments: str) -> str:
    from triton.backends import nvidia

    tool = Path(nvidia.__file__).parent / "bin" / name
    if not tool.exists():
        raise FileNotFoundError(f"this Triton brings no {name}: install one with NVIDIA's backend")
    return subprocess.run(
        [str(tool), *arguments], capture_output=True, text=True, check=True
    ).stdout


def read(compiled: Any, itemsizes: set[int]) -> Record:
    """Return the record of a kernel that Triton compiled.

    itemsizes: sizes in bytes of the elements that it may move one by one; empty if it moves only
    whole vectors.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(compiled.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", str(file))
        blocks = sass.parse(_tool("nvdisasm", "-c", str(file)))
    used = {key: int(value) for key, value in re.findall(r"\b([A-Z]+):(\d+)", usage)}
    every = [x for block in blocks for x in block.instructions if x.opcode != "NOP"]
    loads = Counter(str(x.access_bytes) for x in every if x.access_bytes and x.is_load)
    stores = Counter(str(x.access_bytes) for x in every if x.access_bytes and not x.is_load)
    return Record(
        registers=used["REG"],
        warps=compiled.metadata.num_warps,
        shared=compiled.metadata.shared,
        stack=used["STACK"],
        local=used["LOCAL"],
        spills=sum(x.opcode.startswith(("LDL", "STL")) for x in every),
        instructions=len(every),
        loads=dict(sorted(loads.items())),
        stores=dict(sorted(stores.items())),
        atomics=sorted(x.opcode for x in every if re.match(r"(ATOM|RED)[GS]?\.", x.opcode)),
        fp64=sum(x.is_fp64 for x in every),
        vector=sass.vector_path(blocks),
        scalar=sass.scalar_path(blocks, itemsizes) if itemsizes else sass.NO_PATH,
    )


def measure(case: Case) -> Record:
    """Compile one case and return its record; raise RuntimeError if it does not compile."""
    from triton.compiler.errors import CompilationError

    values, _ = values_of(case)
    itemsizes = {ITEMSIZES[values[name]] for name in DTYPES}
    try:
        return read(compile_case(case), set() if values.get("VECTORS") else itemsizes)
    except CompilationError as error:
        raise RuntimeError(f"{case} does not compile: {error}") from error


def measure_all(chosen: Sequence[Case]) -> dict[str, Record]:
    """Return the records by the cases' names; the compiler's programs run side by side."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(map(str, chosen), pool.map(measure, chosen), strict=True))


def faults(record: Record, vectors: tuple[str, ...]) -> list[str]:
    """Return the record's faults as texts; `vectors`: which of loads, stores must be 16 B."""
    found = []
    if record.stack or record.local or record.spills:
        found.append(f"spills: {record.stack} + {record.local} bytes, {record.spills} accesses")
    # A loop of compare-and-swap is a float atomic in disguise.
    disguised = [x for x in record.atomics if re.search(r"F16|F32|F64|CAS", x)]
    if disguised:
        found.append(f"float atomics: {', '.join(disguised)}")
    for kind in vectors:
        widths = getattr(record, kind)
        if not any(int(width) in sass.VECTOR_SIZES for width in widths):
            found.append(f"no 128-bit {kind}, only (bytes: how many) {widths}")
    return found


def faults_of(case: Case, record: Record) -> list[str]:
    """Return the faults of a case's record."""
    required = ("loads", "stores") if KERNELS[case.kernel].stores else ("loads",)
    return faults(record, required if case.aligned else ())


def to_json(records: dict[str, Record]) -> str:
    """Return the records as JSON, with the version of Triton that made them."""
    plain = {
        name: asdict(record)
        | {"vector": record.vector._asdict(), "scalar": record.scalar._asdict()}
        for name, record in records.items()
    }
    # One case per line, so that a diff of two versions is readable.
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(plain[name])}" for name in plain)
    version = json.dumps(launcher.triton.__version__)
    return f'{{"triton": {version}, "cases": {{\n{lines}\n}}}}\n'


def from_json(text: str) -> tuple[str, dict[str, Record]]:
    """Return Triton's version and the records by the cases' names."""
    data = json.loads(text)
    records = {}
    for name, fields in data["cases"].items():
        paths = {key: sass.Path(**fields[key]) for key in ("vector", "scalar")}
        records[name] = Record(**(fields | paths))
    return data["triton"], records
