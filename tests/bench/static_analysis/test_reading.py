"""The reading of machine code: faults, paths, and what a multiprocessor holds."""

from __future__ import annotations

import pytest

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

from bench.static_analysis import compiled, sass  # noqa: E402
from bench.static_analysis.occupancy import residency  # noqa: E402


@triton.jit
def _careless_kernel(a, out, element_count, BLOCK: tl.constexpr):
    """Break vectors up by a mask, hold more than registers do, and sum in no fixed order."""
    i = tl.arange(0, BLOCK)
    a = tl.multiple_of(a, 16)
    x = tl.load(a + i, mask=i < element_count, other=0.0)
    tl.atomic_add(out, tl.sum(x, axis=0))
    tl.debug_barrier()
    tl.store(a + i, x * tl.load(out), mask=i < element_count)


def test_faults_of_a_careless_kernel_are_all_found():
    compilation = compiled.compile_source(
        _careless_kernel,
        {"a": "*fp32", "out": "*fp32", "element_count": "i32", "BLOCK": "constexpr"},
        {(3,): 1 << 15},
        90,
        {"num_warps": 4},
    )
    found = compiled.faults(compiled.read(compilation, {4}), ("loads", "stores"))
    assert [fault.split(":")[0].split(",")[0] for fault in found] == [
        "spills",
        "float atomics",
        "no 128-bit loads",
        "no 128-bit stores",
    ]


# Two tiles' worth of 16 bytes; the loop asks for 32 bytes before it uses any, then for 16. The
# scalar way asks for two elements of 4 bytes, one after the other.
LISTING = """
_a_kernel:
        /*0000*/              @!P1 BRA `(.L_x_0) ;
        /*0010*/                   LDG.E R4, desc[UR4][R2.64] ;
        /*0020*/                   STG.E desc[UR4][R6.64], R4 ;
        /*0030*/                   LDG.E R4, desc[UR4][R2.64+0x4] ;
        /*0040*/                   STG.E desc[UR4][R6.64+0x4], R4 ;
        /*0050*/                   EXIT ;
.L_x_0:
        /*0060*/                   LDG.E.64 R2, desc[UR4][R20.64] ;
.L_x_1:
        /*0070*/              @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0080*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64+0x10] ;
        /*0090*/                   DADD R14, R14, R16 ;
        /*00a0*/                   FADD R12, R9, R12 ;
        /*00b0*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64+0x20] ;
        /*00c0*/               @P2 BRA `(.L_x_1) ;
        /*00d0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*00e0*/                   STG.E.128 desc[UR4][R18.64], R4 ;
        /*00f0*/               @P3 EXIT ;
        /*0100*/                   STG.E.64 desc[UR4][R18.64], R4 ;
        /*0110*/                   EXIT ;
.L_x_2:
        /*0120*/                   BRA `(.L_x_2) ;
"""


def test_path_read_from_a_listing_has_its_loads_and_instructions():
    blocks = sass.parse(LISTING)
    vector = sass.Path(instructions=11, moved=64, in_flight=32, fp64=1, shared=0, barriers=1)
    assert sass.vector_path(blocks) == vector
    scalar = sass.Path(instructions=6, moved=16, in_flight=4, fp64=0, shared=0, barriers=0)
    assert sass.scalar_path(blocks, {4}) == scalar
    assert sass.scalar_path(blocks, {2}) == sass.NO_PATH


@pytest.mark.parametrize(
    ("capability", "registers", "warps", "shared", "programs", "limit"),
    [
        (80, 32, 4, 0, 16, "registers"),
        (80, 96, 4, 0, 5, "registers"),
        (90, 128, 16, 0, 1, "registers"),
        (90, 16, 32, 0, 2, "threads"),
        (90, 8, 1, 0, 32, "slots"),
        (80, 32, 4, 48 << 10, 3, "shared"),
        (90, 32, 4, 48 << 10, 4, "shared"),
    ],
)
def test_residency_equals_values_by_hand(capability, registers, warps, shared, programs, limit):
    """Worked by hand from the guide's table: 65536 registers, 2048 threads, 32 programs, 164 and
    228 KiB of shared memory, of which the system takes 1 KiB a program."""
    assert residency(capability, registers, warps, shared) == (programs, limit)
