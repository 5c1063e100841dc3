"""What the compiler makes of the kernels for three architectures, without a GPU."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from kernels import _launch, _plan, _projection, packing, reduction  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="an interpreted kernel is not compiled"
)

SPILL_FREE_BLOCK = 1 << 26
NAMES = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
BYTES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}
SCALARS = {"tensor_count": "i32", "element_count": "i64"}
KERNELS = {
    "dots": _projection._dots_kernel,
    "combine": _projection._combine_kernel,
    "on_chip": _projection._on_chip_kernel,
    "sum_n": reduction._sum_kernel,
    "scaled_add": reduction._scaled_add_kernel,
    "pack": packing._copy_kernel,
    "unpack": packing._copy_kernel,
}


def compile_kernel(name: str, dtype: str, capability: int) -> Any:
    """Compile as the launcher does for a large input whose pointers are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tl = _launch.tl
    element = getattr(tl, NAMES[dtype])
    wide = tl.float64 if dtype == "fp64" else tl.float32
    if name in ("dots", "combine", "on_chip"):
        block, warps = _plan.tile_of(SPILL_FREE_BLOCK, BYTES[dtype])
    else:
        block, warps = _launch.block_of(SPILL_FREE_BLOCK, BYTES[dtype])
    constants = {"DTYPE": element, "WIDE": wide, "BLOCK": block, "ALIGNED": True, "VECTORS": True}
    constants |= {"TENSOR": element, "BUFFER": element, "PACK": name == "pack", "SCALED": True}
    pointers = {"table": "*i64", "addresses": "*i64", "arrivals": "*i64"}
    pointers |= {"partials": "*fp64", "dots": "*fp64"}
    kernel = KERNELS[name]
    signature, constexprs, attributes = {}, {}, {}
    for i, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            constexprs[(i,)] = constants[argument]
        elif argument in SCALARS or argument.endswith("bits"):
            signature[argument] = SCALARS.get(argument, "i64")
        else:
            signature[argument] = pointers.get(argument, f"*{dtype}")
            attributes[(i,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(kernel, signature, constexprs, attributes),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": warps, "launch_cooperative_grid": name == "on_chip"},
    )


def resources(cubin: bytes, folder: Path) -> dict[str, int]:
    """REG, STACK, LOCAL, ... of the one kernel in a cubin, from the cuobjdump Triton brings."""
    from triton.backends import nvidia

    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no cuobjdump")
    text = subprocess.run(
        [str(tool), "--dump-resource-usage", str(file)], capture_output=True, text=True, check=True
    ).stdout
    return {key: int(value) for key, value in re.findall(r"([A-Z]+):(\d+)", text)}


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", list(NAMES))
@pytest.mark.parametrize("name", list(KERNELS))
def test_vectors_spills_and_atomics(name, dtype, capability, tmp_path):
    compiled = compile_kernel(name, dtype, capability)
    ptx = compiled.asm["ptx"]
    wide = r"\.v2\.(b|u|f)64" if dtype == "fp64" else r"\.v4\.(b|u|f)32"
    assert re.search(rf"\bld\.global\S*{wide}", ptx), "no 128-bit load"
    if name != "dots":
        assert re.search(rf"\bst\.global\S*{wide}", ptx), "no 128-bit store"
    atomics = re.findall(r"^\s*(?:@!?%\w+\s+)?((?:atom|red)\.\S+)", ptx, re.MULTILINE)
    assert not [op for op in atomics if re.search(r"\.b?f(16|32|64)", op)], atomics
    assert bool(atomics) == (name in ("dots", "on_chip"))
    used = resources(compiled.asm["cubin"], tmp_path)
    assert used["REG"] > 0
    # ptxas puts spilled registers on the stack; nothing else in these kernels uses it.
    assert used["STACK"] == 0 and used["LOCAL"] == 0, used
