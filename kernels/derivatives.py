"""pack, unpack, sum_n and scaled_add as linear maps, with derivatives and rules for vmap.

If gradients are asked for, or a transform of torch.func wraps the tensors, a public function runs
its map. In traced code that is the operator `adasum::*_functional_2`, which has a backward. In
eager mode it is an autograd.Function around the operator, which also has a forward derivative. The
backward of a map is another map, so there are derivatives of any order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.forward_ad import make_dual, unpack_dual
from torch.compiler import is_compiling

from kernels.arguments import check
from kernels.binding import locate, run_at_once
from kernels.call import LINEAR, Call
from kernels.cpu.torch_fallback import report
from kernels.findings import Findings
from kernels.layout import packed_within
from kernels.validation import DTYPES, check_memory_of, tracing

_LIBRARY = torch.library.Library("adasum", "FRAGMENT")
# Not empty: torch takes an empty list for a list of tensors.
UNUSED = (0,)
_Like = list[tuple[torch.Size, torch.dtype]]


def tags(*names: str) -> tuple[torch.Tag, ...]:
    """Return torch's tags of these names, except for those that its version lacks.

    "cudagraph_unsafe" makes calls run between torch's own CUDA graphs (mode="reduce-overhead"),
    whose memory pool would take address tables and scratch, which outlive a call, for a leak.
    """
    return tuple(getattr(torch.Tag, name) for name in names if hasattr(torch.Tag, name))


@dataclass
class Map:
    """A linear map of tensors to tensors: the arguments of its operator except for the tensors.

    Attributes:
        function: One of `LINEAR`.
        bounds: The elements of the packed buffer at which slots start, and its end; else `UNUSED`.
        numels: The sizes of the results of `unpack`; else `UNUSED`.
        dtypes: The dtypes of the results, as indices into `DTYPES`.
        alignment: The alignment of the slots in bytes.
        scalars: The scale, or alpha and beta.
        order: Of `sum_n`.
        accumulate: Of `sum_n`.
    """

    function: str
    bounds: Sequence[int]
    numels: Sequence[int]
    dtypes: Sequence[int]
    alignment: int
    scalars: Sequence[float]
    order: str = "list"
    accumulate: torch.dtype | None = None

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Apply the map so that autograd records it."""
        if is_compiling():
            # dynamo does not support an autograd.Function with a forward derivative.
            return self._dual(*zip(*map(unpack_dual, inputs), strict=True))
        return list(cast("Any", _Linear).apply(self, *inputs))

    def _dual(self, primals: Sequence[Tensor], tangents: Sequence[Tensor | None]) -> list[Tensor]:
        found = self.operator(primals)
        if all(one is None for one in tangents):
            return found
        moved = [
            torch.zeros_like(primal) if one is None else one
            for primal, one in zip(primals, tangents, strict=True)
        ]
        return list(map(make_dual, found, self.operator(moved)))

    def operator(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Call the operator."""
        operator = getattr(torch.ops.adasum, f"{self.function}_functional_2").default
        settings = self.bounds, self.numels, self.dtypes, self.alignment, self.scalars
        sums = self.order, self.accumulate
        return cast("list[Tensor]", operator(list(inputs), *settings, *sums))

    def transposed(self, grads: Sequence[Tensor], like: _Like, needed: Sequence[bool]) -> list[Any]:
        """Return the inputs' gradients from those of the results; None for those not needed.

        like: The shapes and dtypes of the inputs.
        """
        dtypes = [DTYPES.index(dtype) for _, dtype in like]
        if self.function == "pack":
            numels = [math.prod(shape) for shape, _ in like]
            slots = Map("unpack", self.bounds, numels, dtypes, self.alignment, self.scalars)(grads)
            return [slot.view(shape) for slot, (shape, _) in zip(slots, like, strict=True)]
        if self.function == "unpack":
            return Map("pack", self.bounds, UNUSED, dtypes, self.alignment, self.scalars)(grads)
        if self.function == "sum_n":
            return Map("sum_n", UNUSED, UNUSED, dtypes[:1], 0, self.scalars)(grads) * len(like)
        # By scaled_add with zeros, not by pack or sum_n: it takes factors beyond float32's range.
        pair = [*grads, torch.zeros_like(grads[0])]
        one = partial(Map, "scaled_add", UNUSED, UNUSED, alignment=0)
        return [
            one(dtypes=(dtype,), scalars=(factor, 0.0))(pair)[0] if wanted else None
            for dtype, factor, wanted in zip(dtypes, self.scalars, needed, strict=True)
        ]


def run(call: Call, *scalars: float) -> Any:
    """Run a call of one of `LINEAR` so that autograd and torch.func see it; return its result.

    Raises:
        TypeError: A tensor that would be written is outside of a transform of torch.func.
    """
    packed, buffer = call.packed, call.out
    bounds = call.bounds if packed else UNUSED
    alignment = packed.layout.alignment if packed else 0
    # Not by `partial`, of which torch 2.11's dynamo makes an object without attributes.
    if call.function == "unpack":
        assert packed is not None
        codes = [DTYPES.index(dtype) for dtype in packed.dtypes]
        numels = packed.layout.numels
        found = Map(call.function, bounds, numels, codes, alignment, scalars)([buffer])
    else:
        # The map makes its own result: free the one that was made for the call.
        call.out = buffer.new_empty(0)
        codes = [DTYPES.index(buffer.dtype)]
        sums = call.order, call.accumulate
        found = Map(call.function, bounds, UNUSED, codes, alignment, scalars, *sums)(call.inputs)
    _report(call.findings, found)
    return _written(call, found) if call.function == "unpack" else found[0]


def _report(findings: Findings, found: list[Tensor]) -> None:
    asked = findings.given()
    if not asked:
        return
    if not tracing():
        for tensor in found:
            check_memory_of(f"what {asked[0][0]} is to be found of", tensor)
    with torch.no_grad():
        findings.reset_before(partial(report, findings, [tensor.detach() for tensor in found]))()


def _written(call: Call, slots: list[Tensor]) -> list[Tensor]:
    """Copy the unpacked values to the call's tensors, by torch's copy_, which autograd records."""
    for i, (tensor, slot) in enumerate(zip(call.inputs, slots, strict=True)):
        try:
            tensor.copy_(slot.view(tensor.shape))
        except RuntimeError as error:
            # A view to which autograd allows no write, or a tensor outside of vmap.
            raise TypeError(
                f"{call.name(i)} cannot be written with a derivative: {error}"
            ) from None
    return call.inputs


class _Linear(torch.autograd.Function):
    """A map as autograd and torch.func see it in eager mode."""

    generate_vmap_rule = True

    @staticmethod
    def forward(linear: Map, *inputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(linear.operator(inputs))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.linear, *tensors = inputs
        ctx.like = _like(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, *ctx.linear.transposed(grads, ctx.like, ctx.needs_input_grad[1:])

    @staticmethod
    def jvp(ctx: Any, _: None, *tangents: Tensor | None) -> tuple[Tensor, ...]:
        given = next(one for one in tangents if one is not None)
        moved = [
            given.new_zeros(shape, dtype=dtype) if one is None else one
            for one, (shape, dtype) in zip(tangents, ctx.like, strict=True)
        ]
        return tuple(ctx.linear(moved))


def _like(tensors: Sequence[Tensor]) -> _Like:
    return [(one.shape, one.dtype) for one in tensors]


def _setup(function: str, ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, *settings = inputs
    ctx.linear, ctx.like = Map(function, *settings), _like(tensors)


def _backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    return ctx.linear.transposed(grads, ctx.like, ctx.needs_input_grad[0]), *(None,) * 7


def _run_operator(
    function: str,
    inputs: list[Tensor],
    bounds: Sequence[int],
    numels: Sequence[int],
    dtypes: Sequence[int],
    alignment: int,
    scalars: Sequence[float],
    order: str,
    accumulate: torch.dtype | None,
) -> list[Tensor]:
    """Run the operator of a function."""
    # Gradients may be expanded, or have strides in any order.
    given, kinds = [one.contiguous() for one in inputs], [DTYPES[code] for code in dtypes]
    if function == "sum_n":
        call = check("sum_n", given, None, dtype=kinds[0], kind=order, accumulate=accumulate)
    elif function == "scaled_add":
        call = check("scaled_add", given, None, dtype=kinds[0])
    else:
        made = _empty(function, given, bounds, numels, kinds)
        unpacking = function == "unpack"
        tensors, buffer = (made, given[0]) if unpacking else (given, made[0])
        packed = packed_within(buffer, tensors, bounds[:-1], alignment)
        call = Call(function, tensors, buffer, tuple(bounds), packed=packed, made=not unpacking)
    locate(call)
    run_at_once(call, *scalars)
    return call.inputs if function == "unpack" else [call.out]


def _empty(
    function: str,
    inputs: list[Tensor],
    bounds: Sequence[int],
    numels: Sequence[int],
    kinds: Sequence[torch.dtype],
) -> list[Tensor]:
    """Allocate the results."""
    first = inputs[0]
    if function == "unpack":
        made = zip(numels, kinds, strict=True)
        return [first.new_empty(numel, dtype=kind) for numel, kind in made]
    return [first.new_empty(bounds[-1] if function == "pack" else first.shape, dtype=kinds[0])]


def _fake(function: str, inputs: list[Tensor], *settings: Any) -> list[Tensor]:
    bounds, numels, dtypes, *_ = settings
    return _empty(function, inputs, bounds, numels, [DTYPES[code] for code in dtypes])


def _vmap(
    function: str, info: Any, in_dims: tuple[Any, ...], inputs: list[Tensor], *settings: Any
) -> tuple[list[Tensor], list[int]]:
    """Run the whole batch in one call; packed buffers are the rows of one longer buffer."""
    rows, linear = info.batch_size, Map(function, *settings)
    moved = [
        one.expand(rows, *one.shape) if dim is None else one.movedim(dim, 0)
        for one, dim in zip(inputs, in_dims[0], strict=True)
    ]
    if function in ("sum_n", "scaled_add"):
        return linear.operator(moved), [0]
    *starts, width = linear.bounds
    bounds = [*[row * width + start for row in range(rows) for start in starts], rows * width]
    many = partial(Map, function, bounds, alignment=linear.alignment, scalars=linear.scalars)
    if function == "pack":
        tensors = [one[row] for row in range(rows) for one in moved]
        (buffer,) = many(numels=UNUSED, dtypes=linear.dtypes).operator(tensors)
        return [buffer.view(rows, width)], [0]
    numels, dtypes, count = linear.numels, linear.dtypes, len(linear.numels)
    whole = many(numels=[*numels] * rows, dtypes=[*dtypes] * rows)
    slots = whole.operator([moved[0].reshape(-1)])
    return [torch.stack(slots[i::count]) for i in range(count)], [0] * count


for _name in LINEAR:
    _operator = f"{_name}_functional_2"
    _LIBRARY.define(
        f"{_operator}(Tensor[] inputs, SymInt[] bounds, SymInt[] numels, int[] dtypes, "
        "int alignment, float[] scalars, str order, ScalarType? accumulate) "
        "-> Tensor[]",
        tags=tags("cudagraph_unsafe"),
    )
    _LIBRARY.impl(_operator, partial(_run_operator, _name), "CompositeExplicitAutograd")
    _operator = f"adasum::{_operator}"
    torch.library.register_fake(_operator, partial(_fake, _name), lib=_LIBRARY)
    torch.library.register_autograd(
        _operator, _backward, setup_context=partial(_setup, _name), lib=_LIBRARY
    )
    torch.library.register_vmap(_operator, partial(_vmap, _name), lib=_LIBRARY)
