"""Checks of DistributedOptimizer's arguments, made before it changes anything."""

from __future__ import annotations

import inspect
import logging
import sys
import warnings
from collections.abc import Sequence

import torch

from adasum.compression import Compressor
from adasum.horovod.arguments import require
from adasum.horovod.reduction_options import require_reducer
from adasum.optimizer.delta_method import DeltaMethod, DeltaMethodInBackward, steps_by_parameter
from adasum.optimizer.gradient_method import GradientMethod
from adasum.optimizer.method import Method
from adasum.optimizer.owners_method import OwnersMethod
from adasum.optimizer.pass_tree import require_passes
from adasum.optimizer.planning import Groups, Named
from adasum.optimizer.reduction import BucketReducer
from adasum.reducer import Adasum, AdasumReducer, require_declared
from collectives import Average, Group, Reducer, Sum
from collectives.reducers import AnyReducer
from collectives.transport import ThreadTransport
from collectives.tree_order import in_order

_logger = logging.getLogger(__name__)


def require_optimizer(optimizer: object) -> None:
    """Raise unless `optimizer` is a torch optimizer that is not wrapped yet."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    if "_adasum" in optimizer.__dict__:
        raise ValueError("optimizer is already wrapped by DistributedOptimizer")
    step = optimizer.__dict__.get("step")
    # A learning-rate scheduler's replacement only calls the class's step.
    if step is not None and inspect.unwrap(step) is not inspect.unwrap(type(optimizer).step):
        raise ValueError(
            "optimizer.step was replaced by another function, which DistributedOptimizer would not "
            "call: replace the step of the optimizer that it returns, or register a step hook"
        )


def require_operator(op: AnyReducer, weighted: bool, predivide_factor: float) -> Reducer:
    """Return a reducer for gradients; raise if the arguments do not fit together."""
    op = require_reducer(op)
    require_declared(op)
    require("weighted", weighted, bool)
    if not weighted and op is not Adasum:
        raise ValueError(f"weighted=False is for op=Adasum, whose pairs have weights, got {op!r}")
    require("gradient_predivide_factor", predivide_factor, int, float)
    if predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not 0 < predivide_factor <= sys.float_info.max:
        raise ValueError(
            f"gradient_predivide_factor must be > 0 and finite, got {predivide_factor!r}"
        )
    return op


def require_order(
    order: str | None,
    op: Reducer,
    accumulate: torch.dtype | None,
    passes: int,
    size: int,
    predivide_factor: float,
) -> None:
    """Raise unless the order is compatible with the other arguments."""
    in_order(op, order, accumulate)
    if order is None:
        return
    require_passes(passes, size)
    if accumulate is not None and passes > 1:
        raise ValueError(
            f"accumulate={accumulate} and backward_passes_per_step={passes} exclude each other: "
            "the sums of a rank's passes are of the gradients' dtype"
        )
    if predivide_factor != 1.0:
        raise ValueError(
            "gradient_predivide_factor and order='tree' exclude each other: it divides once, at "
            "the end"
        )


def require_groups(num_groups: int, groups: Groups) -> Groups:
    """Return the argument that divides parameters into buckets.

    `num_groups` is Horovod's older name of `groups`.
    """
    require_count("num_groups", num_groups, 0)
    if num_groups == 0:
        return groups
    if groups is not None:
        raise ValueError("groups supersedes num_groups: give only groups")
    warnings.warn("num_groups is deprecated: use groups", DeprecationWarning, stacklevel=3)
    return num_groups


def choose_method(
    optimizer: torch.optim.Optimizer,
    op: Reducer,
    method: str | None,
    mode: str | None,
    step_in_backward: bool,
) -> type[Method]:
    """Return the class of the method; raise ValueError if arguments exclude each other."""
    if method not in (None, "delta", "gradient"):
        raise ValueError(f"method must be 'delta' or 'gradient', got {method!r}")
    if mode not in (None, "owners"):
        raise ValueError(f"mode must be 'owners' or None, got {mode!r}")
    if mode is not None:
        kind = type(optimizer)
        by_parameter = steps_by_parameter(kind) or issubclass(kind, torch.optim.Muon)
        require_owners(optimizer, method, step_in_backward, by_parameter)
        return OwnersMethod
    # Sum and Average always reduce gradients.
    may_choose = op not in (Sum, Average)
    if method == "delta" and may_choose and not op.averages:
        raise ValueError(
            f"method='delta' needs an op that averages, such as Adasum: a {op} of steps overshoots"
        )
    by_delta = method == "delta" if method else isinstance(op, AdasumReducer)
    if not (by_delta and may_choose):
        if step_in_backward:
            raise ValueError("step_in_backward needs op=Adasum and method='delta'")
        return GradientMethod
    if not step_in_backward:
        return DeltaMethod
    if not steps_by_parameter(type(optimizer)):
        raise ValueError(
            f"step_in_backward needs an optimizer known to step each parameter by itself, which "
            f"{type(optimizer).__name__} is not: pass step_in_backward=False"
        )
    return DeltaMethodInBackward


def require_reducer_of(
    group: Group,
    op: Reducer,
    compression: type[Compressor],
    algorithm: str | None,
    predivide_factor: float,
) -> BucketReducer:
    """Return the reducer of buckets; raise ValueError if `algorithm` cannot run `op`."""
    if algorithm is not None:
        try:
            group.check_algorithm(algorithm, op)
        except ValueError as error:
            raise ValueError(f"algorithm={algorithm!r}: {error}") from None
    if predivide_factor == 1.0:
        return BucketReducer(group, op, compression, algorithm)
    scales = 1.0 / predivide_factor, predivide_factor / group.size
    return BucketReducer(group, Sum, compression, algorithm, *scales)


def require_owners(
    optimizer: torch.optim.Optimizer,
    method: str | None,
    step_in_backward: bool,
    known_to_step_by_parameter: bool,
) -> None:
    """Raise ValueError if mode="owners" excludes an argument; warn about unknown optimizers."""
    if method == "delta" or step_in_backward:
        other = "step_in_backward=True" if step_in_backward else "method='delta'"
        raise ValueError(
            f"mode='owners' and {other} exclude each other: owners step by reduced gradients, "
            "which is method='gradient'"
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"mode='owners' needs an optimizer that steps each parameter by itself, which "
            f"{type(optimizer).__name__} does not: pass mode=None"
        )
    if not known_to_step_by_parameter:
        _logger.warning(
            "mode='owners' needs an optimizer that steps each parameter by itself, which %s is not "
            "known to do: one that looks at all gradients at once, as by their common norm, sees "
            "only its owner's",
            type(optimizer).__name__,
        )


def require_own_autograd(group: Group, named: Sequence[Named]) -> None:
    """Raise ValueError if ranks are threads that share autograd's thread of a GPU.

    A reduction in this thread would wait for another rank's backward, which is queued behind it.
    """
    on_gpu = next((each for _, each in named if each.is_cuda), None)
    if on_gpu is not None and group.size > 1 and isinstance(group.transport, ThreadTransport):
        raise ValueError(
            "ranks that are threads share autograd's one thread of a GPU, and gradients that are "
            f"reduced in backward would wait for each other there: a parameter is on "
            f"{on_gpu.device}; start a process for each rank, or pass op=Adasum with "
            "method='delta', which reduces in step()"
        )


def require_count(argument: str, value: object, least: int, meaning: str = "") -> None:
    """Raise ValueError unless the value is an int >= `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{argument} must be an int >= {least}{meaning}, got {value!r}")
