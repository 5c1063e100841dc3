"""Find out whether a call is to be differentiated, and raise an error if it cannot be."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from kernels.call import LINEAR, Call


def is_followed(call: Call) -> bool:
    """Whether a derivative is asked for.

    Raises:
        ValueError: A derivative is asked for, but the call is not differentiable: its function is
            not linear, it writes to the caller's tensors, which autograd does not see, or the
            derivative is in forward mode.
    """
    if (asked := _asking(call)) is None:
        return False
    _, tensor = asked
    if call.function not in LINEAR:
        why = f"{call.function} has no derivative"
    elif not (tensor.requires_grad and torch.is_grad_enabled()):
        why = f"{call.function} has no derivative in forward mode"
    elif any(tensor is one for one in call.written):
        why = "it is written in place, of which autograd knows nothing"
    elif not (call.made or call.function == "unpack") or call.found_inf is not None:
        why = "a call with out= or found_inf= has no derivative"
    else:
        return True
    _refuse(*asked, why)
    return False


def refuse_followed(call: Call, why: str) -> None:
    """Raise ValueError if a derivative is asked for. why: The reason for having none."""
    if (asked := _asking(call)) is not None:
        _refuse(*asked, why)


def _refuse(name: str, tensor: Tensor, why: str) -> None:
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires grad, but {why}: pass {name}.detach(), or call under torch.no_grad()"
        )
    raise ValueError(
        f"{name} has a tangent, but {why}: pass forward_ad.unpack_dual({name}).primal, of "
        "torch.autograd"
    )


def _asking(call: Call) -> tuple[str, Tensor] | None:
    """Return the first tensor that asks for a derivative, with its name in messages."""
    enabled = torch.is_grad_enabled()
    # The primal is another object only inside a forward-mode level.
    dual = unpack_dual(call.out).primal is not call.out
    if not dual and not enabled:
        return None
    inputs = [(call.name(i), tensor) for i, tensor in enumerate(call.inputs)]
    for name, tensor in (*inputs, *call.others()):
        if enabled and tensor.requires_grad:
            return name, tensor
        if dual and unpack_dual(tensor).tangent is not None:
            return name, tensor
    return None
