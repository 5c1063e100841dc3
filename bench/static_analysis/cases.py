"""The launchers' compilations of their kernels: change this table if a kernel changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from bench.static_analysis.occupancy import ARCHITECTURES
from kernels.gpu import (
    balanced_tree,
    chunking,
    copy_kernel,
    double_double_kernels,
    gram_kernels,
    launcher,
    node_adasum,
    node_kernels,
    one_launch_kernel,
    projection_kernels,
    sum_kernels,
)

NUMEL = 1 << 26
ITEMSIZES = {"fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8}


class Kernel(NamedTuple):
    """One kernel and the arguments with which its launcher compiles it.

    tile: a function of the number of elements and the item size that returns the elements per tile
    and the warps; values: the constexprs of the plain variant, except dtypes, also NUMEL if it is
    not the usual one, and the dtype of `found_inf` if that is requested; variants: by name, the
    changes to `values`, in which a mapping has one value per dtype; options: Triton's options in
    addition to the usual ones, or a function of the compute capability that returns them; stores:
    whether the kernel writes tiles; dtypes: the dtypes to compile it for.
    """

    function: Any
    tile: Callable[[int, int], tuple[int, int]]
    values: Mapping[str, Any]
    variants: Mapping[str, Mapping[str, Any]]
    options: Mapping[str, Any] | Callable[[int], Mapping[str, Any]] = MappingProxyType({})
    stores: bool = True
    dtypes: Sequence[str] = tuple(ITEMSIZES)


_FOUND_INF = {"found_inf": "fp32"}
_CHECKED = {"checked": _FOUND_INF}
_CAST = {"fp16": "fp32", "fp32": "fp16"}
_COPY = Kernel(
    copy_kernel._copy_kernel.function,
    partial(launcher.block_of, most=copy_kernel.TILE_BYTES),
    {"PACK": True, "SCALED": False, "FINITE": True, "LIVE": None},
    {
        "scaled": {"SCALED": True},
        "checked": {"SCALED": True, **_FOUND_INF},
        "cast": {"BUFFER": _CAST},
    },
)
_ELEMENTWISE = {"ALIGNED": True}
_IN_ORDER = {**_ELEMENTWISE, "LEVELS": None, "PAIRS": False, "SCALE": None}
_ELEMENTWISE_VARIANTS: dict[str, dict[str, Any]] = {
    "misaligned": {"ALIGNED": False},
    **_CHECKED,
    "cast": {"OUT": _CAST},
}
_ROUNDED = {"rounded": {"SUM": {"fp16": "fp16", "fp32": "fp32"}}}
# The most elements that 128 multiprocessors hold, with four tiles each.
_LARGEST_TILES = {dtype: 1 << (20 if dtype == "fp64" else 21) for dtype in ITEMSIZES}
# Not a kernel's constant: it says that less than two vectors per chunk move by element.
_EDGES_APART = {"VECTORS": True}
KERNELS = {
    "pack": _COPY,
    "unpack": _COPY._replace(values={**_COPY.values, "PACK": False}),
    "sum_n": Kernel(
        sum_kernels._sum_kernel.function, launcher.block_of, _IN_ORDER, _ELEMENTWISE_VARIANTS
    ),
    "scaled_add": Kernel(
        sum_kernels._scaled_add_kernel.function,
        launcher.block_of,
        {**_ELEMENTWISE, "ALPHA": None, "BETA": None},
        _ELEMENTWISE_VARIANTS,
    ),
    "dots": Kernel(
        projection_kernels._dots_kernel.function, chunking.tile_of, _EDGES_APART, {}, stores=False
    ),
    "combine": Kernel(
        projection_kernels._combine_kernel.function,
        chunking.tile_of,
        {"DEPENDENT": False},
        {**_CHECKED, "dependent": {"DEPENDENT": True}},
    ),
    "one_launch": Kernel(
        one_launch_kernel._one_launch_kernel.function,
        chunking.tile_of,
        {"NUMEL": _LARGEST_TILES, **_EDGES_APART},
        _CHECKED,
        lambda sm: {"launch_cooperative_grid": True, "maxnreg": one_launch_kernel.registers_of(sm)},
    ),
    "weighted_sum": Kernel(
        sum_kernels._weighted_sum_kernel.function,
        sum_kernels.weighted_tile_of,
        _ELEMENTWISE,
        {"misaligned": {"ALIGNED": False}, **_CHECKED},
    ),
    "precise_gram": Kernel(
        double_double_kernels._precise_gram_kernel.function,
        chunking.tile_of,
        {"ALIGNED": False, "SIZE": 8},
        {},
        stores=False,
    ),
}
# For eight ranks.
_NODE = {"SIZE": 8, "SPINS": node_kernels._SPINS}
KERNELS |= {
    "two_shot": Kernel(
        node_kernels._two_shot_kernel.function,
        partial(launcher.block_of, most=node_kernels.TWO_SHOT_TILE_BYTES),
        _NODE,
        {"ranks32": {"SIZE": 32}},
        node_kernels.OPTIONS,
    ),
    "one_shot": Kernel(
        node_kernels._one_shot_kernel.function,
        partial(launcher.block_of, most=node_kernels._TILE_BYTES),
        {**_NODE, **_ELEMENTWISE},
        {"misaligned": {"ALIGNED": False}},
        node_kernels.OPTIONS,
    ),
}
# By the number of ranks: each number has its own code.
KERNELS |= {
    f"node_adasum{count}": Kernel(
        node_adasum._adasum_kernel.function,
        partial(gram_kernels.tile_of, count),
        {
            "COUNT": count,
            "SPINS": node_kernels._SPINS,
            "BLEND": {"fp16": 2048, "bf16": 2048, "fp32": 1024},
        },
        {},
        node_adasum.OPTIONS,
        dtypes=("fp16", "bf16", "fp32"),
    )
    for count in (2, 4, 8)
}
# By the number of tensors: the code depends on the tree's depth and on whether leaves are pairs.
KERNELS |= {
    f"tree{count}": Kernel(
        sum_kernels._sum_kernel.function,
        partial(balanced_tree.tree_tile_of, levels),
        {**_ELEMENTWISE, "LEVELS": levels, "PAIRS": count > 1 << levels, "SCALE": None},
        {"misaligned": {"ALIGNED": False}, "cast": {"OUT": _CAST}, **_ROUNDED},
        balanced_tree.options_of(levels),
    )
    for count, levels in ((8, 3), (1023, 9))
}
# By the number of tensors: each number has its own code.
KERNELS |= {
    f"gram{count}": Kernel(
        gram_kernels._gram_kernel.function,
        partial(gram_kernels.tile_of, count),
        {"COUNT": count, "PARTS": 2, **_EDGES_APART},
        {},
        partial(gram_kernels.options_of, count),
        stores=False,
    )
    for count in range(1, 9)
}
KERNELS |= {
    f"coefficients{size}": Kernel(
        double_double_kernels._coefficients_kernel.function,
        lambda *_, size=size: (0, double_double_kernels.warps_of(size)),
        {"ALIGNED": False, "SIZE": size, "PRECISE": precise, "SPREAD": True},
        {},
        stores=False,
        dtypes=("fp64",),
    )
    for size, precise in ((8, False), (16, True), (32, True))
}
DTYPES = ("DTYPE", "A", "B", "OUT", "TENSOR", "BUFFER")
_VARIANT_CAPABILITY = 90


class Case(NamedTuple):
    """One compilation; the variant is "plain" or a name in the kernel's `variants`."""

    kernel: str
    variant: str
    dtype: str
    capability: int

    def __str__(self) -> str:
        return f"{self.kernel}-{self.variant}-{self.dtype}-sm_{self.capability}"

    @classmethod
    def parse(cls, name: str) -> Case:
        """Return the case with the given name."""
        kernel, variant, dtype, capability = name.split("-")
        return cls(kernel, variant, dtype, int(capability.removeprefix("sm_")))

    @property
    def aligned(self) -> bool:
        """Whether the case must have 16-byte accesses."""
        values = values_of(self)[0]
        return values.get("ALIGNED", True) and values.get("VECTORS", True)


def cases() -> list[Case]:
    """Return the cases: plain kernels for all dtypes and architectures, variants for fewer."""
    plain = [
        Case(name, "plain", dtype, capability)
        for name in KERNELS
        for dtype in KERNELS[name].dtypes
        for capability in ARCHITECTURES
    ]
    return plain + [
        Case(name, variant, dtype, _VARIANT_CAPABILITY)
        for name, kernel in KERNELS.items()
        for variant in kernel.variants
        for dtype in _CAST
    ]


def values_of(case: Case) -> tuple[dict[str, Any], int]:
    """Return a case's constexprs, with dtypes by their short names, and its warps."""
    kernel = KERNELS[case.kernel]
    changes = {**kernel.values, **kernel.variants.get(case.variant, {})}
    values: dict[str, Any] = {"NUMEL": NUMEL, "found_inf": None} | dict.fromkeys(DTYPES, case.dtype)
    for name, value in changes.items():
        values[name] = value[case.dtype] if isinstance(value, dict) else value
    dtypes = {values[name] for name in DTYPES}
    itemsize = max(ITEMSIZES[dtype] for dtype in dtypes)
    values["BLOCK"], warps = kernel.tile(values["NUMEL"], itemsize)
    values["WIDE"] = "fp64" if "fp64" in dtypes else "fp32"
    values.setdefault("SUM", values["WIDE"])
    return values, warps
