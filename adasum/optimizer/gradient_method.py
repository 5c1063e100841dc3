"""The gradients themselves are reduced, while backward produces them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.optimizer.buffers import GradientBuffers, travels
from adasum.optimizer.gradients import Flight, OptimizerOrderError, Together
from adasum.optimizer.parameters import Named
from adasum.optimizer.wrapper import Distributed, densify, forgets_scaler
from collectives import Average, Sum

__all__ = ["GradientMethod"]


class GradientMethod(Distributed):
    """Each step sees the reduced gradients."""

    _adasum_asked = False
    # The sparse dimensions of gradients seen so far: where there is none, it counts as such zeros.
    _adasum_sparse: dict[Tensor, int]
    _adasum_buffers: GradientBuffers

    def _prepare(self) -> None:
        self._adasum_sparse = {}
        self._adasum_buffers = GradientBuffers()

    def synchronize(self) -> None:
        """Waits until every gradient is the reduced one, issuing what backward left over.

        backward waits for what it sent before it returns: where it produced every gradient, they
        are final without this call. A trainable parameter without a gradient contributes zeros and
        gets the reduced one, so that ranks on which backward took another way still agree.
        """
        self._adasum_asked = True
        self._adasum_gradients.synchronize()

    @forgets_scaler
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the reduced gradients.

        A closure is evaluated as often as the wrapped optimizer asks; each time its gradients are
        reduced, and so is a loss returned as a floating-point tensor, so that optimizers that
        decide by the loss decide alike on every rank.
        """
        gradients = self._adasum_gradients
        if closure is not None and self._adasum_skip:
            raise ValueError(
                "step(closure) within skip_synchronize() would leave its gradients unreduced"
            )
        amp = "found_inf" in self.__dict__
        if not self._adasum_alone and amp and not gradients.synchronized:
            raise OptimizerOrderError(
                "GradScaler looked at gradients that were not all reduced yet, since backward did "
                "not reach every parameter: call optimizer.synchronize() before scaler.unscale_() "
                "or scaler.step()"
            )
        if closure is not None:
            answer = self._local_step(self._reduced(closure))
        else:
            if self._adasum_skip:
                if not gradients.synchronized:
                    raise OptimizerOrderError(
                        "step() within skip_synchronize() needs synchronize() before it: the "
                        "gradients were not reduced"
                    )
            else:
                if self._adasum_asked and not amp:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() after "
                        "optimizer.synchronize(); the gradients are not reduced a second time",
                        stacklevel=3,
                    )
                gradients.synchronize()
            self._densify()
            answer = self._local_step()
        self._adasum_asked = False
        gradients.restart()
        return answer

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's, but gradients that lie in a bucket's buffer stay, as zeros.

        So backward adds to them there, and nothing is packed.
        """
        super().zero_grad(*args, **kwargs)
        self._adasum_asked = False
        self._adasum_buffers.clear()

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self._adasum_gradients.synchronize()
            self._densify()
            if (
                isinstance(loss, Tensor)
                and loss.is_floating_point()
                and self._adasum_group is not None
                and self._adasum_group.size > 1
            ):
                # Adasum of one number is no measure of progress.
                op = self._adasum_wire.op if self._adasum_wire.op in (Sum, Average) else Average
                loss = loss.detach().clone()
                self._adasum_group.all_reduce(loss, op, name="closure's loss")
            return loss

        return evaluate

    def _send(self, members: Sequence[Named], label: str) -> Flight | None:
        fused: list[Named] = []
        others: list[Named] = []
        flights: list[Flight] = []
        for name, parameter in members:
            # One frozen since backward has a gradient of this rank alone, and would step by it.
            if not (parameter.requires_grad or self._adasum_gradients.reached(parameter)):
                continue
            if self._adasum_sparse_as_dense:
                densify(parameter)
            if parameter.grad is None and parameter in self._adasum_sparse:
                parameter.grad = _sparse_zeros(parameter, self._adasum_sparse[parameter])
            if parameter.grad is not None and parameter.grad.is_sparse:
                self._adasum_sparse[parameter] = parameter.grad.sparse_dim()
                flights.append(self._adasum_wire.reduce_sparse_async(name, parameter, label))
            elif travels(parameter) and not _recorded(parameter):
                fused.append((name, parameter))
            else:
                others.append((name, parameter))
        if fused:
            names, parameters = zip(*fused, strict=True)
            gradients = self._adasum_buffers.place(label, parameters)
            flights.append(self._adasum_wire.reduce_async(names, gradients, label))
        if others:
            for _, parameter in others:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            names, parameters = zip(*others, strict=True)
            gradients = [parameter.grad for parameter in parameters]
            flights.append(self._adasum_wire.reduce_async(names, gradients, f"{label}, others"))
        return Together(flights) if flights else None


def _recorded(parameter: Tensor) -> bool:
    """Whether autograd goes on from the gradient (create_graph): it must not change places."""
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
