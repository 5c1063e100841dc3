"""Buffers in which a bucket's gradients lie side by side, to be reduced in place.

A buffer knows what it was made for, by address, dtype, shape and strides, and is compared with that
before each use. The tensors through which it is reduced are nobody else's.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor

import kernels
from adasum.modes import outside_modes
from adasum.optimizer.buckets.kinds import (
    Kind,
    buffer_for,
    kind_of,
    kind_of_gradient,
    same_state,
    state_of,
)
from adasum.optimizer.buckets.planning import Named
from adasum.optimizer.errors import changed_under_way
from adasum.real_pairs import as_reals
from collectives.fused_buffer import memory_of
from kernels.validation import check_memory_of


class _Slot:
    """A gradient's place in a bucket's buffer, from `address` on.

    view: reads and writes the place, shaped as the gradient, complex numbers as pairs; kind: of the
    gradient that lies there; given: the tensor that was made the parameter's gradient there.
    """

    def __init__(self, view: Tensor, kind: Kind) -> None:
        self.view = view
        self.address = view.data_ptr()
        self.kind = kind
        self.kind = kind._replace(stride=self.make().stride())
        self.given: weakref.ref[Tensor] | None = None

    def make(self) -> Tensor:
        """Return a gradient that lies here: an object that is not used for anything else."""
        whole = self.view.data
        return torch.view_as_complex(whole).data if self.kind.dtype.is_complex else whole

    def give(self, parameter: Tensor, taken: Collection[int] = ()) -> None:
        """Make what lies here the parameter's gradient; taken: ids of others' gradients by now."""
        gradient = parameter.grad
        odd = gradient is not None and (gradient.is_conj() or gradient.is_inference())
        if gradient is None or odd or id(gradient) in taken:
            parameter.grad = self.make()
        else:
            # The same object, which somebody may hold, as torch's accumulation leaves it.
            gradient.data = self.make()
        assert parameter.grad is not None
        self.given = weakref.ref(parameter.grad)

    def holds(self, gradient: Tensor) -> bool:
        """Return whether the gradient lies here, with its values."""
        return (
            gradient.data_ptr() == self.address
            and kind_of(gradient) == self.kind
            and not gradient.is_conj()
        )

    def is_kept(self, gradient: Tensor | None) -> bool:
        """Return whether somebody holds an earlier gradient that lies here."""
        given = None if self.given is None else self.given()
        return given is not None and given is not gradient


class GradientBucket:
    """A bucket's gradients, side by side in the buffer `fused`."""

    def __init__(self, parameters: Sequence[Tensor], kinds: Sequence[Kind], as_views: bool) -> None:
        self._parameters = list(parameters)
        self._kinds = list(kinds)
        self._as_views = as_views
        memory = _memory_of_gradients(parameters) if as_views else None
        # Somebody else's, for as long as all gradients lie there.
        self._is_foreign = memory is not None
        self.fused = buffer_for(parameters, kinds, memory)
        self._address = self.fused.buffer.data_ptr()
        self._slots = [
            _Slot(view, kind) for view, kind in zip(self.fused.views, kinds, strict=True)
        ]
        # The gradients to which results are copied, None for one that is to be made.
        self._apart: list[tuple[Tensor, _Slot, Tensor | None]] = []
        # The gradients as they were when their reduction was started, and whether changes in place
        # count.
        self._sent: list[tuple[Any, ...]] = []
        self._counts: list[bool] = []
        # Whether it holds zeros, to which backward may add.
        self._is_zero = False
        # The places to which backward has been let add since.
        self._attached: set[int] = set()

    def is_for(self, parameters: Sequence[Tensor], kinds: Sequence[Kind]) -> bool:
        """Return whether the parameters are its own, and nobody keeps a gradient that is here.

        And the buffer is where it was: share_memory() of a gradient moves all that it lies in.
        """
        return (
            self.fused.buffer.data_ptr() == self._address
            and len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
            and self._kinds == kinds
            and all(map(self._is_free, self._parameters, self._slots))
        )

    def _is_free(self, parameter: Tensor, slot: _Slot) -> bool:
        """Return whether nobody keeps an earlier gradient that lies in the parameter's slot.

        Of somebody else's memory it also has to be where the gradient lies now.
        """
        gradient = parameter.grad
        if slot.is_kept(gradient):
            return False
        return not self._is_foreign or (gradient is not None and slot.holds(gradient))

    def shares(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether one of the parameters is among its own."""
        return not set(map(id, parameters)).isdisjoint(map(id, self._parameters))

    def zero(self) -> None:
        """Zero the buffer where no gradient lies there any more, so that backward can add to it.

        On the CPU alone: there fresh memory for every gradient costs more than to add to zeros, on
        a GPU the addition does.
        """
        buffer = self.fused.buffer
        here = buffer.is_cpu and not self._is_foreign and buffer.data_ptr() == self._address
        self._is_zero = here and all(
            parameter.grad is None and not slot.is_kept(None)
            for parameter, slot in zip(self._parameters, self._slots, strict=True)
        )
        self._attached.clear()
        if self._is_zero:
            self.fused.buffer.zero_()

    def attach(self, index: int) -> None:
        """Have backward add a parameter's gradient to the zeros here, unless it has one."""
        parameter, slot = self._parameters[index], self._slots[index]
        # Once: a gradient that somebody has dropped since has left its values here.
        if not self._is_zero or parameter.grad is not None or index in self._attached:
            return
        with outside_modes():
            if kind_of_gradient(parameter) == self._kinds[index]:
                self._attached.add(index)
                slot.give(parameter)

    def fill(self, names: Sequence[str], made: Sequence[bool], ours: Collection[int]) -> None:
        """Move the gradients here where they are not, zeros for none, or copy them.

        A part of a larger memory stays there, which may be a buffer of the user's, and is copied.
        So does what backward has not `made`. `ours` are ids of gradients that lie in another
        bucket's buffer, and may leave it.
        ValueError: a gradient has another shape than its parameter.
        """
        is_zero, self._is_zero = self._is_zero, False
        gradients = [parameter.grad for parameter in self._parameters]
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        outside: list[int] = []
        for i, (name, gradient, slot) in enumerate(zip(names, gradients, self._slots, strict=True)):
            if gradient is None:
                if not is_zero or i in self._attached:
                    slot.view.zero_()
            elif gradient.shape != slot.kind.shape:
                raise ValueError(
                    f"the gradient of {name} has shape {tuple(gradient.shape)} and the parameter "
                    f"{tuple(slot.kind.shape)}: where a parameter is given another shape, set its "
                    "grad to None, and change what the optimizer keeps of it"
                )
            elif slot.holds(gradient):
                slot.given = weakref.ref(gradient)
                continue
            else:
                # Whoever frees one gradient's memory frees all that lie in its buffer.
                check_memory_of(f"the gradient of {name}", gradient)
                targets.append(slot.view)
                source = as_reals(gradient.resolve_conj().detach())
                # Where gradients have changed places, one is written before it is read.
                sources.append(source.clone() if self._is_inside(source) else source)
            outside.append(i)
        if targets:
            torch._foreach_copy_(targets, sources)
        # Who has made the memory sees it change when it is reduced.
        counts = [not self._is_foreign] * len(gradients)
        there = [gradient for i in outside if (gradient := gradients[i]) is not None]
        taken = _overlapping(there)
        for i in outside:
            parameter, slot, gradient = self._parameters[i], self._slots[i], gradients[i]
            free = gradient is None or id(gradient) in ours or id(gradient) in taken
            movable = gradient is None or free or (made[i] and not self._is_part(gradient))
            # One that autograd records (create_graph) has to stay where it is.
            recorded = gradient is not None and gradient.requires_grad
            if self._as_views and movable and not recorded:
                slot.give(parameter, taken)
                taken.add(id(gradient))
            else:
                # One that shares memory with another's becomes a tensor of its own.
                self._apart.append((parameter, slot, None if id(gradient) in taken else gradient))
                taken.add(id(gradient))
                # Its counter of changes is that of others, too, which are reduced meanwhile.
                counts[i] = counts[i] and gradient is not None and not self._is_part(gradient)
        self._counts = counts
        self._sent = [state_of(p.grad, c) for p, c in zip(self._parameters, counts, strict=True)]

    def _is_inside(self, tensor: Tensor) -> bool:
        """Return whether a tensor lies in this buffer."""
        return 0 <= tensor.data_ptr() - self._address < self.fused.buffer.nbytes

    def _is_part(self, gradient: Tensor) -> bool:
        """Return whether a gradient is a part of a larger memory, other than this buffer."""
        larger = gradient.untyped_storage().nbytes() > gradient.nbytes
        return larger and not self._is_inside(gradient)

    def given(self) -> list[int]:
        """Return the ids of the gradients that were made to lie here."""
        found = [slot.given() for slot in self._slots if slot.given is not None]
        return [id(gradient) for gradient in found if gradient is not None]

    def require_unchanged(self, names: Sequence[str]) -> None:
        """Raise OptimizerOrderError where somebody has changed a gradient under way."""
        sent, self._sent = self._sent, []
        states = zip(names, self._parameters, self._counts, sent, strict=True)
        for name, parameter, counts, state in states:
            if not same_state(state, state_of(parameter.grad, counts)):
                raise changed_under_way(name)

    def copy_out(self) -> None:
        """Copy the results to gradients that do not lie here."""
        apart, self._apart = self._apart, []
        for parameter, slot, gradient in apart:
            # What is expanded has not every element in memory.
            if gradient is None or 0 in gradient.stride():
                parameter.grad = gradient = torch.empty_like(slot.make())
            as_reals(gradient.detach()).copy_(slot.view)


class GradientBuffers:
    """One buffer a bucket; with `as_views` gradients are views of it from their first reduction on.

    Else they have memory of their own, from which and to which they are copied.
    """

    def __init__(self, as_views: bool = True) -> None:
        self._as_views = as_views
        self._buckets: dict[str, GradientBucket] = {}
        self._places: dict[Tensor, tuple[GradientBucket, int]] = {}

    def place(self, bucket: str, named: Sequence[Named], made: Sequence[bool]) -> GradientBucket:
        """Bring gradients of one dtype and device into the bucket's buffer.

        made: which of them backward has made.

        One that is missing counts as zeros. What backward has accumulated in the buffer is not
        copied. Where somebody still holds a gradient of an earlier step that lies there, or
        anything is not as it was, the bucket gets another buffer.
        """
        names, parameters = zip(*named, strict=True)
        kinds = list(map(kind_of_gradient, parameters))
        found, ours = self._buckets.get(bucket), set[int]()
        if found is None or not found.is_for(parameters, kinds):
            found = GradientBucket(parameters, kinds, self._as_views)
            ours.update(number for each in self._buckets.values() for number in each.given())
            # A gradient lies in one buffer: those that hold one of these are dropped.
            self._buckets = {
                name: each for name, each in self._buckets.items() if not each.shares(parameters)
            }
            self._buckets[bucket] = found
            self._places.update((each, (found, i)) for i, each in enumerate(parameters))
        found.fill(names, made, ours)
        return found

    def clear(self) -> None:
        """Let go of all buffers; gradients that lie in one stay there until they are placed."""
        self._buckets.clear()
        self._places.clear()

    @outside_modes()
    def zero(self) -> None:
        """Zero the buffers in which no gradients lie any more."""
        if self._as_views:
            for bucket in self._buckets.values():
                bucket.zero()

    def attach(self, parameter: Tensor) -> None:
        """Have backward add the parameter's gradient to the zeros in its buffer, if there are."""
        if parameter in self._places:
            bucket, index = self._places[parameter]
            bucket.attach(index)


def _overlapping(gradients: Sequence[Tensor]) -> set[int]:
    """Return the ids of gradients that begin within the memory of another."""
    spans = sorted((g.data_ptr(), g.data_ptr() + g.nbytes, i) for i, g in enumerate(gradients))
    found: set[int] = set()
    end = 0
    for start, stop, i in spans:
        if start < end and gradients[i].nbytes:
            found.add(id(gradients[i]))
        end = max(end, stop)
    return found


def _memory_of_gradients(parameters: Sequence[Tensor]) -> Tensor | None:
    """Return the memory in which all gradients lie already as a buffer would hold them, or None."""
    gradients = [parameter.grad for parameter in parameters]
    found = [
        as_reals(gradient.detach())
        for gradient, parameter in zip(gradients, parameters, strict=True)
        if gradient is not None and gradient.stride() == parameter.stride()
    ]
    if len(found) < len(gradients) or not all(gradient.is_contiguous() for gradient in found):
        return None
    return memory_of(found, kernels.layout_of(found))
