"""Steps under torch's GradScaler, which leaves unscaling and skipping to an optimizer of ours."""

from __future__ import annotations

import torch

from adasum.modes import outside_modes
from collectives import Group, Sum

# What GradScaler sets on an optimizer for the time of a step.
SCALER_STATE = ("grad_scale", "found_inf")


def found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether GradScaler has found a non-finite gradient on this rank."""
    return bool(optimizer.__dict__.get("found_inf", False))


@outside_modes()
def any_rank_found_inf(optimizer: torch.optim.Optimizer, group: Group) -> bool:
    """Return whether GradScaler has found one on any rank; collective where it is used."""
    found = optimizer.__dict__.get("found_inf")
    if found is None:
        return False
    total = torch.as_tensor(found, dtype=torch.float32).reshape(1).clone()
    group.all_reduce(total, Sum, name="found_inf")
    return bool(total.item())


def unscale(optimizer: torch.optim.Optimizer, itself: bool) -> None:
    """Divide the gradients by the scale that GradScaler has multiplied the loss by.

    Args:
        optimizer: Whose gradients.
        itself: Whether its own step does it.
    """
    scale = optimizer.__dict__.get("grad_scale")
    if scale is None or itself:
        return
    # By float64, as GradScaler does it: a subnormal's reciprocal is infinite in float32.
    inverse = scale.double().reciprocal().float()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.mul_(inverse.to(parameter.grad.device))
