"""The gradient method: gradients are reduced while backward produces them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from adasum.optimizer.bucket import (
    Bucket,
    Member,
    Part,
    copy_to_gradient,
    dtype_of_gradient,
    refuse_changed,
    tensors_to_pack,
    versions_of,
)
from adasum.optimizer.errors import OptimizerOrderError
from adasum.optimizer.local_step import parameters_of
from adasum.optimizer.method import Method
from adasum.optimizer.planning import Named, by_kind
from adasum.optimizer.reduction import Reduction, empty_sparse
from collectives import Average, Sum
from collectives.modes import outside_modes


class GradientMethod(Method):
    """Steps by the reduced gradients. Gradients are the user's: they are packed and unpacked."""

    early = True
    final = True
    placed = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._synchronized_by_user = False
        # Parameters whose reduced gradients no step has used, until gradients are zeroed.
        self._unstepped: set[Tensor] = set()

    # Reduction.

    def start(self, bucket: Bucket, members: list[Member]) -> list[Reduction]:
        """Pack gradients, and start their reduction."""
        reducer, part = self.settings.reducer, bucket.parts.get(0)
        gradients = [parameter.grad for _, parameter in members]
        with outside_modes():
            if part is not None and part.pack_plain(members, gradients, reducer.prescale):
                return [reducer.start(part, self._install_of(members, part, {}))]
            self.densify()
            dense, started = self._start_sparse(bucket, members)
            packed = self.sorted(dense)
            # There is one kind, unless dtypes or devices have changed since the planning.
            for i, kind in enumerate(by_kind(packed, dtype_of_gradient)):
                # Usually all members: pass the same list in every step.
                same = packed is dense and len(kind) == len(members)
                started.append(self._start_kind(bucket, i, members if same else kind))
        return started

    def _start_sparse(
        self, bucket: Bucket, members: list[Member]
    ) -> tuple[list[Member], list[Reduction]]:
        """Start reducing sparse gradients; return the other members, and the reductions."""
        dense, started = list[Member](), list[Reduction]()
        for record, parameter in members:
            gradient = parameter.grad
            record.had = gradient is not None
            if gradient is not None and gradient.is_sparse:
                record.sparse = gradient.sparse_dim(), gradient.dtype
            elif gradient is None and record.sparse is not None:
                gradient = empty_sparse(parameter, *record.sparse)
            if gradient is None or not gradient.is_sparse:
                dense.append((record, parameter))
                continue
            install = partial(_install_sparse, parameter)
            start = self.settings.reducer.start_sparse
            started.append(start(record.name, gradient, bucket.name, install))
        return dense, started

    def _start_kind(self, bucket: Bucket, number: int, members: list[Member]) -> Reduction:
        reducer, name = self.settings.reducer, bucket.part_name(number)
        # Checked here, because the kernels' error for a dtype would not name the operator.
        reducer.op.check(dtype_of_gradient(members[0][1]))
        tensors, apart = tensors_to_pack(members, copies=not reducer.casts)
        if not reducer.casts:
            names = [record.name for record, _ in members]
            install = self._install_of(members, None, apart)
            return reducer.start_compressed(names, tensors, name, install)
        part, owners = bucket.parts.get(number), self.owners_of(members)
        if part is None or not part.fits(name, members, tensors, owners):
            counts = reducer.counts if owners is None else None
            part = Part(
                *(name, members, tensors, reducer.compression),
                counts=counts,
                owners=owners,
                allocate=None if number else bucket.allocate,
            )
            bucket.parts[number] = part
        part.members = members
        part.pack(tensors, reducer.prescale, [p.grad is not None for _, p in members])
        return reducer.start(part, self._install_of(members, part, apart))

    def _install_of(
        self, members: list[Member], part: Part | None, apart: dict[int, Tensor]
    ) -> Callable[[Any], None]:
        """Return a function that unpacks results to p.grad, or raises if that has changed.

        part: the packed memory; None if a user's class compresses and decompresses the tensors.
        apart: by index, tensors that were packed in place of gradients.
        """
        gradients = [parameter.grad for _, parameter in members]
        versions = versions_of(gradients)

        def install(_: Any) -> None:
            refuse_changed(members, gradients, versions)
            had = None
            if part is not None:
                try:
                    part.unpack(self.settings.reducer.postscale, self.group.rank)
                except ValueError as error:
                    raise ValueError(
                        f"two gradients of {part.name} share memory, and different results would "
                        "go to it: give each parameter a gradient of its own"
                    ) from error
                lacks = part.counts and any(each is None for each in gradients)
                had = part.any_had() if lacks else None
            for i, result in apart.items():
                # If ranks were counted, a gradient that no rank has stays None.
                if gradients[i] is not None or had is None or had[i]:
                    copy_to_gradient(members[i][1], result)

        return install

    # Overridden by OwnersMethod.

    def sorted(self, members: list[Member]) -> list[Member]:
        """Return a bucket's members in packing order."""
        return members

    def owners_of(self, members: Sequence[Member]) -> tuple[int, ...] | None:
        """Return the rank that gets each member's reduced gradient; None for all ranks."""
        return None

    # The step.

    def synchronize(self) -> None:
        """Wait until every gradient is reduced, and note the call for `step`."""
        self._synchronized_by_user = True
        self.backward.synchronize()

    def finish_gradients(self) -> None:
        """Reduce as `synchronize` does; step() then needs no skip_synchronize()."""
        self.backward.synchronize()

    def take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Reduce, unless the user already has, and step."""
        scaled = "found_inf" in self.optimizer.__dict__
        synchronized = self.backward.synchronized
        if not self.settings.one_rank and scaled and not synchronized:
            raise OptimizerOrderError(
                "GradScaler looked at gradients that were not all reduced yet, since backward did "
                "not reach every parameter: call optimizer.synchronize() before scaler.unscale_() "
                "or scaler.step()"
            )
        if self.skips_synchronize:
            if closure is not None:
                raise ValueError(
                    "step(closure) within skip_synchronize() would leave its gradients unreduced"
                )
            if not synchronized:
                raise OptimizerOrderError(
                    "step() within skip_synchronize() needs synchronize() before it: the gradients "
                    "were not reduced"
                )
        elif closure is None:
            if self._synchronized_by_user and not scaled:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(); the gradients are not reduced a second time",
                    stacklevel=6,
                )
            self.backward.synchronize()
        if not self.settings.one_rank and closure is None:
            self.require_reduced()
        return self.between_hooks(self.local_step, closure, options)

    def follow(self, new: Sequence[Named], gone: Sequence[Tensor]) -> None:
        """Reduce other parameters; raise if one comes back with a reduced gradient."""
        for name, parameter in new:
            if parameter in self._unstepped:
                raise OptimizerOrderError(
                    f"{name} was taken out of param_groups for a step() and put back, and its "
                    "gradient was reduced in that step: step all groups at once, or call "
                    "optimizer.zero_grad() and backward() before"
                )
        super().follow(new, gone)

    def end_step(self) -> None:
        """Begin a new step, and note the gradients that remain from this one."""
        self._synchronized_by_user = False
        if not self.settings.one_rank:
            if self.has_other_members():
                here = set(parameters_of(self.optimizer))
                records = self.backward.records.items()
                self._unstepped.update(
                    p for p, record in records if record.active and p not in here
                )
            self.backward.note_left()
        super().end_step()

    def zero_grad(self) -> None:
        """Restart the count of backward passes: all ranks leave a batch out."""
        self.backward.leave_out()
        self.backward.forget_left()
        self._unstepped.clear()
        self._synchronized_by_user = False
        super().zero_grad()

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the step's closure, and reduce its gradients and its loss."""
        if self.backward.synchronized:
            # The optimizer evaluates the closure once more in this step.
            self.backward.restart()
        loss = super().evaluate(closure)
        self.backward.synchronize()
        reduces = isinstance(loss, Tensor) and loss.is_floating_point()
        return self._reduced_loss(loss) if reduces and not self.settings.one_rank else loss

    @outside_modes()
    def _reduced_loss(self, loss: Tensor) -> Tensor:
        reducer = self.settings.reducer
        # Adasum of losses would not measure progress.
        op = self.settings.op if reducer.op.ordered else reducer.op
        op = op if op in (Sum, Average) else Average
        loss = loss.detach().clone()
        self.group.all_reduce(loss, op, name="closure's loss")
        return loss


def _install_sparse(parameter: Tensor, result: Tensor) -> None:
    # No entries on any rank: as if no rank had a gradient.
    parameter.grad = result if result._nnz() else None
