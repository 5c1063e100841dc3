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

from kernels.arguments import Call
from kernels.cpu import dispatch
from kernels.gpu import copy_kernel, launcher, projection_kernels, sum_kernels
from kernels.gpu.device_tables import AddressTable
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
    read_list,
    tracing,
)

__all__ = [
    "PLANS",
    "AdasumPlan",
    "CombinePlan",
    "DotAndNormsPlan",
    "PackPlan",
    "Plan",
    "ScaledAddPlan",
    "SumPlan",
    "UnpackPlan",
    "refuse_outside_eager",
]

_dtype, _shape = operator.attrgetter("dtype"), operator.attrgetter("shape")
_Run = Callable[..., None]
_LISTS_ON_TRITON: dict[str, Callable[[Call, AddressTable], _Run]] = {
    "pack": copy_kernel.Copies,
    "unpack": copy_kernel.Copies,
    "sum_n": sum_kernels.sum_n,
}
_PAIRS_ON_TRITON: dict[str, Callable[[Call], _Run]] = {
    "scaled_add": sum_kernels.scaled_add,
    "dot_and_norms": projection_kernels.dot_and_norms,
    "combine": projection_kernels.combine,
    "adasum": projection_kernels.adasum,
}


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
    _call: Call
    _run: _Run
    _out_name = "out"

    def __init__(self, call: Call) -> None:
        inputs = call.inputs
        self._dtypes, self._shapes = list(map(_dtype, inputs)), list(map(_shape, inputs))
        self._device, self._table = call.out.device, AddressTable()
        # Which of the inputs `out` is.
        self._in_place = next((i for i, one in enumerate(inputs) if one is call.out), None)
        self._take(call)

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
        refuse_outside_eager(self._call.function)
        inputs = self._check_equal(read_list("tensors", tensors))
        target = self.out if self._in_place is None else inputs[self._in_place]
        if out is not None:
            # The buffer that is unpacked is only read.
            if self._out_name == "out":
                check_writable("out", out)
            target = check_like(self._out_name, out, "the plan's", self.out)
        self._take(self._call._replace(inputs=inputs, out=target))

    def release(self) -> None:
        """Let go of the input tensors, and of `out` where it is one of them.

        What else the plan was made with it keeps. It runs again once it is bound to others.
        """
        if self._in_place is not None:
            self.out = self.out.new_empty(0)
        self._run = _released
        self._call = self._call._replace(inputs=[], out=self.out, addresses=array("Q"))

    def check(self) -> None:
        """Check that every tensor still lies where it lay when the plan was bound to it.

        Raises:
            RuntimeError: One was resized, or given other memory; or the plan was released.
        """
        if self._run is _released:
            _released()
        rows = zip(self._call.addresses, self._dtypes, self._shapes, strict=True)
        seen = [*((*row, True) for row in rows), *self._others_seen]
        named = itertools.chain(self._named(self._call), self._others())
        for (name, tensor), was in zip(named, seen, strict=True):
            if _place(tensor) != was:
                raise RuntimeError(
                    f"{name} was resized or given other memory since the plan was bound to it "
                    "(resize_, set_ or .data =): rebind the plan"
                )

    def _others(self) -> Iterator[tuple[str, Tensor]]:
        yield self._out_name, self.out
        if self._call.dots is not None:
            yield "dots", self._call.dots
        yield from self._call.findings.given()

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

    def _take(self, call: Call) -> None:
        call = call._replace(addresses=array("Q", map(Tensor.data_ptr, call.inputs)))
        self._check_memory(call)
        self._call, self.out = call, call.out
        self._run = call.findings.reset_before(self._bind(call))
        self._others_seen = [_place(one) for _, one in self._others()]

    def _bind(self, call: Call) -> _Run:
        """What a run does."""
        if not launcher.on_triton(call.out):
            return dispatch.bind(call)
        with launcher.device_guard(call.out):
            if call.function in _LISTS_ON_TRITON:
                return _LISTS_ON_TRITON[call.function](call, self._table)
            return _PAIRS_ON_TRITON[call.function](call)

    def _check_memory(self, call: Call) -> None:
        """Raise ValueError where what is written shares memory with anything else."""
        out, dots = call.out, call.dots
        check_output(out, call.inputs, call.addresses, self._name)
        others = itertools.chain([("out", out)], self._named(call))
        if dots is not None:
            check_no_overlap("out", out, "dots", dots)
            others = itertools.chain(others, [("dots", dots)])
        call.findings.check_apart(others)

    def _name(self, i: int) -> str:
        """How messages call an input."""
        return f"tensors[{i}]"

    def _named(self, call: Call) -> Iterator[tuple[str, Tensor]]:
        return ((self._name(i), tensor) for i, tensor in enumerate(call.inputs))


def _place(tensor: Tensor) -> tuple[object, ...]:
    """What a plan relies on."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous()


class _ScaledPlan(Plan):
    def __call__(self, scale: float = 1.0) -> Tensor:
        """Run with this factor of all that is written, and return `out`."""
        self._run(check_scalar("scale", scale))
        return self.out


class _CopyPlan(Plan):
    def _check_memory(self, call: Call) -> None:
        assert call.packed is not None
        name, reach = self._out_name, 8 * call.packed.layout.largest
        if not call.packing:
            check_disjoint("tensors", call.addresses, call.packed.sizes)
        for other, tensor in [(name, call.out), *call.findings.given()]:
            for i in near(call.addresses, reach, tensor):
                check_no_overlap(other, tensor, self._name(i), call.inputs[i])
        call.findings.check_apart([(name, call.out)])


class PackPlan(_CopyPlan, _ScaledPlan):
    """What `plan_pack` returns."""


class UnpackPlan(_CopyPlan):
    """What `plan_unpack` returns."""

    _out_name = "buffer"

    def __call__(self, scale: float = 1.0) -> list[Tensor]:
        """Copy the slots of the buffer, times `scale`, into the tensors, and return these."""
        self._run(check_scalar("scale", scale))
        return self._call.inputs[:]

    def _check_equal(self, inputs: list[Tensor]) -> list[Tensor]:
        checked = super()._check_equal(inputs)
        check_all_writable("tensors", checked)
        return checked


class SumPlan(_ScaledPlan):
    """What `plan_sum_n` returns."""


class _PairPlan(Plan):
    def __call__(self) -> Tensor:
        """Write the result to `out`, and return it."""
        self._run()
        return self.out

    def _name(self, i: int) -> str:
        return "ab"[i]


class ScaledAddPlan(_PairPlan):
    """What `plan_scaled_add` returns."""

    def __call__(self, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
        """Write alpha*a + beta*b, and return it."""
        self._run(check_scalar("alpha", alpha), check_scalar("beta", beta))
        return self.out


class DotAndNormsPlan(_PairPlan):
    """What `plan_dot_and_norms` returns."""


class CombinePlan(_PairPlan):
    """What `plan_combine` returns."""


class AdasumPlan(_PairPlan):
    """What `plan_adasum` returns."""


PLANS: dict[str, Any] = {
    "pack": PackPlan,
    "unpack": UnpackPlan,
    "sum_n": SumPlan,
    "scaled_add": ScaledAddPlan,
    "dot_and_norms": DotAndNormsPlan,
    "combine": CombinePlan,
    "adasum": AdasumPlan,
}


def refuse_outside_eager(name: str) -> None:
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
