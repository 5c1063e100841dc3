"""The gradient method: gradients are reduced while backward produces them."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import compress
from operator import not_
from typing import Any, TypeAlias

import torch
from torch import Tensor

from adasum.modes import outside_modes
from adasum.optimizer.buckets.gradient_buffers import GradientBuffers
from adasum.optimizer.buckets.kinds import dtype_of_gradient, version_of
from adasum.optimizer.buckets.planning import Named, by_kind
from adasum.optimizer.buckets.reduction import Owners, Reduction
from adasum.optimizer.consistency.membership import Change
from adasum.optimizer.distributed_mixin import DistributedMixin
from adasum.optimizer.errors import OptimizerOrderError, changed_unreduced
from collectives import Average, Sum

# By a gradient's id: the gradient, and the version that torch counted of it then.
_Left: TypeAlias = dict[int, tuple[weakref.ref[Tensor], int | None]]


class GradientMethod(DistributedMixin):
    """Steps by the reduced gradients."""

    _adasum_early = True
    _adasum_final = True
    _adasum_synchronized_by_user = False
    # A sparse gradient without entries, by which a missing one is replaced.
    _adasum_sparse_zeros: dict[Tensor, Tensor]
    # The parameters whose gradients, left by the last step, are not reduced again in this one.
    _adasum_kept: list[Named]
    # The parameters that had no gradient when their buckets were started.
    _adasum_missing: list[Tensor]
    # The gradients that the last step has left, with their versions, until they are zeroed; and
    # those of parameters that have gone since.
    _adasum_left: _Left
    _adasum_gone: _Left
    # Batches that were reduced and left out since the last step.
    _adasum_left_out = 0
    _adasum_buffers: GradientBuffers

    def _prepare(self) -> None:
        self._adasum_sparse_zeros, self._adasum_missing, self._adasum_kept = {}, [], []
        self._adasum_left, self._adasum_gone = {}, {}
        self._adasum_buffers = GradientBuffers(self._adasum_settings.gradient_as_bucket_view)

    def _follow(self, change: Change) -> None:
        for parameter in change.gone:
            self._adasum_sparse_zeros.pop(parameter, None)
            # It may come back, to be stepped by it in a later step.
            if self._adasum_hooks.taken(parameter) or self._is_left(parameter):
                self._note_left(self._adasum_gone, parameter)
        super()._follow(change)
        self._adasum_buffers.clear()

    def synchronize(self) -> None:
        """Wait until every gradient is the reduced one.

        backward waits for what it started before it returns: where it produced every gradient, they
        are reduced without this call. A trainable parameter without a gradient contributes zeros
        and receives the reduced gradient, so that all ranks have one, whatever path backward took;
        where no rank has one it stays None.
        """
        self._follow_groups(reducing=True)
        self._adasum_synchronized_by_user = True
        self._adasum_hooks.synchronize()

    def _end_step(self) -> None:
        self._adasum_left_out = 0
        if not self._adasum_settings.one_rank:
            self._adasum_left = {}
            for _, parameter in self._adasum_hooks.named:
                self._note_left(self._adasum_left, parameter)

    def _note_left(self, noted: _Left, parameter: Tensor) -> None:
        gradient = parameter.grad
        if gradient is not None:
            noted[id(gradient)] = weakref.ref(gradient), version_of(gradient)

    def _is_left(self, parameter: Tensor) -> bool:
        """Return whether the parameter's gradient is the one that the last step has left."""
        gradient = parameter.grad
        for noted in (self._adasum_left, self._adasum_gone):
            left, version = noted.get(id(gradient), (None, None))
            if left is not None and gradient is not None and gradient is left():
                return version is not None and version_of(gradient) == version
        return False

    def _wants(self, parameter: Tensor) -> bool:
        return parameter.grad is not None and not self._is_left(parameter)

    @staticmethod
    def _wants_before(parameter: Tensor) -> bool:
        return parameter.is_cpu

    def _before_gradient(self, parameter: Tensor) -> None:
        # Zeros that are added to would change the sign of a zero that is a leaf of the tree.
        if not self._adasum_settings.reducer.op.ordered:
            self._adasum_buffers.attach(parameter)

    def _take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        hooks = self._adasum_hooks
        scaled = "found_inf" in self.__dict__
        if not self._adasum_settings.one_rank and scaled and not hooks.synchronized:
            raise OptimizerOrderError(
                "GradScaler looked at gradients that were not all reduced yet, since backward did "
                "not reach every parameter: call optimizer.synchronize() before scaler.unscale_() "
                "or scaler.step()"
            )
        if self._adasum_skip:
            if closure is not None:
                raise ValueError(
                    "step(closure) within skip_synchronize() would leave its gradients unreduced"
                )
            if not hooks.synchronized:
                raise OptimizerOrderError(
                    "step() within skip_synchronize() needs synchronize() before it: the gradients "
                    "were not reduced"
                )
        elif closure is None:
            if self._adasum_synchronized_by_user and not scaled:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(); the gradients are not reduced a second time",
                    stacklevel=3,
                )
            hooks.synchronize()
        result = self._between_hooks(self._local_step, closure, options)
        self._adasum_synchronized_by_user = False
        return result

    def _finish_gradients(self) -> None:
        # Not `synchronize`, after which step() is to be within skip_synchronize().
        self._adasum_hooks.synchronize()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients, and count backward passes anew: all ranks may leave a batch out.

        Where this rank's backward has not reached every parameter, another one's may have, and wait
        in it for this rank: then the gradients are reduced before they are zeroed.
        """
        self._refuse_in_flight("zero_grad()")
        self._adasum_hooks.leave_out()
        self._adasum_left_out += self._adasum_hooks.ended
        self._adasum_left, self._adasum_gone, self._adasum_kept = {}, {}, []
        super().zero_grad(*args, **kwargs)
        self._adasum_synchronized_by_user = False
        self._adasum_buffers.zero()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the closure of a step, and reduce its gradients and its loss."""
        if self._adasum_hooks.synchronized:
            # Evaluated once more in this step.
            self._adasum_hooks.restart()
        loss = super()._evaluate(closure)
        self._adasum_hooks.synchronize()
        reduces = isinstance(loss, Tensor) and loss.is_floating_point()
        return self._reduced_loss(loss) if reduces and not self._adasum_settings.one_rank else loss

    @outside_modes()
    def _reduced_loss(self, loss: Tensor) -> Tensor:
        reducer = self._adasum_settings.reducer
        # The Adasum of losses would not measure progress.
        op = self.op if reducer.op.ordered else reducer.op
        op = op if op in (Sum, Average) else Average
        loss = loss.detach().clone()
        self._adasum_group.all_reduce(loss, op, name="closure's loss")
        return loss

    def _start_bucket(self, members: Sequence[Named], bucket: str) -> list[Reduction]:
        if not self._adasum_hooks.any_reached:
            # A second step without a backward in between: these are reduced already.
            left = [self._is_left(parameter) for _, parameter in members]
            self._adasum_kept += compress(members, left)
            members = list(compress(members, map(not_, left)))
        dense: list[Named] = []
        started: list[Reduction] = []
        for name, parameter in members:
            if parameter.grad is None:
                self._adasum_missing.append(parameter)
                parameter.grad = self._adasum_sparse_zeros.get(parameter)
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._adasum_sparse_zeros[parameter] = torch.zeros_like(parameter.grad)
                reducer = self._adasum_settings.reducer
                started.append(reducer.reduce_sparse_async(name, parameter, bucket))
            else:
                dense.append((name, parameter))
        # One kind, unless dtypes or devices have changed since the buckets were planned.
        for i, part in enumerate(by_kind(self._sorted(dense), dtype_of_gradient)):
            started.append(self._start_dense(part, f"{bucket}, {i}" if i else bucket))
        self._note_started(members, bucket)
        return started

    def _start_dense(self, members: Sequence[Named], bucket: str) -> Reduction:
        names, parameters = zip(*members, strict=True)
        reducer = self._adasum_settings.reducer
        # Here, because the buffers would refuse a dtype without naming the operator.
        reducer.op.check(dtype_of_gradient(parameters[0]))
        with outside_modes():
            # What backward has not made may be in memory that somebody goes on writing to: NumPy's,
            # or that of a CUDA graph.
            made = list(map(self._adasum_hooks.reached, parameters))
            placed = self._adasum_buffers.place(bucket, members, made)
            owners = self._owners_of(parameters)
            reduction = reducer.reduce_async(names, placed.fused, bucket, owners)

        def install(result: Any) -> None:
            placed.require_unchanged(names)
            reduction.install(result)
            placed.copy_out()

        return replace(reduction, install=install)

    @outside_modes()
    @torch.no_grad()
    def _finish_reductions(self) -> None:
        """Let a gradient that no rank had be None again, so that nothing steps by its zeros.

        OptimizerOrderError: a gradient was changed behind this rank's backward, which has left some
        unreduced, and another rank's backward has returned with these reduced: there the change
        comes behind their reduction, here before it.
        """
        missing, self._adasum_missing = self._adasum_missing, []
        kept, self._adasum_kept = self._adasum_kept, []
        if kept:
            self._adasum_check.run_on_kept(self._gradients_everywhere(kept))
        hooks = self._adasum_hooks
        named, changed = hooks.named, hooks.changed
        if not named:
            return
        absent = set(map(id, missing))
        had = [id(p) not in absent and p.grad is not None for _, p in named]
        reduced = [p in hooks.reduced_in_backward for _, p in named]
        # All ranks take part, but only one that lacks a gradient, or has changed one, has to read
        # the answer.
        counts = _counts_of([*had, *reduced], named[0][1].device)
        name = "which parameters have gradients"
        if self._adasum_left_out:
            name += f" (batches left out: {self._adasum_left_out})"
        self._adasum_group.all_reduce(counts, Sum, name=name)
        if not missing and not changed:
            return
        ranks_had, ranks_reduced = counts.view(2, -1).tolist()
        if changed and any(ranks_reduced[i] for i, here in enumerate(reduced) if not here):
            raise changed_unreduced(changed)
        ranks = dict(zip((id(p) for _, p in named), ranks_had, strict=True))
        for parameter in missing:
            if not ranks[id(parameter)]:
                parameter.grad = None

    def _sorted(self, members: list[Named]) -> list[Named]:
        """Return the members of a bucket in the order in which they lie in its buffer."""
        return members

    def _note_started(self, members: Sequence[Named], bucket: str) -> None:
        """Take note of parameters whose reductions have been started."""

    def _gradients_everywhere(self, named: Sequence[Named]) -> list[Named]:
        """Return the gradients of these parameters that all ranks have, with the same values."""
        return [(name, p.grad) for name, p in named if p.grad is not None]

    def _owners_of(self, parameters: Sequence[Tensor]) -> Owners:
        """Return the ranks that get the parameters' reduced gradients; None for all ranks."""
        return None


def _counts_of(flags: Sequence[bool], device: torch.device) -> Tensor:
    """Return a vector of zeros and ones; a GPU's host does not wait for it."""
    if all(flags):
        return torch.ones(len(flags), dtype=torch.float32, device=device)
    counts = torch.tensor(flags, dtype=torch.float32, device="cpu")
    return counts.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else counts
