"""Whether autograd follows a call, and the error where it cannot."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from kernels.arguments import LINEAR, Call


def is_followed(call: Call) -> bool:
    """Whether a derivative is asked for, by reverse or forward mode.

    Raises ValueError where it is and the call has none: its function is not linear, or it writes
    into tensors of the caller's. Autograd sees neither who wrote them nor what was there before.
    """
    if not (_asks(call) or _in_dual_level(call)):
        return False
    asking = [(name, tensor) for name, tensor in _named(call) if _follows(tensor)]
    written = {id(tensor) for tensor in call.written}
    for name, tensor in asking:
        if call.function not in LINEAR:
            refuse(name, tensor, f"{call.function} has no derivative")
        elif id(tensor) in written:
            refuse(name, tensor, "it is written in place, of which autograd knows nothing")
        elif not (call.made or call.function == "unpack"):
            refuse(name, tensor, "what is written to out= has no derivative")
    return bool(asking)


def refuse_followed(call: Call, why: str) -> None:
    """Raise ValueError if a derivative is asked for, with these words why there is none."""
    if _asks(call) or _in_dual_level(call):
        for name, tensor in _named(call):
            if _follows(tensor):
                refuse(name, tensor, why)


def refuse(name: str, tensor: Tensor, why: str) -> None:
    """Raise ValueError, with these words why there is no derivative."""
    if tensor.requires_grad:
        raise ValueError(
            f"{name} requires grad, but {why}: pass {name}.detach(), or call under torch.no_grad()"
        )
    raise ValueError(
        f"{name} has a tangent, but {why}: pass forward_ad.unpack_dual({name}).primal, of "
        "torch.autograd"
    )


def _asks(call: Call) -> bool:
    """Whether any tensor requires a gradient, of which grad mode takes note."""
    if not torch.is_grad_enabled():
        return False
    # On every call: `any` of a generator takes as long again.
    for tensor in call.inputs:
        if tensor.requires_grad:
            return True
    found_inf, max_abs = call.findings
    return (
        call.out.requires_grad
        or (call.dots is not None and call.dots.requires_grad)
        or (call.coefficients is not None and call.coefficients.requires_grad)
        or (call.spread is not None and call.spread.requires_grad)
        or (found_inf is not None and found_inf.requires_grad)
        or (max_abs is not None and max_abs.requires_grad)
    )


def _in_dual_level(call: Call) -> bool:
    """Whether forward-mode differentiation is on: only then is a primal another object."""
    return unpack_dual(call.out).primal is not call.out


def _follows(tensor: Tensor) -> bool:
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return unpack_dual(tensor).tangent is not None


def _named(call: Call) -> list[tuple[str, Tensor]]:
    inputs = [(call.name(i), tensor) for i, tensor in enumerate(call.inputs)]
    return [*inputs, *call.others()]
