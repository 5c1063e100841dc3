"""Methods of an optimizer's own that change parameters outside of its step().

SAM has first_step() and second_step(), schedule-free optimizers eval() and train(). With gradients
that are reduced in backward they are right as they are. Where a step's difference is reduced, or
each rank steps a part, what they do is this rank's alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from adasum.optimizer.errors import OptimizerOrderError

_RIGHT = (
    "pass method='gradient' (or op=Average without mode), by which gradients are "
    "reduced in backward"
)


def guard_methods(both: type, kind: type[torch.optim.Optimizer], method: str) -> None:
    """Guard the public methods of `kind` that torch's optimizers do not have, in the class `both`.

    ValueError: the optimizer trains at other parameters than it evaluates at. `method` is what the
    optimizer was asked to do, for errors.
    """
    functions = {
        name: function
        for name, function in inspect.getmembers(kind, inspect.isfunction)
        if not name.startswith("_") and not hasattr(torch.optim.Optimizer, name)
    }
    if "train" in functions and "eval" in functions:
        raise ValueError(
            f"{kind.__name__} changes parameters in train() and eval(), by a state that with "
            f"{method} differs between the ranks: {_RIGHT}"
        )
    for name, function in functions.items():
        setattr(both, name, _guarded(function, method))


def _guarded(function: Callable[..., Any], method: str) -> Callable[..., Any]:
    """Return a method that may change parameters within step() alone.

    Called elsewhere it raises OptimizerOrderError where it has changed them, and puts them back,
    for which it copies the parameters. `method` is what the optimizer was asked to do, for the
    error.
    """

    @wraps(function)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        if self._adasum.stepping or self._adasum.settings.one_rank:
            return function(self, *args, **options)
        parameters = [each.detach() for group in self.param_groups for each in group["params"]]
        before = [each.clone() for each in parameters]
        result = function(self, *args, **options)
        if all(map(_same, parameters, before)):
            return result
        with torch.no_grad():
            for parameter, value in zip(parameters, before, strict=True):
                parameter.copy_(value)
        raise OptimizerOrderError(
            f"{function.__name__}() changed parameters outside of step(), where with {method} "
            f"nothing is reduced; they are as they were. {_RIGHT[0].upper()}{_RIGHT[1:]}"
        )

    return call


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
