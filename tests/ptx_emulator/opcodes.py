"""The instructions that are not arithmetic, by their whole opcode: memory, warps and control.

Each table maps an opcode to what the method in threads.py that executes it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from tests.ptx_emulator.arithmetic import OPERATIONS, Array


class Access(NamedTuple):
    """A load or store.

    Attributes:
        shared: Whether of shared memory, else of global memory.
        count: How many registers it moves for each thread.
        kind: PTX type of each.
        order: How it is ordered: "weak", as most are, or "relaxed" or "acquire", of atomics.
        scope: Of one that is not weak: the GPU, or the system, so all ranks.
    """

    shared: bool
    count: int
    kind: str
    order: str = "weak"
    scope: str = "gpu"


class Atomic(NamedTuple):
    """An atomic operation on global memory.

    Attributes:
        operation: What becomes of the value there: a key of `UPDATES`.
        kind: PTX type of its operands.
        order: "relaxed", "acquire", "release" or "acq_rel".
        scope: The GPU, or the system, so all ranks.
    """

    operation: str
    kind: str
    order: str
    scope: str


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
    # As Triton writes it, and as PTX is documented, which inline assembly has.
    name: Access(False, 1, kind, order, scope)
    for scope in ("gpu", "sys")
    for order in ("relaxed", "acquire")
    for kind in ("b32", "b64")
    for name in (f"ld.global.{scope}.{order}.{kind}", f"ld.{order}.{scope}.global.{kind}")
}
STORES = _accesses("st", "global", "shared", "shared::cta")
# Policies for the caches change no value; one for L2, from sm_80 on, is the last operand.
_HINTS = ("global.L1::evict_first", "global.L1::evict_first.L2::cache_hint")
LOADS |= _accesses("ld", *_HINTS)
STORES |= _accesses("st", *_HINTS)
POLICIES = {"createpolicy.fractional.L2::evict_first.b64": "b64"}
# From the value that is there and the operands to the one that then is.
UPDATES: dict[str, Callable[..., Array]] = {
    "add": lambda old, value: old + value,
    "max": np.maximum,
    "exch": lambda old, value: value,
}
_ORDERS = ("relaxed", "acquire", "release", "acq_rel")
# Where nobody reads the result, it is a "red".
ATOMICS = {
    f"{name}.global.{scope}.{order}.{operation}.{kind}": Atomic(operation, kind, order, scope)
    for scope in ("gpu", "sys")
    for order in _ORDERS
    for operation, kinds in (("add", "u32 u64"), ("max", "s32 s64"))
    for kind in kinds.split()
    for name in ("atom", "red")
} | {
    f"{name}.global.gpu.add.u64": Atomic("add", "u64", "relaxed", "gpu") for name in ("atom", "red")
} | {
    # A store that orders: as an exchange whose result nobody reads.
    f"st.{order}.{scope}.global.b64": Atomic("exch", "b64", order, scope)
    for scope in ("gpu", "sys") for order in ("relaxed", "release")
}  # fmt: skip
# Whether a thread names the lane it reads, else by which bits that differs from its own.
SHUFFLES = {"shfl.sync.bfly.b32": False, "shfl.sync.idx.b32": True}
REDUCTIONS = {
    f"redux.sync.{name}.{kind}": OPERATIONS[f"{name}.{kind}", 2]
    for name, kinds in (("add", ["s32"]), ("min", ["s32", "u32"]), ("max", ["s32", "u32"]))
    for kind in kinds
}
# How many matrices are loaded.
MATRICES = {
    f"ldmatrix.sync.aligned.m8n8.x{count}.{space}.b16": count
    for count in (1, 2, 4)
    for space in ("shared", "shared::cta")
}
# Waits for the launch ahead on the stream, which is over here: only who has waited is kept.
WAITS = {"griddepcontrol.wait": None}
# Handled by machine.py itself.
CONTROL = frozenset({"bra", "bra.uni", "ret", "bar.sync", "bar.warp.sync"})
