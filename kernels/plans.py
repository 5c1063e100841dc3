"""Calls whose arguments are checked once and that run many times.

    plan = kernels.plan_pack(gradients, layout=layout, out=flat)   # checks, tables, bound launch
    plan(scale=0.5)                                                # the launch and nothing else
    plan.rebind(new_gradients)                                     # others, equal but in place

A direct call, `kernels.pack` say, makes such a plan and runs it once.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kernels.arguments import (
    check_adasum,
    check_combine,
    check_dot_and_norms,
    check_pack,
    check_scaled_add,
    check_sum_n,
    check_unpack,
)
from kernels.cpu import dispatch
from kernels.findings import Findings
from kernels.gpu import copy_kernel, launcher, projection_kernels, sum_kernels
from kernels.gpu.device_tables import AddressTable
from kernels.layout import Layout, PackedList
from kernels.torch_ops import mark_written, read_list, tracing
from kernels.validation import (
    all_sound,
    check_all_writable,
    check_disjoint,
    check_like,
    check_no_overlap,
    check_output,
    check_scalar,
    check_tensor,
    check_writable,
    near,
)

__all__ = [
    "AdasumPlan",
    "CombinePlan",
    "DotAndNormsPlan",
    "PackPlan",
    "Plan",
    "ScaledAddPlan",
    "SumPlan",
    "UnpackPlan",
    "plan_adasum",
    "plan_combine",
    "plan_dot_and_norms",
    "plan_pack",
    "plan_scaled_add",
    "plan_sum_n",
    "plan_unpack",
]

_dtype, _shape = operator.attrgetter("dtype"), operator.attrgetter("shape")
_Run = Callable[..., None]
# How messages call the inputs.
_TENSOR, _A_OR_B = "tensors[{}]".format, "ab".__getitem__


def _released(*_: float) -> None:
    raise RuntimeError("this plan was released: rebind it to tensors before it runs again")


class Plan:
    """A call that has passed its checks and is bound to its tensors.

    A run does the launch (CUDA) or one call of compiled code (CPU) and nothing else. It writes to
    the same output each time, and does not tell autograd so, whose version counters stay as they
    are: plan what no backward pass has saved. One thread runs a plan at a time; on CUDA its runs
    follow each other on their streams. torch.compile and dispatch modes do not see its runs, so
    under them none is made. Nor is one made or bound while a CUDA graph is captured; its runs may
    be.

    A plan holds its tensors. While it does, nobody may give one of them other memory or another
    shape: no `resize_`, no `set_`, no assignment to `.data`, no `resize_` of its storage. A run
    would read or write where it lay before. `check` finds out. A CUDA graph that captured a run
    needs the plan for as long as it is replayed, neither rebound nor released.

    Attributes:
        out: What a run writes to and returns; of `plan_unpack`, what it reads.
    """

    out: Tensor
    _function: str
    _out_name = "out"
    _inputs: list[Tensor]
    _addresses: array[int]

    def __init__(
        self,
        inputs: list[Tensor],
        name: Callable[[int], str],
        out: Tensor,
        findings: Findings,
        dots: Tensor | None = None,
    ) -> None:
        self._name, self._findings, self._dots = name, findings, dots
        self._dtypes, self._shapes = list(map(_dtype, inputs)), list(map(_shape, inputs))
        self._device = out.device
        # Which of the inputs `out` is.
        self._in_place = next((i for i, one in enumerate(inputs) if one is out), None)
        self._run: _Run = _released
        self._take(inputs, out)

    def rebind(self, tensors: Sequence[Tensor], *, out: Tensor | None = None) -> None:
        """Take other input tensors, equal in shape, dtype, strides and device; let the old ones go.

        Work that was started before and still runs on a GPU is not disturbed, if it is on the
        current stream.

        Args:
            tensors: As many as the plan was made from, in the same order: (a, b) of a pair.
            out: Takes the place of the plan's `out`. None keeps it or, where it is one of the
                inputs, takes the new one in its place.

        Raises:
            TypeError: One has another type or dtype.
            ValueError: One has another shape or device, is not contiguous, or shares memory that
                is written.
        """
        _refuse_outside_eager(self._function)
        inputs = self._check_equal(read_list("tensors", tensors))
        target = self.out if self._in_place is None else inputs[self._in_place]
        if out is not None:
            # The buffer that is unpacked is only read.
            if self._out_name == "out":
                check_writable("out", out)
            target = check_like(self._out_name, out, "the plan's", self.out)
        self._take(inputs, target)

    def release(self) -> None:
        """Let go of the input tensors, and of `out` where it is one of them.

        What else the plan was made with it keeps. It runs again once it is bound to others.
        """
        self._inputs, self._addresses, self._run = [], array("Q"), _released
        if self._in_place is not None:
            self.out = self.out.new_empty(0)

    def check(self) -> None:
        """Check that every tensor still lies where it lay when the plan was bound to it.

        Raises:
            RuntimeError: One was resized, or given other memory; or the plan was released.
        """
        if self._run is _released:
            _released()
        for name, tensor, seen in self._seen():
            if (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous()) != seen:
                raise RuntimeError(
                    f"{name} was resized or given other memory since the plan was bound to it "
                    "(resize_, set_ or .data =): rebind the plan"
                )

    def written(self) -> list[Tensor]:
        """The tensors that a run writes, for `mark_written`."""
        return [self.out, *(one for _, one in self._findings.given())]

    def _seen(self) -> Iterator[tuple[str, Tensor, object]]:
        """Name and tensor of all that a run uses, and what they were when it was bound."""
        rows = zip(self._inputs, self._addresses, self._dtypes, self._shapes, strict=True)
        for i, (tensor, address, dtype, shape) in enumerate(rows):
            yield self._name(i), tensor, (address, dtype, shape, True)
        for (name, tensor), seen in zip(self._others(), self._others_seen, strict=True):
            yield name, tensor, seen

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        yield self._out_name, self.out
        if self._dots is not None:
            yield "dots", self._dots
        yield from self._findings.given()

    def _check_equal(self, inputs: list[Tensor]) -> list[Tensor]:
        if (
            all_sound(inputs)
            and list(map(_dtype, inputs)) == self._dtypes
            and list(map(_shape, inputs)) == self._shapes
            and (not inputs or inputs[0].device == self._device)
        ):
            return inputs
        if len(inputs) != len(self._dtypes):
            raise ValueError(f"the plan is of {len(self._dtypes)} tensors, not {len(inputs)}")
        rows = zip(inputs, self._dtypes, self._shapes, strict=True)
        for i, (tensor, dtype, shape) in enumerate(rows):
            check_tensor(self._name(i), tensor)
            if (tensor.dtype, tensor.shape, tensor.device) != (dtype, shape, self._device):
                kind = TypeError if tensor.dtype != dtype else ValueError
                raise kind(
                    f"{self._name(i)} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} "
                    f"but the plan was made for {tuple(shape)} {dtype} on {self._device}"
                )
        return inputs

    def _take(self, inputs: list[Tensor], out: Tensor) -> None:
        addresses = array("Q", map(Tensor.data_ptr, inputs))
        self._check_memory(inputs, addresses, out)
        self._inputs, self._addresses, self.out = inputs, addresses, out
        self._run = self._findings.reset_before(self._bind())
        self._others_seen = [
            (one.data_ptr(), one.dtype, one.shape, True) for _, one in self._others()
        ]

    def _check_memory(self, inputs: list[Tensor], addresses: array[int], out: Tensor) -> None:
        """Raise ValueError where what is written shares memory with anything else."""
        check_output(out, inputs, addresses, self._name)
        self._findings.check_apart(itertools.chain([("out", out)], self._named(inputs)))

    def _named(self, inputs: list[Tensor]) -> Iterator[tuple[str, Tensor]]:
        return ((self._name(i), tensor) for i, tensor in enumerate(inputs))

    def _bind(self) -> _Run:
        """What a run does, with the tensors that the plan has now."""
        raise NotImplementedError


class _ListPlan(Plan):
    """A plan of a list of tensors, run with a scale."""

    def __init__(self, inputs: list[Tensor], out: Tensor, findings: Findings) -> None:
        self._table = AddressTable()
        super().__init__(inputs, _TENSOR, out, findings)


class _CopyPlan(_ListPlan):
    _packing = True

    def __init__(
        self, inputs: list[Tensor], packed: PackedList, buffer: Tensor, findings: Findings
    ) -> None:
        self._packed = packed
        super().__init__(inputs, buffer, findings)

    def _check_memory(self, inputs: list[Tensor], addresses: array[int], out: Tensor) -> None:
        name, reach = self._out_name, 8 * self._packed.layout.largest
        for i in near(addresses, reach, out):
            check_no_overlap(name, out, self._name(i), inputs[i])
        if not self._packing:
            check_disjoint("tensors", addresses, self._packed.sizes)
        for other, tensor in self._findings.given():
            for i in near(addresses, reach, tensor):
                check_no_overlap(other, tensor, self._name(i), inputs[i])
        self._findings.check_apart([(name, out)])

    def _bind(self) -> _Run:
        if launcher.on_triton(self.out):
            return copy_kernel.Copies(
                self._addresses, self._packed, self.out, self._findings, self._packing, self._table
            )
        return dispatch.copy(
            self._inputs, self._addresses, self._packed, self.out, self._findings, self._packing
        )


class PackPlan(_CopyPlan):
    """What `plan_pack` returns."""

    _function = "pack"

    def __call__(self, scale: float = 1.0) -> Tensor:
        """Copy the tensors, each times `scale`, into `out`, and return it."""
        if type(scale) is not float:
            scale = check_scalar("scale", scale)
        self._run(scale)
        return self.out


class UnpackPlan(_CopyPlan):
    """What `plan_unpack` returns."""

    _function, _out_name, _packing = "unpack", "buffer", False

    def written(self) -> list[Tensor]:
        """Return the tensors that a run writes."""
        return [*self._inputs, *(one for _, one in self._findings.given())]

    def __call__(self, scale: float = 1.0) -> list[Tensor]:
        """Copy the slots of the buffer, times `scale`, into the tensors, and return these."""
        if type(scale) is not float:
            scale = check_scalar("scale", scale)
        self._run(scale)
        return self._inputs[:]

    def _check_equal(self, inputs: list[Tensor]) -> list[Tensor]:
        checked = super()._check_equal(inputs)
        check_all_writable("tensors", checked)
        return checked


class SumPlan(_ListPlan):
    """What `plan_sum_n` returns."""

    _function = "sum_n"

    def __call__(self, scale: float = 1.0) -> Tensor:
        """Write `scale` times the sum of the tensors, and return it."""
        if type(scale) is not float:
            scale = check_scalar("scale", scale)
        self._run(scale)
        return self.out

    def _bind(self) -> _Run:
        if launcher.on_triton(self.out):
            return sum_kernels.sum_n(
                self._addresses, self._dtypes[0], self.out, self._findings, self._table
            )
        return dispatch.sum_n(self._inputs, self._addresses, self.out, self._findings)


class ScaledAddPlan(Plan):
    """What `plan_scaled_add` returns."""

    _function = "scaled_add"

    def __init__(self, inputs: list[Tensor], out: Tensor, findings: Findings) -> None:
        super().__init__(inputs, _A_OR_B, out, findings)

    def __call__(self, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        """Write alpha*a + beta*b, and return it."""
        if type(alpha) is not float or type(beta) is not float:
            alpha, beta = check_scalar("alpha", alpha), check_scalar("beta", beta)
        self._run(alpha, beta)
        return self.out

    def _bind(self) -> _Run:
        a, b = self._inputs
        function = sum_kernels.scaled_add if launcher.on_triton(self.out) else dispatch.scaled_add
        return function(a, b, self.out, self._findings)


class _SegmentPlan(Plan):
    """A plan of the pair (a, b), a segment at a time."""

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        bounds: tuple[int, ...],
        out: Tensor,
        findings: Findings,
        dots: Tensor | None = None,
    ) -> None:
        self._bounds = bounds
        super().__init__([a, b], _A_OR_B, out, findings, dots)

    def __call__(self) -> Tensor:
        """Write the result to `out`, and return it."""
        self._run()
        return self.out


class DotAndNormsPlan(_SegmentPlan):
    """What `plan_dot_and_norms` returns."""

    _function = "dot_and_norms"

    def __init__(self, a: Tensor, b: Tensor, bounds: tuple[int, ...]) -> None:
        dots = torch.empty(len(bounds) - 1, 3, dtype=torch.float64, device=a.device)
        super().__init__(a, b, bounds, dots, Findings())

    def _bind(self) -> _Run:
        a, b = self._inputs
        triton = launcher.on_triton(a)
        function = projection_kernels.dot_and_norms if triton else dispatch.dot_and_norms
        return function(a, b, self._bounds, self.out)


class CombinePlan(_SegmentPlan):
    """What `plan_combine` returns."""

    _function = "combine"

    def _check_memory(self, inputs: list[Tensor], addresses: array[int], out: Tensor) -> None:
        super()._check_memory(inputs, addresses, out)
        assert self._dots is not None
        check_no_overlap("out", out, "dots", self._dots)
        self._findings.check_apart([("dots", self._dots)])

    def _bind(self) -> _Run:
        a, b = self._inputs
        assert self._dots is not None
        function = projection_kernels.combine if launcher.on_triton(a) else dispatch.combine
        return function(a, b, self._dots, self._bounds, self.out, self._findings)


class AdasumPlan(_SegmentPlan):
    """What `plan_adasum` returns."""

    _function = "adasum"

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        bounds: tuple[int, ...],
        out: Tensor,
        findings: Findings,
        cooperative: bool,
    ) -> None:
        self._cooperative = cooperative
        super().__init__(a, b, bounds, out, findings)

    def _bind(self) -> _Run:
        a, b = self._inputs
        if launcher.on_triton(a):
            return projection_kernels.adasum(
                a, b, self._bounds, self.out, self._findings, self._cooperative
            )
        return dispatch.adasum(a, b, self._bounds, self.out, self._findings)


def plan_pack(
    tensors: Sequence[Tensor],
    *,
    layout: Layout | None = None,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> PackPlan:
    """Plan `kernels.pack` of these tensors: run it as plan(scale).

    Arguments and errors as there, and of every plan: see `Plan`. Without `out` the plan has a
    buffer of its own, the same at each run.
    """
    _refuse_outside_eager("pack")
    findings = Findings(found_inf, max_abs)
    return PackPlan(*check_pack(tensors, layout, out, findings), findings)


def plan_unpack(
    buffer: Tensor,
    tensors: Sequence[Tensor],
    *,
    layout: Layout | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> UnpackPlan:
    """Plan `kernels.unpack` into these tensors: run it as plan(scale).

    Arguments and errors as there, and of every plan: see `Plan`.
    """
    _refuse_outside_eager("unpack")
    findings = Findings(found_inf, max_abs)
    return UnpackPlan(*check_unpack(buffer, tensors, layout, findings), findings)


def plan_sum_n(
    tensors: Sequence[Tensor],
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> SumPlan:
    """Plan `kernels.sum_n` of these tensors: run it as plan(scale).

    Arguments and errors as there, and of every plan: see `Plan`. Without `out` the plan has one of
    its own, the same at each run.
    """
    _refuse_outside_eager("sum_n")
    findings = Findings(found_inf, max_abs)
    return SumPlan(*check_sum_n(tensors, out, dtype, findings), findings)


def plan_scaled_add(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> ScaledAddPlan:
    """Plan `kernels.scaled_add` of a and b: run it as plan(alpha, beta).

    Arguments and errors as there, and of every plan: see `Plan`. Without `out` the plan has one of
    its own, the same at each run.
    """
    _refuse_outside_eager("scaled_add")
    findings = Findings(found_inf, max_abs)
    return ScaledAddPlan(*check_scaled_add(a, b, out, dtype, findings), findings)


def plan_dot_and_norms(
    a: Tensor, b: Tensor, segments: Sequence[int] | None = None
) -> DotAndNormsPlan:
    """Plan `kernels.dot_and_norms` of a and b: run it as plan().

    Arguments and errors as there, and of every plan: see `Plan`. A run returns the same tensor
    each time.
    """
    _refuse_outside_eager("dot_and_norms")
    return DotAndNormsPlan(a, b, check_dot_and_norms(a, b, segments))


def plan_combine(
    a: Tensor,
    b: Tensor,
    dots: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
) -> CombinePlan:
    """Plan `kernels.combine` of a and b: run it as plan(), with what `dots` then holds.

    Arguments and errors as there, and of every plan: see `Plan`. Without `out` the plan has one of
    its own, the same at each run.
    """
    _refuse_outside_eager("combine")
    findings = Findings(found_inf, max_abs)
    bounds, target = check_combine(a, b, dots, segments, out, findings)
    return CombinePlan(a, b, bounds, target, findings, dots)


def plan_adasum(
    a: Tensor,
    b: Tensor,
    segments: Sequence[int] | None = None,
    *,
    out: Tensor | None = None,
    found_inf: Tensor | None = None,
    max_abs: Tensor | None = None,
    cooperative: bool = True,
) -> AdasumPlan:
    """Plan `kernels.adasum` of a and b: run it as plan().

    Arguments and errors as there, and of every plan: see `Plan`. Without `out` the plan has one of
    its own, the same at each run.
    """
    _refuse_outside_eager("adasum")
    findings = Findings(found_inf, max_abs)
    return AdasumPlan(a, b, *check_adasum(a, b, segments, out, findings), findings, cooperative)


def run_once(plan: Any, *scalars: float) -> Any:
    """Run a plan and tell autograd what it has written, as torch's own functions do."""
    done = plan(*scalars)
    mark_written(plan.written())
    return done


def _refuse_outside_eager(name: str) -> None:
    """Raise RuntimeError where calls are read, or recorded, rather than run."""
    if tracing():
        raise RuntimeError(
            "no plan is made while torch.compile, export or a dispatch mode reads the calls: "
            f"call kernels.{name}, of which they see an operator"
        )
    # Asked on a CPU, torch would start CUDA.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "no plan is made or bound while a CUDA graph is captured, whose memory and tables are "
            f"filled at its replays alone: make it before, or call kernels.{name}"
        )
