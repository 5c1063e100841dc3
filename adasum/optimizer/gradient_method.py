"""The gradient method: gradients are reduced while backward produces them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.optimizer.backward_hooks import OptimizerOrderError
from adasum.optimizer.bucket_buffers import GradientBuffers, fits_in_buffer
from adasum.optimizer.bucket_reduction import Owners, Reduction
from adasum.optimizer.distributed_mixin import DistributedMixin
from adasum.optimizer.parameters import Named
from collectives import Average, Sum


class GradientMethod(DistributedMixin):
    """Steps by the reduced gradients."""

    _adasum_early = True
    _adasum_final = True
    _adasum_synchronized_by_user = False
    # A sparse gradient without entries, by which a missing one is replaced.
    _adasum_sparse_zeros: dict[Tensor, Tensor]
    _adasum_buffers: GradientBuffers

    def _prepare(self) -> None:
        self._adasum_sparse_zeros = {}
        self._adasum_buffers = GradientBuffers()

    def synchronize(self) -> None:
        """Wait until every gradient is the reduced one.

        backward waits for what it started before it returns: where it produced every gradient, they
        are reduced without this call. A trainable parameter without a gradient contributes zeros
        and receives the reduced gradient, so that all ranks have one, whatever path backward took.
        """
        self._adasum_synchronized_by_user = True
        self._adasum_hooks.synchronize()

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
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
        result = self._local_step(closure)
        self._adasum_synchronized_by_user = False
        return result

    def _finish_gradients(self) -> None:
        # Not `synchronize`, after which step() is to be within skip_synchronize().
        self._adasum_hooks.synchronize()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Do as the wrapped optimizer, but keep gradients that lie in a bucket's buffer, as zeros.

        So backward accumulates in the buffer, and nothing has to be copied there.
        """
        super().zero_grad(*args, **kwargs)
        self._adasum_synchronized_by_user = False
        self._adasum_buffers.zero()

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the closure of a step, and reduce its gradients and its loss."""
        loss = super()._evaluate(closure)
        self._adasum_hooks.synchronize()
        if (
            isinstance(loss, Tensor)
            and loss.is_floating_point()
            and not self._adasum_settings.one_rank
        ):
            reducer = self._adasum_settings.reducer
            # The Adasum of losses would not measure progress.
            op = reducer.op if reducer.op in (Sum, Average) else Average
            loss = loss.detach().clone()
            reducer.group.all_reduce(loss, op, name="closure's loss")
        return loss

    def _start_bucket(self, members: Sequence[Named], bucket: str) -> list[Reduction]:
        in_buffer: list[Named] = []
        others: list[Named] = []
        started: list[Reduction] = []
        reducer = self._adasum_settings.reducer
        for name, parameter in members:
            # One frozen since backward has a gradient of this rank alone, and would step by it.
            if not (parameter.requires_grad or self._adasum_hooks.reached(parameter)):
                continue
            if parameter.grad is None:
                parameter.grad = self._adasum_sparse_zeros.get(parameter)
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._adasum_sparse_zeros[parameter] = torch.zeros_like(parameter.grad)
                started.append(reducer.reduce_sparse_async(name, parameter, bucket))
            elif fits_in_buffer(parameter) and (
                # One that autograd records (create_graph) has to stay where it is.
                parameter.grad is None or not parameter.grad.requires_grad
            ):
                in_buffer.append((name, parameter))
            else:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                others.append((name, parameter))
        if in_buffer:
            names, parameters = zip(*self._sorted(in_buffer), strict=True)
            fused = self._adasum_buffers.place(bucket, parameters)
            started.append(reducer.reduce_async(names, fused, bucket, self._owners_of(parameters)))
        if others:
            names, parameters = zip(*others, strict=True)
            gradients = [parameter.grad for parameter in parameters]
            owners = self._owners_of(parameters)
            started.append(reducer.reduce_async(names, gradients, f"{bucket}, others", owners))
        return started

    def _sorted(self, members: list[Named]) -> list[Named]:
        """Return the members of a bucket in the order in which they lie in its buffer."""
        return members

    def _owners_of(self, parameters: Sequence[Tensor]) -> Owners:
        """Return the ranks that get the parameters' reduced gradients; None for all ranks."""
        return None
