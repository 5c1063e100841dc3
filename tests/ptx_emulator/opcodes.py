"""The instructions that are not arithmetic, by their whole opcode: memory, warps and control.

Each table maps an opcode to what the method in threads.py that executes it needs.
"""

from __future__ import annotations

from typing import NamedTuple

from tests.ptx_emulator.arithmetic import OPERATIONS


class Access(NamedTuple):
    """A load or store.

    Attributes:
        shared: Whether of shared memory, else of global memory.
        count: How many registers it moves for each thread.
        kind: PTX type of each.
        acquires: Whether the load acquires what was released at its address.
    """

    shared: bool
    count: int
    kind: str
    acquires: bool = False


_MOVED = ("b16", "b32", "b64", "u16", "u32", "u64", "s16", "s32", "s64", "f32", "f64")


def _accesses(name: str, *spaces: str) -> dict[str, Access]:
    return {
        f"{name}.{space}{vector}.{kind}": Access("shared" in space, count, kind)
        for space in spaces
        for vector, count in (("", 1), (".v2", 2), (".v4", 4), (".v8", 8))
        for kind in _MOVED
        if count * int(kind[1:]) <= 256
    }


PARAMETER_LOADS = {f"ld.param.{kind}": kind for kind in ("b32", "b64", "u32", "u64", "f32", "f64")}
LOADS = _accesses("ld", "global", "global.cg", "shared", "shared::cta") | {
    f"ld.global.gpu.acquire.{kind}": Access(False, 1, kind, True) for kind in ("b32", "b64")
}
STORES = _accesses("st", "global", "shared", "shared::cta")
# Policies for the caches change no value; the policy comes last among the operands.
_HINT = "global.L1::evict_first.L2::cache_hint"
LOADS |= _accesses("ld", _HINT)
STORES |= _accesses("st", _HINT)
POLICIES = {"createpolicy.fractional.L2::evict_first.b64": "b64"}
ATOMICS = {
    f"{name}.global.gpu.{order}add.u64": order.rstrip(".")
    for name in ("atom", "red")
    for order in ("", "relaxed.", "acquire.", "release.", "acq_rel.")
}
# By the type of their operands. Up to 3.7 Triton takes `atom` where nobody reads the result, too.
MAXIMA = {
    f"{name}.global.gpu.relaxed.max.{kind}": kind
    for name in ("atom", "red")
    for kind in ("s32", "s64")
}
# Whether a thread names the lane it reads, else by which bits that differs from its own.
SHUFFLES = {"shfl.sync.bfly.b32": False, "shfl.sync.idx.b32": True}
REDUCTIONS = {
    f"redux.sync.{name}.{kind}": OPERATIONS[f"{name}.{kind}", 2]
    for name, kinds in (("min", "s32 u32 f32"), ("max", "s32 u32 f32"),
                        ("min.NaN", "f32"), ("max.NaN", "f32"))
    for kind in kinds.split()
}  # fmt: skip
MATRICES = {
    f"{name}.sync.aligned.m8n8.x{count}{trans}.{space}.b16": (count, trans != "")
    for name in ("ldmatrix", "stmatrix")
    for count in (1, 2, 4)
    for trans in ("", ".trans")
    for space in ("shared", "shared::cta")
}
# Waits for the launch ahead on the stream, which is over here: only who has waited is kept.
WAITS = {"griddepcontrol.wait": None}
# Handled by machine.py itself.
CONTROL = frozenset({"bra", "bra.uni", "ret", "bar.sync", "bar.warp.sync"})
