"""Functions that torch compiles, their inputs, and the paths that a compiled graph may take."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import kernels
from kernels.cpu import dispatch
from tests.kernels.cases import DTYPES, bits, random
from tests.ptx_emulator.driver import emulated

SHAPES = [(5, 3), (7,), (), (0,), (2, 1, 2)]
CUTS = (0, 0, 5, 36)
TREE = [(0, 1, 1, 1), (0, 2, 2, 1)]
F16, BF16, F32, F64 = DTYPES


def paths(device: str) -> list[AbstractContextManager[object]]:
    """Return what takes each path of a device, two at least.

    An operator looks for its path when it runs: a graph is compiled once, the longest part of these
    tests, and must serve all of them. A second run shows that nothing is compiled again.
    """
    if device != "cpu":
        return [nullcontext(), nullcontext()]
    found: list[AbstractContextManager[object]] = [mock.patch.object(dispatch, "library", _none)]
    if not kernels.backend_info().why_torch:
        found.append(nullcontext())
    if importlib.util.find_spec("triton"):
        found.append(emulated())
    return found if len(found) > 1 else found * 2


def _none() -> None:
    return None


def compiled(fn: Callable[..., Any], **options: Any) -> tuple[Any, CompileCounterWithBackend]:
    """The function compiled whole, and what notes its graphs."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(fn, fullgraph=True, backend=counter, **options), counter


def operators(counter: CompileCounterWithBackend) -> list[str]:
    """Names of the library's operators in the graphs, in order."""
    targets = [node.target for graph in counter.graphs for node in graph.graph.nodes]
    names = [str(t).split(".")[1] for t in targets if str(t).startswith("adasum.")]
    # What follows an underscore and is a number tells schemas apart.
    return [name.removesuffix("_10") for name in names]


def options(**given: Any) -> tuple[Any, ...]:
    """Arguments of the operator of a function of one list or pair, in the schema's order."""
    defaults: dict[str, Any] = {
        **dict.fromkeys(("dtype", "starts", "table")),
        "kind": "list",
        "accumulate": None,
        "first": 1.0,
        "first_at": None,
        "second": 1.0,
        "second_at": None,
    }
    assert given.keys() <= defaults.keys()
    return tuple((defaults | given).values())


def several(dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    return [random(shape, dtype, device, seed + i) for i, shape in enumerate(SHAPES)]


def pair(dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    return [random((9, 4), dtype, device, seed + i) for i in range(3)]


def buffers(
    dtype: torch.dtype, device: str, seed: int, other: torch.dtype | None = None
) -> list[Tensor]:
    """Tensors, a buffer they fit in, of dtype `other`, and a flag."""
    tensors = several(dtype, device, seed)
    numel = kernels.layout_of(tensors, dtype=other).numel
    flag = torch.zeros((), device=device)
    return [*tensors, random(numel, other or dtype, device, seed + 9), flag]


def unpack_all(buffer: Tensor, tensors: list[Tensor], **options: Any) -> list[Tensor]:
    layout = kernels.layout_of(tensors, dtype=buffer.dtype)
    return kernels.unpack(buffer, tensors, layout=layout, **options)


def combined(a: Tensor, b: Tensor, **options: Any) -> Tensor:
    dots = kernels.dot_and_norms(a, b, CUTS)
    return kernels.combine(a, b, dots, CUTS, **options)


def adasum_in_place(a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
    flag = a.new_zeros((), dtype=F32)
    return [kernels.adasum(a, b * math.inf, CUTS, out=a, found_inf=flag), flag]


def coefficients(*tensors: Tensor, precise: bool) -> Tensor:
    spread = tensors[0].new_zeros(3, dtype=F64)
    tables = kernels.gram(tensors, CUTS, precise=precise)[None]
    factors = kernels.adasum_coefficients(tables, TREE, spread=spread)
    return torch.cat([factors, spread[:, None]], 1)


# name: (inputs, function of the inputs, operators in its graph)
CASES: dict[str, tuple[Callable[..., list[Tensor]], Callable[..., Any], list[str]]] = {
    "pack": (several, lambda *t: kernels.pack(t), ["pack"]),
    "pack out": (
        partial(buffers, other=F32),
        lambda *t: kernels.pack(
            t[:-2], layout=kernels.layout_of(t[:-2], dtype=F32), out=t[-2], scale=3e5,
            found_inf=t[-1],
        ),
        ["pack"],
    ),
    "unpack": (buffers, lambda *t: kernels.unpack(t[-2], t[:-2]), ["unpack"]),
    "unpack scaled": (
        partial(buffers, other=F64),
        lambda *t: unpack_all(t[-2], t[:-2], scale=1e39, found_inf=t[-1]),
        ["unpack"],
    ),
    "sum_n": (pair, lambda *t: kernels.sum_n(t, scale=0.3, dtype=F32), ["sum_n"]),
    "sum_n in place": (
        pair,
        lambda *t: kernels.sum_n([*t, *t], out=t[1], order="tree", accumulate=t[0].dtype),
        ["sum_n"],
    ),
    "scaled_add": (
        pair, lambda a, b, c: kernels.scaled_add(a, b, alpha=0.3, beta=-2), ["scaled_add"],
    ),
    "scaled_add in place": (
        pair, lambda a, b, c: kernels.scaled_add(a, b, alpha=0.3, out=b), ["scaled_add"],
    ),
    "dot_and_norms": (
        pair, lambda a, b, c: kernels.dot_and_norms(a, b, [0, 7, 36]), ["dot_and_norms"],
    ),
    "combine": (pair, lambda a, b, c: combined(a, b), ["dot_and_norms", "combine"]),
    "combine out": (pair, lambda a, b, c: combined(a, b, out=c), ["dot_and_norms", "combine"]),
    "adasum": (pair, lambda a, b, c: kernels.adasum(a, b), ["adasum"]),
    "adasum in two launches": (
        pair, lambda a, b, c: kernels.adasum(a, b, cooperative=False), ["adasum"],
    ),
    "adasum in place": (pair, adasum_in_place, ["adasum"]),
    "adasum of one": (pair, lambda a, b, c: kernels.adasum(a, a, out=a), ["adasum"]),
    "adasum into a view": (
        pair, lambda a, b, c: kernels.adasum(a[:3], b[3:6], out=a[3:6]), ["adasum"],
    ),
    "gram": (
        pair, lambda *t: coefficients(*t, precise=False), ["gram", "adasum_coefficients"],
    ),
    "precise gram": (
        pair, lambda *t: coefficients(*t, precise=True), ["gram", "adasum_coefficients"],
    ),
    "weighted_sum in place": (
        pair,
        lambda a, b, c: kernels.weighted_sum(
            [a, b, c], a.new_full((3, 3), 0.3, dtype=F64), CUTS, out=b
        ),
        ["weighted_sum"],
    ),
    "amid torch": (
        pair,
        lambda a, b, c: (kernels.adasum(a * 2, b.relu()).abs(), kernels.scaled_add(a, c) * 2),
        ["adasum", "scaled_add"],
    ),
    "written twice": (
        pair,
        lambda a, b, c: (kernels.sum_n([a, b], out=c), kernels.adasum(c, b, out=c) * 2, c + a),
        ["sum_n", "adasum"],
    ),
}  # fmt: skip


def flat(value: Any) -> list[bytes]:
    return [bits(t) for t in value] if isinstance(value, (list, tuple)) else [bits(value)]
