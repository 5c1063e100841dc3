"""Plans: calls whose arguments are checked once, and which then run many times.

    plan = kernels.plan_pack(gradients, layout=layout, out=flat)   # checks, tables, bound launch
    plan(scale=0.5)                                                # the launch and nothing else
    plan.rebind(new_gradients)                                     # like the old ones, elsewhere

A direct call, such as `kernels.pack`, is bound in the same way and run once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling as is_compiling

from kernels.arguments import read_again
from kernels.binding import Run, bind
from kernels.call import UNREAD, Call
from kernels.gradients import refuse_followed
from kernels.layout import codes_of
from kernels.validation import (
    EQUAL,
    check_all_writable,
    check_factor,
    check_like,
    check_tensor,
    check_weights,
    check_writable,
    read_list,
    tracing,
)

Result = TypeVar("Result")


def _refuse_followed(call: Call) -> None:
    # A call with addresses has been checked completely.
    if call.addresses is UNREAD:
        refuse_followed(call, "autograd does not see what a plan does")


def _released(*_: float) -> None:
    raise RuntimeError("this plan was released: rebind it to tensors before it runs again")


class Plan(Generic[Result]):
    """A call whose arguments were checked, bound to its tensors.

    `plan_pack` and others make one, with the arguments and errors of the direct function. Its
    scalars are passed to each run. Without `out` the plan makes the output; each run writes to the
    same one and returns it (`plan_unpack`: the list of tensors).

    A run compares the address of each tensor, in about 0.05 us, and makes the launch (CUDA) or one
    call of compiled code (CPU). Autograd does not see its writes, and version counters do not
    change: plan no tensor that a backward pass has saved. Tensors that require gradients are
    refused while grad mode is on. Only one thread may run a plan at a time, and on CUDA its runs
    must follow each other on their streams. Its own memory belongs to the stream that was current
    when the plan was made or last rebound. If it runs on another stream, wait for that stream
    before rebinding or dropping the plan, as torch's allocator reuses the memory at once.
    torch.compile and dispatch modes do not see its runs, so no plan can be made under them or run
    in a compiled function. While a CUDA graph is captured, no plan can be made or bound, but runs
    can be captured.

    A plan holds its tensors. As long as it does, none of them may get other memory or another
    shape: by `resize_`, `set_`, an assignment to `.data`, or `resize_` of its storage. If the
    address of one has changed, a run raises and writes nothing; another shape or dtype at the same
    address is found only by `check`. While a CUDA graph that captured a run is replayed, the plan
    must exist and be neither rebound nor released; replays check nothing.

    Attributes:
        out: The tensor that runs write; for `plan_unpack`, the buffer that runs read.

    Examples:
        >>> a, b = torch.ones(2), torch.ones(2)
        >>> plan = kernels.plan_sum_n([a, b])
        >>> plan()
        tensor([2., 2.])
        >>> plan.rebind([b, torch.full((2,), 3.0)])
        >>> plan(scale=0.5)
        tensor([2., 2.])
        >>> plan.check()  # raises if tensors were resized or moved
        >>> plan.release()
    """

    out: Tensor
    _call: Call
    _run: Run
    # All its tensors, and their addresses.
    _held: list[Tensor]
    _places: list[int]

    def __init__(self, call: Call) -> None:
        _refuse_outside_eager(call.function)
        _refuse_followed(call)
        if call.inputs and not call.inputs[0].is_contiguous():
            raise ValueError(f"{call.name(0)} is not contiguous, in a plan: pass .contiguous()")
        self._codes = call.codes or codes_of(call.inputs)
        self._dtypes, self._shapes = call.dtypes, call.shapes
        self._device, call.planned = call.out.device, True
        # The index of the input that is also `out`, if any.
        self._in_place = next((i for i, one in enumerate(call.inputs) if one is call.out), None)
        self._take(call)

    def rebind(self, tensors: Iterable[Tensor], *, out: Tensor | None = None) -> None:
        """Bind the plan to other tensors of the same shapes, dtypes, strides and device.

        The old ones are released. Runs that are still under way on a GPU are not disturbed if they
        are on the current stream.

        Args:
            tensors: As many as the plan was made from, in the same order; (a, b) for a pair.
            out: The new `out`. None keeps the old one or, if that is one of the inputs, takes the
                new input in its place.

        Raises:
            TypeError: A tensor has another type or dtype, or its storage is too short.
            ValueError: A tensor has another shape or device, is not contiguous, requires a
                gradient, or shares memory that is written.
        """
        call = self._call
        _refuse_outside_eager(call.function)
        inputs = read_list("tensors", tensors)
        if len(inputs) != len(self._dtypes):
            raise ValueError(
                f"tensors holds {len(inputs)} but the plan was made for {len(self._dtypes)}"
            )
        target = self.out if self._in_place is None else inputs[self._in_place]
        if out is not None:
            target = check_like("out", out, "the plan's", self.out)
        fresh = read_again(call, inputs, target)
        if fresh is None or not self._is_like(fresh):
            self._check_equal(inputs)
            if call.function == "unpack":
                check_all_writable("tensors", inputs)
            elif out is not None:
                check_writable("out", out)
            fresh = replace(call, inputs=inputs, out=target, addresses=UNREAD, rebound=True)
        _refuse_followed(fresh)
        self._take(fresh)

    def release(self) -> None:
        """Release the input tensors, and `out` if it is one of them.

        The plan keeps its other tensors. It can run again after `rebind`.
        """
        if self._in_place is not None:
            self.out = self.out.new_empty(0)
            self._call = replace(self._call, out=self.out)
        self._call.inputs.clear()
        self._held = []
        self._run = _released

    def check(self) -> None:
        """Check that every tensor is as it was when the plan was bound to it.

        Raises:
            RuntimeError: A tensor was resized or given other memory, or the plan was released.
        """
        if self._run is _released:
            _released()
        call = self._call
        rows = zip(call.addresses, self._dtypes, self._shapes, strict=True)
        seen = [*((*row, True) for row in rows), *self._others_seen]
        inputs = ((call.name(i), tensor) for i, tensor in enumerate(call.inputs))
        named = itertools.chain(inputs, call.others())
        for (name, tensor), was in zip(named, seen, strict=True):
            if _place(tensor) != was:
                raise RuntimeError(
                    f"{name} was resized or given other memory since the plan was bound to it "
                    "(resize_, set_ or .data =): rebind the plan"
                )

    def _is_like(self, fresh: Call) -> bool:
        """Whether dtypes, device and the first tensor's shape are as the plan was made for."""
        first = fresh.inputs[0]
        found = fresh.codes, first.shape, first.device, first.is_contiguous()
        return found == (self._codes, self._shapes[0], self._device, True)

    def _check_equal(self, inputs: list[Tensor]) -> None:
        rows = zip(inputs, self._dtypes, self._shapes, strict=True)
        for i, (tensor, dtype, shape) in enumerate(rows):
            name = f"tensors[{i}]"
            check_tensor(name, tensor)
            if (tensor.dtype, tensor.shape, tensor.device) != (dtype, shape, self._device):
                kind = TypeError if tensor.dtype != dtype else ValueError
                raise kind(
                    f"{name} is {tuple(tensor.shape)} {tensor.dtype} on {tensor.device} "
                    f"but the plan was made for {tuple(shape)} {dtype} on {self._device}"
                )

    def _take(self, call: Call) -> None:
        self._run = bind(call)
        call.rebound = call.planned = False
        self._call = call
        self.out = call.out
        others = [one for _, one in call.others()]
        self._others_seen = [_place(one) for one in others]
        self._held = [*call.inputs, *others]
        self._places = [*call.addresses, *[one.data_ptr() for one in others]]

    def __call__(self) -> Result:
        """Run, and return the tensors written."""
        return self._start()

    def _start(self, *scalars: float | Tensor) -> Result:
        """Run if all tensors have the same addresses as before; otherwise `check` raises."""
        if is_compiling():
            raise RuntimeError(
                "torch.compile does not see what a plan does: in a compiled function call "
                f"kernels.{self._call.function}, which is an operator there"
            )
        if [*map(Tensor.data_ptr, self._held)] != self._places:
            self.check()
        self._run(*scalars)
        result: Any = self._call.inputs[:] if self._call.function == "unpack" else self.out
        return result


def _place(tensor: Tensor) -> tuple[object, ...]:
    """Return the properties of a plan's tensor that must not change."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.is_contiguous()


class ScaledPlan(Plan[Result]):
    """A plan of `pack`, `unpack` or `sum_n`."""

    def __call__(self, scale: float | Tensor = 1.0) -> Result:
        """Run with `scale` as the factor of the result."""
        return self._start(check_factor("scale", scale))


class ScaledAddPlan(Plan[Tensor]):
    """A plan of `scaled_add`."""

    def __call__(self, alpha: float | Tensor = 1.0, beta: float | Tensor = 1.0) -> Tensor:
        """Run with the factors of a and b."""
        return self._start(check_factor("alpha", alpha), check_factor("beta", beta))


class ProjectionPlan(Plan[Tensor]):
    """A plan of `combine` or `adasum`."""

    def __call__(self, weights: tuple[float, float] = EQUAL) -> Tensor:
        """Run with the weights of a and b."""
        return self._start(*check_weights(weights))


def _refuse_outside_eager(name: str) -> None:
    """Raise RuntimeError while torch traces calls, or captures them in a CUDA graph."""
    if tracing():
        raise RuntimeError(
            "no plan is made while torch.compile, export or a dispatch mode reads the calls: "
            f"call kernels.{name}, of which they see an operator"
        )
    # is_initialized first: the second question would initialise CUDA.
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "no plan is made or bound while a CUDA graph is captured, whose memory and tables are "
            f"filled only at its replays: make it before, or call kernels.{name}"
        )
