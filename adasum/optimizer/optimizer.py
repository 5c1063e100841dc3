"""DistributedOptimizer: an optimizer whose gradients or steps are reduced over the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import torch

from adasum.compression import Compression, Compressor, require_compressor
from adasum.horovod.handles import require
from adasum.horovod.process_sets import ProcessSet, group_of
from adasum.optimizer.delta_method import DeltaMethod, InBackward, steps_by_parameter
from adasum.optimizer.gradient_method import GradientMethod
from adasum.optimizer.parameters import Groups, Named, name_parameters, plan_buckets
from adasum.optimizer.wire import Wire
from adasum.optimizer.wrapper import Distributed, check_passes, wrap
from adasum.reducer import Adasum
from collectives import Average, Reducer, Sum, default_group

__all__ = ["DistributedOptimizer"]

_METHODS = ("delta", "gradient")


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[Named] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reducer = Average,
    gradient_predivide_factor: float = 1.0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: ProcessSet | None = None,
    *,
    algorithm: str | None = None,
    method: str = "delta",
    step_in_backward: bool = False,
    memory_size: float | None = None,
    groups_size: int | None = None,
) -> torch.optim.Optimizer:
    """The optimizer, made to train one model on all ranks; Horovod's names and meaning.

    The answer is an instance of a subclass of the optimizer's class and shares everything with it:
    state, parameter groups, hooks. Learning-rate schedulers, GradScaler and isinstance work on it.
    With one rank it computes what the plain optimizer computes, to the bit and without copies.

    optimizer: freshly made or resumed; wrapped once only.
    named_parameters: (name, parameter) of every parameter, as model.named_parameters() gives them;
        names appear in errors, and their order fixes the order of reduction.
    compression: Compression.none, fp16 or bf16, or a class with their two methods.
    backward_passes_per_step: gradients of that many passes are summed before they are reduced; more
        passes before step() raise OptimizerOrderError.
    op: Average or Sum reduce the gradients while backward produces them. Adasum reduces what the
        local step changed: delta = after - before, per parameter, and before + delta is installed.
    gradient_predivide_factor: with Average, divides by it before the sum and by size/factor after.
    groups: None for buckets by size, a number of buckets, or lists of parameters that share one.
    sparse_as_dense: turns sparse gradients into dense ones first. Else Sum and Average gather them,
        the delta method leaves them to the optimizer, and Adasum of gradients refuses them.
    process_set: reduces over its ranks alone; on other ranks the optimizer is the plain one.
    algorithm: as `collectives` takes it: "vhdd", or "rechd/vhdd" for an average inside each
        node and Adasum across nodes (then scale the learning rate by local_size()).
    method: with Adasum, "gradient" reduces the gradients instead of the steps, as the DDP hook
        does: one optimizer state for all ranks, and clipping sees the reduced gradient.
    step_in_backward: with Adasum's delta method, takes each bucket's local step and sends its
        difference while backward runs; then nothing can be done to gradients before step().
    memory_size, groups_size: buckets by size close before they grow past so many MiB (25 unless
        either is given), or so many parameters.

    The group in use is the default group at this call. Errors: TypeError for no optimizer or no
    compression, ValueError for bad op, names, groups, counts, factors, algorithm and method.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if isinstance(optimizer, Distributed) or "_adasum_gradients" in optimizer.__dict__:
        raise ValueError("optimizer is already wrapped by DistributedOptimizer")
    if op not in (Sum, Average, Adasum):
        raise ValueError(f"op must be Sum, Average or Adasum, not {op!r}")
    require_compressor(compression)
    check_passes(backward_passes_per_step)
    require("gradient_predivide_factor", gradient_predivide_factor, int, float)
    require("algorithm", algorithm, str, type(None))
    require("sparse_as_dense", sparse_as_dense, bool)
    require("step_in_backward", step_in_backward, bool)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(
            f"gradient_predivide_factor must be positive, not {gradient_predivide_factor!r}"
        )
    kind = _method(optimizer, op, method, step_in_backward)
    group = default_group() if process_set is None else group_of(process_set)
    wire = Wire(group or default_group(), op, compression, algorithm)
    if gradient_predivide_factor != 1.0:
        wire.op = Sum
        wire.prescale = 1.0 / gradient_predivide_factor
        wire.postscale = gradient_predivide_factor / wire.group.size
    if algorithm is not None:
        wire.check()
    return wrap(
        optimizer,
        kind,
        wire,
        group,
        name_parameters(optimizer, named_parameters),
        passes=backward_passes_per_step,
        buckets=partial(
            plan_buckets, groups=groups, memory_size=memory_size, groups_size=groups_size
        ),
        sparse_as_dense=sparse_as_dense,
        early=kind is not DeltaMethod,
        final=kind is GradientMethod,
    )


def _method(
    optimizer: torch.optim.Optimizer, op: Reducer, method: str, step_in_backward: bool
) -> type[Distributed]:
    if method not in _METHODS:
        raise ValueError(f"method must be 'delta' or 'gradient', not {method!r}")
    if op is not Adasum or method == "gradient":
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
    return InBackward
