"""Machine code of the kernels: vector accesses, spills, atomics, registers. No GPU is needed.

bench/static_analysis compiles the kernels and reads the code; registers and instructions are held
against bench/results/compiled.json, the record of its last run.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import re
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

triton = pytest.importorskip("triton")

import kernels  # noqa: E402
from bench.static_analysis import compiled, sass, table  # noqa: E402
from bench.static_analysis.cases import ITEMSIZES, KERNELS, Case, cases  # noqa: E402
from kernels.gpu import launcher  # noqa: E402
from tests.ptx_emulator.parse import parse  # noqa: E402

REGENERATE = "Where the change is meant: `make bench-compiled`, and commit bench/results/compiled.*"
slow = pytest.mark.slow
# ptxas changes its mind about a few registers and instructions at the slightest change of source.
SLACK = 1.1
# float16 needs most registers. `make bench-compiled` holds all cases against the absolute rules.
FAST = [
    case
    for case in cases()
    if (case.dtype, case.capability) == (KERNELS[case.kernel].dtypes[0], 90)
    and (case.variant == "plain" or (case.kernel, case.variant) == ("sum_n", "checked"))
    # Of those with other numbers of tensors one each.
    and not (case.kernel[-1].isdigit() and case.kernel not in ("gram8", "coefficients8"))
]
TESTED = [
    pytest.param(case, marks=() if case in FAST else slow)
    for case in cases()
    if case.dtype == "fp16" or (case.capability == 90 and case.variant == "plain")
]


@pytest.fixture(scope="module")
def recorded() -> tuple[str, dict[str, compiled.Record]]:
    """Triton's version and the records that were committed."""
    return compiled.from_json((compiled.RESULTS / "compiled.json").read_text())


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest) -> Iterator[Callable[[Case], compiled.Record]]:
    """The record of a case. All that the selected tests will ask for are compiled side by side."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    params = [call.params.get("case") for call in calls if call]
    wanted = dict.fromkeys(case for case in params if isinstance(case, Case))
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = {case: pool.submit(compiled.measure, case) for case in wanted}
        yield lambda case: results[case].result()
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("case", TESTED, ids=str)
def test_kernel_compiled_has_vector_accesses_and_neither_spills_nor_float_atomics(case, measured):
    record = measured(case)
    assert compiled.faults_of(case, record) == []
    assert record.registers > 0
    counts = not {"arrivals", "pads"}.isdisjoint(KERNELS[case.kernel].function.arg_names)
    assert bool(record.atomics) == counts
    path = record.vector if case.aligned else record.scalar
    assert path.moved > 0 and path.in_flight > 0


@pytest.mark.parametrize("case", TESTED, ids=str)
def test_kernel_compiled_needs_no_more_registers_than_recorded(case, measured, recorded):
    version, records = recorded
    if version != triton.__version__:
        pytest.skip(f"recorded with Triton {version}, this is {triton.__version__}")
    assert str(case) in records, f"{case} is not in bench/results/compiled.json. {REGENERATE}"
    now, then = measured(case), records[str(case)]
    grown = {
        name: f"{new} now, {old} recorded"
        for name, new, old in (
            ("registers", now.registers, then.registers),
            ("instructions", now.instructions, then.instructions),
            ("instructions of an aligned tile", now.vector.instructions, then.vector.instructions),
            ("instructions of a scalar tile", now.scalar.instructions, then.scalar.instructions),
            ("float64 instructions", now.fp64, then.fp64),
            ("barriers of an aligned tile", now.vector.barriers, then.vector.barriers),
        )
        if new > SLACK * old
    }
    held, before = now.vector.in_flight, then.vector.in_flight
    if SLACK * held < before:
        grown["bytes in flight a thread"] = f"{held} now, {before} recorded"
    assert not grown, f"{case}: {grown}. {REGENERATE}"


@pytest.mark.parametrize(
    "kernel", ["two_shot", "one_shot", pytest.param("node_adasum8", marks=slow)]
)
def test_waits_of_a_node_take_one_answer_for_all_threads_from_shared_memory(kernel):
    """Otherwise a warp that has seen a signal would leave the loop, and the others' barriers."""
    program = parse(compiled.compile_case(Case(kernel, "plain", "fp16", 90)).asm["ptx"])
    opcodes = [one.opcode for block in program.basic_blocks for one in block]
    loads = [k for k, opcode in enumerate(opcodes) if opcode.startswith("ld.acquire.sys.")]
    assert len(loads) >= 2
    for k in loads:
        branch = next(i for i in range(k, len(opcodes)) if opcodes[i].startswith("bra"))
        said = " ".join(opcodes[k:branch])
        assert re.search(r"st\.shared.* bar\.sync .*ld\.shared", said), said


@pytest.mark.parametrize(
    ("dtype", "capability"),
    [
        pytest.param(dtype, capability, marks=() if dtype == "fp16" else pytest.mark.slow)
        for dtype in ITEMSIZES
        for capability in (90, 100)
    ],
)
def test_dependent_combine_waits_for_the_launch_ahead_on_every_path(dtype, capability, tmp_path):
    """Under no condition, before any access: in PTX, and in what ptxas makes of it."""
    plain, dependent = (
        compiled.compile_case(Case("combine", variant, dtype, capability))
        for variant in ("plain", "dependent")
    )
    assert "griddepcontrol" not in plain.asm["ptx"]
    first = parse(dependent.asm["ptx"]).basic_blocks[0]
    (wait,) = (k for k, each in enumerate(first) if each.opcode == "griddepcontrol.wait")
    assert first[wait].guard is None
    assert not any(".global" in each.opcode for each in first[:wait])
    file = tmp_path / "kernel.cubin"
    file.write_bytes(dependent.asm["cubin"])
    entry = sass.parse(compiled._tool("nvdisasm", "-c", str(file)))[0].instructions
    (wait,) = (k for k, each in enumerate(entry) if each.opcode == "ACQBULK")
    assert not any(each.access_bytes for each in entry[:wait])


@pytest.mark.parametrize("capability", [90, *[pytest.param(c, marks=slow) for c in (80, 100)]])
def test_double_double_has_no_product_that_could_be_fused_with_a_sum(capability):
    """ptxas fuses what is `mul` and `add` in PTX, and changes no order of sums."""
    case = Case("precise_gram", "plain", "fp64", capability)
    blocks = parse(compiled.compile_case(case).asm["ptx"]).basic_blocks
    opcodes = Counter(one.opcode for block in blocks for one in block)
    # Of four elements a thread the product, and what it loses. Of the matrix's one entry what is
    # taken off the diagonal, and the elimination.
    assert opcodes["fma.rn.f64"] == 4 * 2 + 2 and opcodes["sub.f64"] > 0
    assert not any(name.startswith("mul") and name.endswith("f64") for name in opcodes)


def test_table_committed_is_made_from_the_committed_records(recorded):
    version, records = recorded
    assert list(records) == [str(case) for case in cases()], REGENERATE
    committed = (compiled.RESULTS / "compiled.md").read_text()
    assert committed == table.render(version, records), REGENERATE


def test_table_lists_every_kernel_of_the_package():
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(kernels.__path__, "kernels.")
        # The compiled C is a library, and no module.
        if not module.name.endswith(".libnative")
    ]
    found = {
        value.function
        for module in modules
        for value in vars(module).values()
        if isinstance(value, launcher.Kernel)
    }
    assert found == {kernel.function for kernel in KERNELS.values()}
