"""The gradient method: gradients are reduced while backward produces them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.optimizer.backward_hooks import OptimizerOrderError
from adasum.optimizer.bucket_buffers import GradientBuffers, fits_in_buffer
from adasum.optimizer.bucket_reduction import Reduction, ReductionList
from adasum.optimizer.distributed_mixin import (
    DistributedMixin,
    clears_scaler_state_on_error,
    densify,
)
from adasum.optimizer.parameters import Named
from collectives import Average, Sum


class GradientMethod(DistributedMixin):
    """Steps by the reduced gradients."""

    _adasum_synchronized_by_user = False
    # The sparse dimensions of gradients seen so far: a missing one is reduced as such zeros.
    _adasum_sparse_dims: dict[Tensor, int]
    _adasum_buffers: GradientBuffers

    def _prepare(self) -> None:
        self._adasum_sparse_dims = {}
        self._adasum_buffers = GradientBuffers()

    def synchronize(self) -> None:
        """Wait until every gradient is the reduced one.

        backward waits for what it started before it returns: where it produced every gradient, they
        are reduced without this call. A trainable parameter without a gradient contributes zeros
        and receives the reduced gradient, so that ranks whose backward took different paths agree.
        """
        self._adasum_synchronized_by_user = True
        self._adasum_hooks.synchronize()

    @clears_scaler_state_on_error
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step with the reduced gradients.

        A closure is evaluated as often as the wrapped optimizer asks for. Each time its gradients
        are reduced, and so is a loss returned as a floating-point tensor, so that optimizers that
        decide by the loss decide alike on every rank.
        """
        hooks = self._adasum_hooks
        if closure is not None and self._adasum_skip:
            raise ValueError(
                "step(closure) within skip_synchronize() would leave its gradients unreduced"
            )
        scaled = "found_inf" in self.__dict__
        if not self._adasum_one_rank and scaled and not hooks.synchronized:
            raise OptimizerOrderError(
                "GradScaler looked at gradients that were not all reduced yet, since backward did "
                "not reach every parameter: call optimizer.synchronize() before scaler.unscale_() "
                "or scaler.step()"
            )
        if closure is not None:
            result = self._local_step(self._reducing(closure))
        else:
            self._finish_gradients(scaled)
            result = self._local_step()
        self._adasum_synchronized_by_user = False
        hooks.restart()
        return result

    def _finish_gradients(self, scaled: bool) -> None:
        hooks = self._adasum_hooks
        if not self._adasum_skip:
            if self._adasum_synchronized_by_user and not scaled:
                warnings.warn(
                    "optimizer.step() called without optimizer.skip_synchronize() after "
                    "optimizer.synchronize(); the gradients are not reduced a second time",
                    stacklevel=4,
                )
            hooks.synchronize()
        elif not hooks.synchronized:
            raise OptimizerOrderError(
                "step() within skip_synchronize() needs synchronize() before it: the gradients "
                "were not reduced"
            )
        self._densify()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Do as the wrapped optimizer, but keep gradients that lie in a bucket's buffer, as zeros.

        So backward accumulates in the buffer, and nothing has to be copied there.
        """
        super().zero_grad(*args, **kwargs)
        self._adasum_synchronized_by_user = False
        self._adasum_buffers.zero()

    def _reducing(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure with its gradients and its loss reduced."""

        def evaluate() -> Any:
            loss = closure()
            self._adasum_hooks.synchronize()
            self._densify()
            if (
                isinstance(loss, Tensor)
                and loss.is_floating_point()
                and self._adasum_group is not None
                and self._adasum_group.size > 1
            ):
                # The Adasum of losses would not measure progress.
                op = self._adasum_reducer.op
                loss = loss.detach().clone()
                self._adasum_group.all_reduce(
                    loss, op if op in (Sum, Average) else Average, name="closure's loss"
                )
            return loss

        return evaluate

    def _start_bucket(self, members: Sequence[Named], bucket: str) -> Reduction | None:
        in_buffer: list[Named] = []
        others: list[Named] = []
        started: list[Reduction] = []
        reducer = self._adasum_reducer
        for name, parameter in members:
            # One frozen since backward has a gradient of this rank alone, and would step by it.
            if not (parameter.requires_grad or self._adasum_hooks.reached(parameter)):
                continue
            if self._adasum_sparse_as_dense:
                densify(parameter)
            if parameter.grad is None and parameter in self._adasum_sparse_dims:
                parameter.grad = _sparse_zeros(parameter, self._adasum_sparse_dims[parameter])
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._adasum_sparse_dims[parameter] = parameter.grad.sparse_dim()
                started.append(reducer.reduce_sparse_async(name, parameter, bucket))
            elif fits_in_buffer(parameter) and not _is_recorded(parameter):
                in_buffer.append((name, parameter))
            else:
                others.append((name, parameter))
        if in_buffer:
            names, parameters = zip(*in_buffer, strict=True)
            fused = self._adasum_buffers.place(bucket, parameters)
            started.append(reducer.reduce_async(names, fused, bucket))
        if others:
            for _, parameter in others:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            names, parameters = zip(*others, strict=True)
            gradients = [parameter.grad for parameter in parameters]
            started.append(reducer.reduce_async(names, gradients, f"{bucket}, others"))
        return ReductionList(started) if started else None


def _is_recorded(parameter: Tensor) -> bool:
    """Return whether autograd records the gradient (create_graph), which then has to stay."""
    return parameter.grad is not None and parameter.grad.requires_grad


def _sparse_zeros(parameter: Tensor, sparse_dim: int) -> Tensor:
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=parameter.device)
    values = torch.empty(
        0, *parameter.shape[sparse_dim:], dtype=parameter.dtype, device=parameter.device
    )
    return torch.sparse_coo_tensor(
        indices, values, parameter.shape, device=values.device, check_invariants=True
    )


# torch wraps the step of any optimizer class not so marked, and would run step hooks twice.
vars(GradientMethod)["step"].hooked = True
