"""Errors for calls in an order that loses gradients, and for shapes that do not fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


class OptimizerOrderError(RuntimeError, AssertionError):
    """backward, zero_grad, synchronize and step were called in an order that loses gradients.

    Also an AssertionError, since Horovod raises that for the same mistakes.
    """


def too_many_passes(name: str, passes: int) -> OptimizerOrderError:
    """Return the error for a gradient that was computed too often before step()."""
    return OptimizerOrderError(
        f"the gradient of {name} was computed more than backward_passes_per_step={passes} times "
        "before step(): raise backward_passes_per_step to accumulate gradients, call step() "
        "of the optimizer that DistributedOptimizer returned in between, or, to discard gradients "
        "as in training a GAN, call optimizer.zero_grad() and not the model's"
    )


def too_late(name: str, when: str) -> OptimizerOrderError:
    """Return the error for a gradient that came after its bucket was sent."""
    return OptimizerOrderError(
        f"the gradient of {name} was computed after {when} and before step(): it would be left out "
        "of the reduction"
    )


def reduced_twice(name: str) -> OptimizerOrderError:
    """Return the error for a step if a newer optimizer has one of its parameters."""
    return OptimizerOrderError(
        f"the gradient of {name} would be reduced twice: a second DistributedOptimizer, made after "
        "the one that steps now, has the same parameter. Step only the newer one; put parameters "
        "that two losses share into one optimizer, as a group of their own, or into two with "
        "op=Adasum and method='delta'"
    )


def changed_under_way(name: str) -> OptimizerOrderError:
    """Return the error for a gradient that was changed after its bucket was sent."""
    return OptimizerOrderError(
        f"the gradient of {name} was changed while it was being reduced, as by a hook of another "
        "parameter: change it in its own hook, by register_post_accumulate_grad_hook, after "
        "backward (not with step_in_backward=True), or in a hook of "
        "optimizer.register_step_pre_hook"
    )


def given_too_late(name: str) -> OptimizerOrderError:
    """Return the error for a gradient that was set after the step's reduction had begun."""
    return OptimizerOrderError(
        f"the gradient of {name} was not reduced: it was set, or the parameter was made trainable "
        "or added to param_groups, between backward and step(). Do that before backward, or set "
        "the gradient to None"
    )


def explain_shapes(
    named: Sequence[tuple[str, Tensor]],
    state: Mapping[Tensor, Mapping[str, Any]],
    error: RuntimeError,
) -> None:
    """Raise ValueError if a gradient or state has another shape than its parameter.

    `error` is the exception that the optimizer's step raised.
    """
    for name, parameter in named:
        for key, value in {"gradient": parameter.grad, **state.get(parameter, {})}.items():
            # Fewer dimensions are right: some optimizers keep a number or vector for a matrix.
            alike = isinstance(value, Tensor) and value.dim() == parameter.dim() > 0
            if alike and value.shape != parameter.shape:
                raise ValueError(
                    f"the {key} of {name} has shape {tuple(value.shape)} and the parameter "
                    f"{tuple(parameter.shape)}: after a change of a parameter's shape, reshape or "
                    "delete its tensors in optimizer.state, and set its grad to None"
                ) from error
