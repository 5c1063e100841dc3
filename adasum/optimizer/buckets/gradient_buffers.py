"""Buffers in which a bucket's gradients lie side by side, to be reduced in place.

A buffer knows what it was made for, by address, dtype, shape and strides, and is compared with that
before each use. The tensors through which it is reduced are nobody else's.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import is_

import torch
from torch import Tensor

import kernels
from adasum.modes import outside_modes
from adasum.optimizer.buckets.kinds import Kind, buffer_for, kind_of, kind_of_gradient
from adasum.optimizer.buckets.planning import Named
from adasum.real_pairs import as_reals
from collectives.fused_buffer import memory_of


class _Slot:
    """A gradient's place in a bucket's buffer.

    Attributes:
        view: Reads and writes the place: shaped as the gradient, complex numbers as pairs.
        address: Of its first element.
        kind: Of the gradient that lies there.
        given: The tensor object that was made the parameter's gradient there.
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

    def give(self, parameter: Tensor) -> None:
        """Make what lies here the parameter's gradient."""
        if parameter.grad is None or parameter.grad.is_conj():
            parameter.grad = self.make()
        else:
            # The same object, which somebody may hold, as torch's accumulation leaves it.
            parameter.grad.data = self.make()
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
    """A bucket's gradients, side by side in a buffer.

    Attributes:
        fused: The buffer.
    """

    def __init__(self, parameters: Sequence[Tensor], kinds: Sequence[Kind]) -> None:
        self._parameters = list(parameters)
        self._kinds = list(kinds)
        self.fused = buffer_for(parameters, kinds, _memory_of_gradients(parameters))
        self._address = self.fused.buffer.data_ptr()
        self._slots = [
            _Slot(view, kind) for view, kind in zip(self.fused.views, kinds, strict=True)
        ]
        # The gradients to which results are copied, None for one that is to be made.
        self._apart: list[tuple[Tensor, _Slot, Tensor | None]] = []
        # Whether it holds zeros, to which backward may add.
        self._is_zero = False

    def is_for(self, parameters: Sequence[Tensor], kinds: Sequence[Kind]) -> bool:
        """Return whether the parameters are its own, and nobody keeps a gradient that is here.

        And the buffer is where it was: share_memory() of a gradient moves all that it lies in.
        """
        return (
            self.fused.buffer.data_ptr() == self._address
            and len(parameters) == len(self._parameters)
            and all(map(is_, parameters, self._parameters))
            and self._kinds == kinds
            and not any(
                slot.is_kept(parameter.grad)
                for slot, parameter in zip(self._slots, parameters, strict=True)
            )
        )

    def shares(self, parameters: Sequence[Tensor]) -> bool:
        """Return whether one of the parameters is among its own."""
        return not set(map(id, parameters)).isdisjoint(map(id, self._parameters))

    def zero(self) -> None:
        """Zero the buffer where no gradient lies there any more, so that backward can add to it.

        On the CPU alone: there fresh memory for every gradient costs more than to add to zeros, on
        a GPU the addition does.
        """
        here = self.fused.buffer.is_cpu and self.fused.buffer.data_ptr() == self._address
        self._is_zero = here and all(
            parameter.grad is None and not slot.is_kept(None)
            for parameter, slot in zip(self._parameters, self._slots, strict=True)
        )
        if self._is_zero:
            self.fused.buffer.zero_()

    def attach(self, index: int) -> None:
        """Have backward add a parameter's gradient to the zeros here, unless it has one."""
        parameter, slot = self._parameters[index], self._slots[index]
        if not self._is_zero or parameter.grad is not None:
            return
        if kind_of_gradient(parameter) == self._kinds[index]:
            slot.give(parameter)

    def fill(self, names: Sequence[str], as_views: bool) -> None:
        """Move the gradients here where they are not, zeros for none, or copy them.

        Args:
            names: Of the parameters.
            as_views: Whether the gradients lie here from now on.

        Raises:
            ValueError: A gradient has another shape than its parameter.
        """
        is_zero, self._is_zero = self._is_zero, False
        if not is_zero:
            # Adasum of what is not finite leaves NaN there.
            self.fused.clear_padding()
        gradients = [parameter.grad for parameter in self._parameters]
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        outside: list[int] = []
        for i, (name, gradient, slot) in enumerate(zip(names, gradients, self._slots, strict=True)):
            if gradient is None:
                if not is_zero:
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
                targets.append(slot.view)
                sources.append(as_reals(gradient.resolve_conj().detach()))
            outside.append(i)
        if targets:
            torch._foreach_copy_(targets, sources)
        for i in outside:
            parameter, slot, gradient = self._parameters[i], self._slots[i], gradients[i]
            if as_views:
                slot.give(parameter)
            else:
                self._apart.append((parameter, slot, gradient))

    def copy_out(self) -> None:
        """Copy the results to gradients that do not lie here."""
        apart, self._apart = self._apart, []
        for parameter, slot, gradient in apart:
            if gradient is None:
                parameter.grad = gradient = torch.empty_like(slot.make())
            as_reals(gradient.detach()).copy_(slot.view)


class GradientBuffers:
    """One buffer a bucket.

    Args:
        as_views: Whether gradients are views of the buffers, from their first reduction on. Else
            they have memory of their own, from which and to which they are copied.
    """

    def __init__(self, as_views: bool = True) -> None:
        self._as_views = as_views
        self._buckets: dict[str, GradientBucket] = {}
        self._places: dict[Tensor, tuple[GradientBucket, int]] = {}

    @outside_modes
    def place(self, bucket: str, named: Sequence[Named]) -> GradientBucket:
        """Bring gradients of one dtype and device into the bucket's buffer.

        One that is missing counts as zeros. What backward has accumulated in the buffer is not
        copied. Where somebody still holds a gradient of an earlier step that lies there, or
        anything is not as it was, the bucket gets another buffer.

        Args:
            bucket: The bucket's name.
            named: (name, parameter) of its members.
        """
        names, parameters = zip(*named, strict=True)
        kinds = list(map(kind_of_gradient, parameters))
        found = self._buckets.get(bucket)
        if found is None or not found.is_for(parameters, kinds):
            found = GradientBucket(parameters, kinds)
            # A gradient lies in one buffer: those that hold one of these are dropped.
            self._buckets = {
                name: each for name, each in self._buckets.items() if not each.shares(parameters)
            }
            self._buckets[bucket] = found
            self._places.update((each, (found, i)) for i, each in enumerate(parameters))
        found.fill(names, self._as_views)
        return found

    def clear(self) -> None:
        """Let go of all buffers; gradients that lie in one stay there until they are placed."""
        self._buckets.clear()
        self._places.clear()

    @outside_modes
    def zero(self) -> None:
        """Zero the buffers in which no gradients lie any more."""
        if self._as_views:
            for bucket in self._buckets.values():
                bucket.zero()

    @outside_modes
    def attach(self, parameter: Tensor) -> None:
        """Have backward add the parameter's gradient to the zeros in its buffer, if there are."""
        if parameter in self._places:
            bucket, index = self._places[parameter]
            bucket.attach(index)


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
