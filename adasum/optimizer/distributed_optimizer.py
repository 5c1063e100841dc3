"""DistributedOptimizer: wraps an optimizer so that ranks reduce its gradients or its steps."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, Literal

import torch

from adasum.compression import Compression, Compressor, require_compressor
from adasum.horovod.arguments import require
from adasum.horovod.capabilities import warn_of_scaled_rate
from adasum.horovod.process_sets import ProcessSet, global_process_set, group_of
from adasum.optimizer.arguments import (
    require_count,
    require_groups,
    require_local_steps,
    require_operator,
    require_optimizer,
    require_order,
    require_own_autograd,
    require_owners,
)
from adasum.optimizer.buckets.planning import Groups, Named, name_parameters, plan_buckets
from adasum.optimizer.buckets.reduction import BucketReducer
from adasum.optimizer.consistency.parameter_check import ParameterCheck, Setting, checks_parameters
from adasum.optimizer.consistency.settings import describe_hyperparameters, describe_value
from adasum.optimizer.delta_method import DeltaMethod, DeltaMethodInBackward, steps_by_parameter
from adasum.optimizer.distributed_mixin import DistributedMixin
from adasum.optimizer.gradient_method import GradientMethod
from adasum.optimizer.local_steps import LocalStepsMethod
from adasum.optimizer.owners_method import OwnersMethod, SoleOwnerMethod
from adasum.optimizer.wrapped_step import Settings
from adasum.optimizer.wrapping import wrap
from adasum.reducer import UNWEIGHTED, AdasumReducer
from collectives import Average, Group, Reducer, Sum, default_group
from collectives.tree_order import in_order


class DistributedOptimizer(DistributedMixin):
    """An optimizer that trains one model on all ranks; Horovod's names and meaning.

    It is an instance of the given optimizer's class, too, and shares everything with it: state,
    parameter groups, hooks. Learning-rate schedulers and GradScaler work on it. With one rank it
    computes what the plain optimizer computes, bit for bit and without copies. It reduces over the
    group that is the default group when it is made.

    Args:
        optimizer: Freshly made or resumed; can be wrapped once only.
        named_parameters: (name, parameter) of every parameter, as model.named_parameters() gives
            them. Names appear in errors, and their order fixes the order of reduction.
        compression: Compression.none, fp16 or bf16, or a class with their two methods.
        backward_passes_per_step: Gradients of so many passes are summed before they are reduced;
            more passes before step() raise OptimizerOrderError.
        op: Average or Sum reduce the gradients while backward produces them. Adasum reduces what
            the local step changed: delta = after - before, per parameter, and before + reduced
            delta is installed. Another Reducer, which says whether it `averages`, reduces gradients
            as Average does; a rank without a gradient counts as zeros.
        gradient_predivide_factor: With Average, divides by it before the sum and by size/factor
            after it.
        num_groups: Deprecated by Horovod in favour of `groups`, which it stands for unless 0.
        groups: None for buckets by size, a number of buckets, or lists of parameters, each a
            bucket.
        sparse_as_dense: Makes sparse gradients dense first. Without it Sum and Average gather
            them, the delta method leaves them to the optimizer, and Adasum of gradients refuses
            them. SparseAdam, which refuses dense ones, is given the reduced ones as sparse again.
        process_set: Reduces over its ranks alone; on other ranks the optimizer is the plain one.
        algorithm: As `collectives` takes it: "vhdd", or "rechd/vhdd" for an average within each
            node and Adasum across nodes (then scale the learning rate by local_size()).
        mode: "owners" keeps each parameter's optimizer state on one rank, its owner: gradients are
            reduced onto the owners, who step and broadcast the parameters (ZeRO's stage 1). By Sum
            and Average gradients go to the owners alone, with the bits of rd and rechd, unless
            another algorithm is asked for. The optimizer must step each parameter by itself. None
            keeps the state on every rank.
        local_steps: So many steps a rank takes of its own before their difference is reduced, with
            Adasum or Average; the optimizer's `reduce_local_steps()` reduces before that. 1 reduces
            at every step.
        weighted: With Adasum, weighs both sides of each pair by the ranks behind them, so that
            parallel gradients of n ranks weigh 1/n each, whatever n. False weighs them alike, as
            Horovod does; of a power of two of ranks, but for "xring" and the other algorithms in
            rank order, both are the same, bit for bit.
        check_parameters: At the first step, and for parameters that come later at the next, ranks
            compare a checksum of every parameter, the optimizer's class, its hyperparameters and
            these arguments, and raise CollectiveMismatchError where one differs. False leaves that
            out, and `check_every` with it. Unless given, the environment variable
            ADASUM_CHECK_PARAMETERS says it, 0 or 1, and 1 without that. All ranks must say the
            same.
        method: "gradient" reduces the gradients, as the DDP hook does: one optimizer state for all
            ranks, and clipping sees the reduced gradient. "delta" reduces what each rank's own step
            changed, by Adasum or an operator of yours that averages. Unless given, "delta" with
            Adasum, but for mode="owners", and "gradient" with any other.
        step_in_backward: With the delta method, takes each bucket's local step and starts
            reducing its difference while backward runs; nothing can be done to gradients before
            step() then.
        memory_size: Buckets by size close before they grow past so many MiB; 25 unless this or
            `groups_size` is given.
        groups_size: Buckets by size close before they grow past so many parameters.
        check_every: Every so many steps ranks compare the hyperparameters and a part of the
            parameters, 16 MiB, the next one each time, and raise CollectiveMismatchError where they
            have come to differ; 0 for never.
        order: "tree", with Sum and Average of gradients: every element is one balanced tree, whose
            leaves are the passes of all ranks, rank by rank, so that 8 ranks of one pass, 4 of 2
            and 1 of 8 reduce to the same bits, whatever the buckets, algorithm and transport.
            Passes of several ranks are 1, 2, 4, 8, ...; between two of them there are no
            gradients, so that optimizer.zero_grad() leaves passes out, and model.zero_grad() does
            not. Average divides once, by ranks times passes.
        accumulate: With an order, of one pass: torch.float32 to add in float32 and round once.
        gradient_as_bucket_view: Gradients that are reduced are views of their buckets' buffers, as
            with DDP's argument of this name. False gives them memory of their own, as much again.

    Raises:
        TypeError: `optimizer` is no optimizer, `compression` no compression, or another argument
            has the wrong type.
        ValueError: An argument or ADASUM_CHECK_PARAMETERS has a bad value, or arguments do not go
            together.

    Examples:
        >>> hvd.init()
        >>> model = torch.nn.Linear(2, 1)
        >>> plain = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> optimizer = hvd.DistributedOptimizer(
        ...     plain, model.named_parameters(), op=hvd.Adasum, method="gradient"
        ... )
        >>> model(torch.ones(4, 2)).mean().backward()
        >>> _ = optimizer.step()
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[Named] | None = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        op: Reducer = Average,
        gradient_predivide_factor: float = 1.0,
        num_groups: int = 0,
        groups: Groups = None,
        sparse_as_dense: bool = False,
        process_set: ProcessSet | None = None,
        *,
        algorithm: str | None = None,
        mode: Literal["owners"] | None = None,
        weighted: bool = True,
        check_parameters: bool | None = None,
        local_steps: int = 1,
        method: Literal["delta", "gradient"] | None = None,
        step_in_backward: bool = False,
        memory_size: float | None = None,
        groups_size: int | None = None,
        check_every: int = 100,
        gradient_as_bucket_view: bool = True,
        order: Literal["tree"] | None = None,
        accumulate: torch.dtype | None = None,
    ) -> None:
        require_optimizer(optimizer)
        require_operator(op, weighted, gradient_predivide_factor)
        require_compressor(compression)
        require_count("backward_passes_per_step", backward_passes_per_step, 1)
        require("algorithm", algorithm, str, type(None))
        require("sparse_as_dense", sparse_as_dense, bool)
        require("step_in_backward", step_in_backward, bool)
        require("check_parameters", check_parameters, bool, type(None))
        require("gradient_as_bucket_view", gradient_as_bucket_view, bool)
        require_count("check_every", check_every, 0, ", 0 for never")
        require_local_steps(
            local_steps, op, method, mode, step_in_backward, backward_passes_per_step
        )
        kind = _method(optimizer, op, method, mode, step_in_backward, local_steps)
        groups = require_groups(num_groups, groups)
        named = name_parameters(optimizer, named_parameters)
        members = default_group() if process_set is None else group_of(process_set)
        group, reduces_by = members or default_group(), op if weighted else UNWEIGHTED
        size = 1 if members is None else group.size
        passes, factor = backward_passes_per_step, gradient_predivide_factor
        require_order(order, op, accumulate, passes, size, factor)
        if members is not None:
            reduces_by = in_order(reduces_by, order, accumulate, passes)
        reducer = _reducer(group, reduces_by, compression, algorithm, gradient_predivide_factor)
        by_size = partial(plan_buckets, memory_size=memory_size, groups_size=groups_size)
        settings = Settings(
            reducer,
            by_size,
            backward_passes_per_step,
            sparse_as_dense,
            one_rank=members is None or members.size == 1,
            op=op,
            process_set=process_set or global_process_set,
            local_steps=local_steps,
            gradient_as_bucket_view=gradient_as_bucket_view,
        )
        comparing = checks_parameters(check_parameters) and not settings.one_rank
        asked = [
            ("op", str(reduces_by)),
            ("the method", kind.__name__),
            ("local_steps", str(local_steps)),
            ("compression", describe_value(compression)),
            ("algorithm", repr(algorithm)),
            ("gradient_predivide_factor", str(float(gradient_predivide_factor))),
            ("order", str(order)),
            ("accumulate", str(accumulate)),
            ("sparse_as_dense", str(sparse_as_dense)),
            ("check_every", str(check_every)),
        ]
        if isinstance(op, AdasumReducer):
            warn_of_scaled_rate(algorithm)
        if kind._adasum_early and not settings.one_rank:
            require_own_autograd(group, named)
        if settings.one_rank and kind is OwnersMethod:
            kind = SoleOwnerMethod
        wrap(self, optimizer, kind, named, by_size(named, groups), settings)
        said = partial(_settings_of, weakref.ref(self), asked)
        self._adasum_check = ParameterCheck(group, said, every=check_every, compares=comparing)
        self._adasum_check.add(named)


def _settings_of(
    reference: weakref.ref[DistributedOptimizer], asked: Sequence[Setting]
) -> list[Setting]:
    """Return what ranks have to ask for alike, the hyperparameters as they are now."""
    wrapper: Any = reference()
    passes = ("backward_passes_per_step", str(wrapper.backward_passes_per_step))
    return [*describe_hyperparameters(wrapper, wrapper._adasum_base), *asked, passes]


def _reducer(
    group: Group,
    op: Reducer,
    compression: type[Compressor],
    algorithm: str | None,
    predivide_factor: float,
) -> BucketReducer:
    """Return the reducer of buckets; ValueError where `algorithm` cannot run `op`."""
    if algorithm is not None:
        try:
            group.check_algorithm(algorithm, op)
        except ValueError as error:
            raise ValueError(f"algorithm={algorithm!r}: {error}") from None
    reducer = BucketReducer(group, op, compression, algorithm)
    if predivide_factor != 1.0:
        reducer.op = Sum
        reducer.prescale = 1.0 / predivide_factor
        reducer.postscale = predivide_factor / group.size
    return reducer


def _method(
    optimizer: torch.optim.Optimizer,
    op: Reducer,
    method: str | None,
    mode: str | None,
    step_in_backward: bool,
    local_steps: int,
) -> type[DistributedMixin]:
    if method not in (None, "delta", "gradient"):
        raise ValueError(f"method must be 'delta' or 'gradient', not {method!r}")
    if mode not in (None, "owners"):
        raise ValueError(f"mode must be 'owners' or None, not {mode!r}")
    if mode is not None:
        kind = type(optimizer)
        by_parameter = steps_by_parameter(kind) or issubclass(kind, torch.optim.Muon)
        require_owners(optimizer, method, step_in_backward, by_parameter)
        return OwnersMethod
    if local_steps > 1:
        return LocalStepsMethod
    # Sum and Average take gradients whatever is asked for.
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
