"""Find out whether a call is to be differentiated, and raise the error if it cannot be."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from kernels.call import LINEAR, Call


def is_followed(call: Call) -> bool:
    """Whether a derivative is asked for, in reverse or forward mode.

    Raises:
        ValueError: One is asked for and the call has none: its function is not linear, or it writes
            to tensors of the caller, and autograd does not see such writes.
    """
    if not (_asks(call) or _in_dual_level(call)):
        return False
    asking = [(name, tensor) for name, tensor in _named(call) if _follows(tensor)]
    for name, tensor in asking:
        if call.function not in LINEAR:
            refuse(name, tensor, f"{call.function} has no derivative")
        elif any(tensor is one for one in call.written):
            refuse(name, tensor, "it is written in place, of which autograd knows nothing")
        elif not (call.made or call.function == "unpack"):
            refuse(name, tensor, "what is written to out= has no derivative")
    return len(asking) > 0


def refuse_followed(call: Call, why: str) -> None:
    """Raise ValueError if a derivative is asked for. why: there is none, for the error's text."""
    if _asks(call) or _in_dual_level(call):
        for name, tensor in _named(call):
            if _follows(tensor):
                refuse(name, tensor, why)


def refuse(name: str, tensor: Tensor, why: str) -> None:
    """Raise the ValueError for a tensor. why: there is no derivative, for its text."""
    if tensor.requires_grad:
        raise ValueError(
            f"{name} requires grad, but {why}: pass {name}.detach(), or call under torch.no_grad()"
        )
    raise ValueError(
        f"{name} has a tangent, but {why}: pass forward_ad.unpack_dual({name}).primal, of "
        "torch.autograd"
    )


def _asks(call: Call) -> bool:
    """Whether grad mode is on and any tensor requires a gradient."""
    if not torch.is_grad_enabled():
        return False
    # A loop, because this runs on every call and `any` of a generator takes twice as long.
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
    """Whether forward-mode differentiation is on: only then is the primal another object."""
    return unpack_dual(call.out).primal is not call.out


def _follows(tensor: Tensor) -> bool:
    if tensor.requires_grad and torch.is_grad_enabled():
        return True
    return unpack_dual(tensor).tangent is not None


def _named(call: Call) -> list[tuple[str, Tensor]]:
    inputs = [(call.name(i), tensor) for i, tensor in enumerate(call.inputs)]
    return [*inputs, *call.others()]
