"""The gradient method: gradients are reduced while backward produces them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from adasum.modes import outside_modes
from adasum.optimizer.bucket import Bucket, Member, Part
from adasum.optimizer.errors import OptimizerOrderError
from adasum.optimizer.method import Method
from adasum.optimizer.packed_gradients import (
    PackedGradients,
    dtype_of_gradient,
    empty_sparse,
    tensors_to_pack,
)
from adasum.optimizer.planning import by_kind
from adasum.optimizer.reduction import Reduction
from collectives import Average, Sum


class GradientMethod(Method):
    """Steps by the reduced gradients. Gradients are the user's: they are packed and unpacked."""

    early = True
    final = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._synchronized_by_user = False
        # (parameter, result) of those that had no gradient when they were packed, if ranks have
        # yet to find out whether one of them had one.
        self._missing: list[tuple[Tensor, Tensor]] = []

    def start(self, bucket: Bucket, members: list[Member]) -> list[Reduction]:
        """Pack gradients, and start their reduction."""
        reducer = self.settings.reducer
        gradients = [parameter.grad for _, parameter in members]
        part, started = bucket.parts.get(0), list[Reduction]()
        with outside_modes():
            if part is not None and part.pack_plain(members, gradients, reducer.prescale):
                packed = [PackedGradients(members, gradients, part, {})]
            else:
                packed = self._pack_any(bucket, members, started)
            for each in packed:
                names = [record.name for record, _ in each.members]
                if each.part is not None:
                    reduction = reducer.start(each.part, names)
                else:
                    tensors, _ = tensors_to_pack(each.members)
                    reduction = reducer.start_compressed(names, tensors, bucket.name)
                started.append(self._installing(reduction, each))
        return started

    def _pack_any(
        self, bucket: Bucket, members: list[Member], started: list[Reduction]
    ) -> list[PackedGradients]:
        """Pack gradients of any kind; those of sparse ones have `started` then."""
        reducer = self.settings.reducer
        self.densify()
        dense: list[Member] = []
        for record, parameter in members:
            gradient = parameter.grad
            if gradient is not None and gradient.is_sparse:
                record.sparse = gradient.sparse_dim(), gradient.dtype
            elif gradient is None and record.sparse is not None:
                gradient = empty_sparse(parameter, *record.sparse)
            if gradient is not None and gradient.is_sparse:
                started.append(self._start_sparse(record.name, parameter, gradient, bucket.name))
            else:
                dense.append((record, parameter))
        packed = []
        # One kind, unless dtypes or devices have changed since the buckets were planned.
        for i, each in enumerate(by_kind(self.sorted(dense), dtype_of_gradient)):
            # Here, because the kernels would refuse a dtype without naming the operator.
            reducer.op.check(dtype_of_gradient(each[0][1]))
            gradients = [parameter.grad for _, parameter in each]
            tensors, apart = tensors_to_pack(each)
            part, owners = bucket.parts.get(i), self.owners_of(each)
            name = f"{bucket.name}, {i}" if i else bucket.name
            if part is None or part.owners != owners or not part.fits(name, each, tensors):
                options: Any = {
                    "counts": reducer.counts if owners is None else None,
                    "owners": owners,
                }
                part = Part(name, each, tensors, reducer.compression, **options)
                bucket.parts[i] = part
            # All of the bucket's, as a rule: the same list as in the next step.
            part.members = members if len(each) == len(members) else each
            part.pack(tensors, reducer.prescale, [gradient is not None for gradient in gradients])
            packed.append(PackedGradients(each, gradients, part, apart))
        return packed

    def _installing(self, reduction: Reduction, packed: PackedGradients) -> Reduction:
        def install(result: Any) -> None:
            reduction.install(result)
            self._missing += packed.install(self.settings.reducer.postscale, self.group.rank)

        return replace(reduction, install=install)

    def _start_sparse(
        self, name: str, parameter: Tensor, gradient: Tensor, bucket: str
    ) -> Reduction:
        started = self.settings.reducer.start_sparse(name, gradient, bucket)

        def install(result: Tensor) -> None:
            # Without any entry on any rank it is as if no rank had one.
            parameter.grad = result if result._nnz() else None

        return replace(started, install=install)

    def finish(self) -> None:
        """Let a gradient that no rank had be None again, so that nothing steps by its zeros."""
        if not self.settings.one_rank and not self.settings.reducer.counts:
            self.drop_missing(self.count_gradients(self.had_gradients()))

    def had_gradients(self) -> list[bool]:
        """Return which parameters had a gradient on this rank before the reduction."""
        missing = {id(parameter) for parameter, _ in self._missing}
        return [p.grad is not None and id(p) not in missing for p in self.backward.records]

    @outside_modes()
    def count_gradients(self, had: list[bool], other: Tensor | None = None) -> Tensor:
        """Return how many ranks had each gradient, and last for how many `other` is true."""
        parameters = list(self.backward.records)
        counts = torch.tensor(had, dtype=torch.float32, device="cpu")
        if parameters and parameters[0].is_cuda:
            # The host does not wait for the GPU, unless it has to read the answer.
            counts = counts.pin_memory().to(parameters[0].device, non_blocking=True)
        if other is not None:
            counts = torch.cat([counts, other.to(counts).reshape(1)])
        self.group.all_reduce(counts, Sum, name="which parameters have gradients")
        return counts

    def drop_missing(self, counts: Tensor) -> None:
        """Set gradients to None that were missing on all ranks, as these have counted them."""
        missing, self._missing = self._missing, []
        if missing:
            numbers = dict(zip(map(id, self.backward.records), counts.tolist(), strict=False))
            for parameter, _ in missing:
                if not numbers[id(parameter)]:
                    parameter.grad = None

    # What owners do otherwise.

    def sorted(self, members: list[Member]) -> list[Member]:
        """Return the members of a bucket in the order in which they are packed."""
        return members

    def owners_of(self, members: Sequence[Member]) -> tuple[int, ...] | None:
        """Return the ranks that get the members' reduced gradients; None for all ranks."""
        return None

    def synchronize(self) -> None:
        """Wait until every gradient is the reduced one; `step` is to be told that it was called."""
        self._synchronized_by_user = True
        self.backward.synchronize()

    def finish_gradients(self) -> None:
        """Reduce; step() need not be within skip_synchronize()."""
        self.backward.synchronize()

    def take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Reduce, unless the user has, and step."""
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

    def end_step(self) -> None:
        """Begin a new step, and note what gradients this one leaves."""
        self._synchronized_by_user = False
        if not self.settings.one_rank:
            self.backward.note_left()
        super().end_step()

    def zero_grad(self) -> None:
        """Count backward passes anew: all ranks may leave a batch out."""
        self.backward.leave_out()
        self.backward.forget_left()
        self._synchronized_by_user = False
        super().zero_grad()

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the closure of a step, and reduce its gradients and its loss."""
        if self.backward.synchronized:
            # Evaluated once more in this step.
            self.backward.restart()
        loss = super().evaluate(closure)
        self.backward.synchronize()
        reduces = isinstance(loss, Tensor) and loss.is_floating_point()
        return self._reduced_loss(loss) if reduces and not self.settings.one_rank else loss

    @outside_modes()
    def _reduced_loss(self, loss: Tensor) -> Tensor:
        reducer = self.settings.reducer
        # The Adasum of losses would not measure progress.
        op = self.settings.op if reducer.op.ordered else reducer.op
        op = op if op in (Sum, Average) else Average
        loss = loss.detach().clone()
        self.group.all_reduce(loss, op, name="closure's loss")
        return loss
