"""Sum, Average or Adasum over the replicas of a model that FSDP2 (`fully_shard`) shards.

mesh = init_device_mesh("cuda", (replicas, shards), mesh_dim_names=("replicate", "shard"))
for block in model.blocks:
    fully_shard(block, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])
state = adasum.HookState(op=adasum.Adasum, process_group=mesh.get_group("replicate"))
adasum.register_fsdp_hook(model, state)

Sums over the shards in a specified order, with or without replicas:

adasum.register_fsdp_hook(model, adasum.HookState(order="tree"))
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from itertools import accumulate
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import Never

import collectives
from adasum.ddp import HookState, require_known, require_state
from adasum.optimizer.consistency.parameter_check import require_equal_parameters
from adasum.real_pairs import as_reals
from collectives import Group, Needs, Operands, Reducer, Sum, Work
from collectives.modes import outside_modes
from collectives.reducers import SumReducer
from collectives.tree_order import in_order

_logger = logging.getLogger(__name__)


def register_fsdp_hook(
    model: nn.Module,
    state: HookState,
    *,
    order: Literal["tree"] | None = None,
    wire_dtype: torch.dtype | None = None,
    **unknown: Never,
) -> None:
    """Reduce the gradients of every `fully_shard` unit over the replicas, in backward; collective.

    FSDP averages over the shards of each replica; then `state.op` runs over the replicas. With
    Adasum that is the two-level form, so the learning rate may grow with the number of shards.
    Every whole parameter is a segment: its dot products are summed over the shards too, by two
    small messages per level.

    `set_requires_all_reduce(False)` adds up the shards' averages without this reduction, as in
    FSDP2 on a mesh of two dimensions. The next backward under `set_requires_all_reduce(True)`
    reduces the sum; until then parameters have no gradients. `set_requires_gradient_sync(False)`
    skips both reductions. `set_gradient_divide_factor` sets the divisor of the sum over the shards.

    Replicas must start with equal parameters: seed them alike, or load the same checkpoint. They
    compare their parameters at each unit's first reduction, and backward raises
    CollectiveMismatchError if they differ. A trainable parameter without a gradient counts as zeros
    and receives the result, because FSDP does not tell which ones it left out (an error if torch
    has no set_reduce_scatter_unused_params). Each unit's backward waits for its reduction, because
    FSDP hands out the gradients right after it.

    An order also holds for FSDP's own sums over the shards: they are made by
    `Group.reduce_scatter`, and every element is summed by the balanced tree over the shards. FSDP
    still chooses the divisor. FSDP adds several backward passes from left to right (docs/bits.md
    says when that is the tree).

    Args:
        model: Sharded on a 1-D mesh (`mesh["shard"]`).
        state: Needs the replicas' process group, and no observer. With an order and Sum or Average
            the process group may be None: there are no replicas then, and `op` is not used.
        order: "tree", the order of the sums over the shards. Default: the order of the state's op.
        wire_dtype: With an order and `MixedPrecisionPolicy(reduce_dtype=torch.float32)`:
            torch.bfloat16 or torch.float16. Gradients are rounded to it for sending to the other
            shards; sums are made in float32 and not rounded.
        **unknown: Anything else is an error that says where it belongs.

    Raises:
        TypeError: An argument has the wrong type, is unknown, or wire_dtype is another dtype.
        ValueError: `order` is not "tree", or there is a wire_dtype without an order; the model has
            no unit, or is sharded over a mesh of more dimensions, so that FSDP's own all-reduce
            would run before this one; a unit has another hook; the state has neither a
            process_group nor an order; or it has an observer, which would see shards only.
        RuntimeError: torch is built without torch.distributed.
    """
    if not dist.is_available():
        raise RuntimeError(
            f"torch {torch.__version__} is built without torch.distributed, which FSDP is a part "
            "of: pip install a torch that has it"
        )
    from torch.distributed.fsdp import FSDPModule

    require_known(
        "register_fsdp_hook",
        unknown,
        {name: f"pass it to HookState({name}=...)" for name in signature(HookState).parameters},
    )
    require_state(state)
    in_order(Sum, order)
    ordered = order is not None or state.op.ordered
    if wire_dtype is not None and not ordered:
        raise ValueError("wire_dtype is for sums with an order: pass order='tree'")
    if wire_dtype not in (None, torch.bfloat16, torch.float16):
        raise TypeError(f"wire_dtype must be torch.bfloat16 or torch.float16, got {wire_dtype!r}")
    found = _groups_of(model, state, FSDPModule, ordered)
    if state.process_group is not None:
        # Create the group of the replicas now, while all ranks are in this call.
        _ = state.group
    for unit, group, mesh in found:
        # This group sums dot products and, with an order, gradients.
        shards = collectives.from_process_group(mesh.get_group(), timeout=state.timeout)
        if ordered:
            accumulate = state.op.order_options.get("accumulate")
            unit.set_custom_reduce_scatter(_ReduceScatter(shards, accumulate, wire_dtype))
        if state.process_group is None:
            continue
        if hasattr(unit, "set_reduce_scatter_unused_params"):
            unit.set_reduce_scatter_unused_params(True, recurse=False)
        unit.set_all_reduce_hook(_Hook(group, state, shards))


def _groups_of(
    model: nn.Module, state: HookState, kind: type, ordered: bool
) -> list[tuple[Any, Any, Any]]:
    """Return (unit, group of parameters, mesh) for each group that FSDP reduces; or raise."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if state.process_group is None and not (ordered and isinstance(state.op, SumReducer)):
        raise ValueError(
            'state needs process_group, the replicas of a shard: mesh.get_group("replicate"); or, '
            'without replicas, order="tree" for the sums over the shards'
        )
    if state.observer is not None:
        raise ValueError("observer: cannot be used with FSDP, which reduces shards of gradients")
    units = [module for module in model.modules() if isinstance(module, kind)]
    if not units:
        raise ValueError("model has no fully_shard module: call fully_shard first")
    groups = [(unit, group) for unit in units for group in _parameter_groups(_state_of(unit))]
    found = [(unit, group, _mesh_of(group)) for unit, group in groups]
    for _, group, _ in found:
        if not isinstance(group._all_reduce_hook, _Hook | None):
            raise ValueError(
                f"a unit has an all-reduce hook, {group._all_reduce_hook!r}, which this one would "
                "replace: register one of them"
            )
    return found


def _state_of(unit: Any) -> Any:
    """Return FSDP's state of a unit, which torch has no public name for."""
    return unit._get_fsdp_state()


def _parameter_groups(state: Any) -> Sequence[Any]:
    """Return the groups of parameters that FSDP reduces; older torch has at most one."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def _mesh_of(group: Any) -> Any:
    mesh = group.fsdp_params[0].sharded_param.device_mesh
    if mesh.ndim != 1:
        raise ValueError(
            f"model is sharded over a mesh of {mesh.ndim} dimensions: FSDP would reduce over the "
            'replicas itself; call fully_shard(module, mesh=mesh["shard"]) with the shards only'
        )
    return mesh


@dataclass(eq=False)
class _ReduceScatter:
    """The callable that FSDP uses to sum gradients over the shards, in order.

    It has the methods of torch's class `ReduceScatter`, which has no public name. FSDP does not
    check the type.
    """

    shards: Group
    accumulate: str | None
    wire_dtype: torch.dtype | None

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    @outside_modes()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work[Tensor] | None:
        sent, out = as_reals(input_tensor).view(-1), as_reals(output_tensor).view(-1)
        options: Any = {"order": "tree", "accumulate": self.accumulate, "async_op": async_op}
        if op == dist.ReduceOp.PREMUL_SUM:
            # Scale after the sum, so that the factor is not rounded to the wire dtype.
            op, options["postscale"] = Sum, float(op.__getstate__()[1])
        if self.wire_dtype is not None:
            sent = sent.to(self.wire_dtype)
        work = self.shards.reduce_scatter(sent, op, out=out, **options)
        return work if async_op else None


@dataclass(eq=False)
class _Hook:
    """The hook that FSDP calls with the flat, reduce-scattered gradients of a parameter group.

    shards: the ranks that hold a replica; over_shards: the operator whose dot products are summed
    over them, once there is one; began: whether the hook has been called; checked: whether the
    replicas have compared their parameters; partial: the sum of gradients not yet reduced over the
    replicas; backward: the number of the backward pass that added to it last.
    """

    group: Any
    state: HookState
    shards: Group
    over_shards: _OverShards | None = None
    began: bool = False
    checked: bool = False
    partial: Tensor | None = None
    backward: int = -1

    @outside_modes()
    def __call__(self, gradients: Tensor) -> None:
        # Padded with zeros to equal sizes on all shards: every shard has the same segments.
        parameters = [p for p in self.group.fsdp_params if p.sharded_param.requires_grad]
        gradients = as_reals(gradients).view(-1)
        reals = 2 if parameters[0].sharded_param.is_complex() else 1
        sizes = (reals * p.padded_sharded_param_size.numel() for p in parameters)
        segments = [0, *accumulate(sizes)]
        if segments[-1] != gradients.numel():
            raise RuntimeError(
                f"FSDP hands over {gradients.numel()} elements of gradients, but the unit's "
                f"parameters have {segments[-1]}: some had no gradient, which this torch's FSDP "
                "cannot fill with zeros; leave them out of the unit or use a newer torch"
            )
        if not self.began:
            self._warn_of_others()
            self.began = True
        if not self.group.all_reduce_grads:
            self._accumulate(gradients, [p.sharded_param for p in parameters])
            return
        partial = self._accumulated(gradients)
        if partial is not None:
            gradients.add_(partial)
            self.partial = None
        if self.state.check_parameters and not self.checked:
            self._check_parameters()
        name = f"FSDP unit {parameters[0]._param_fqn}..."
        self.state.start(gradients, name, segments, self._operator()).wait()

    def _warn_of_others(self) -> None:
        """Warn about units made after the hooks were registered; only one unit does so."""
        states = _state_of(self.group.modules[0])._state_ctx.all_states
        groups = [group for state in states for group in _parameter_groups(state)]
        hooked = [group for group in groups if isinstance(group._all_reduce_hook, _Hook)]
        without = [group for group in groups if group._all_reduce_hook is None]
        others = [p for group in without for p in group.fsdp_params]
        names = [p._param_fqn for p in others if p.sharded_param.requires_grad]
        if names and hooked[0] is self.group:
            _logger.warning(
                "%d parameters, %s first, are in units without a hook, and no gradient of theirs "
                "is reduced over the replicas: call register_fsdp_hook after the last fully_shard",
                len(names),
                names[0],
            )

    def _accumulate(self, gradients: Tensor, parameters: Sequence[Tensor]) -> None:
        """Keep the gradients for a later reduction, and leave zeros in their place."""
        if any(parameter._post_accumulate_grad_hooks for parameter in parameters):
            raise NotImplementedError(
                "set_requires_all_reduce(False) with register_post_accumulate_grad_hook: FSDP "
                "would call such a hook with gradients of zero; use "
                "set_requires_gradient_sync(False)"
            )
        partial = self._accumulated(gradients)
        self.partial = gradients.clone() if partial is None else partial.add_(gradients)
        self.backward = torch._C._current_graph_task_id()
        gradients.zero_()
        without = [parameter for parameter in parameters if parameter.grad is None]

        def finish() -> None:
            # FSDP has made gradients of the zeros; only parameters that had a gradient keep them.
            for parameter in without:
                parameter.grad = None
            self.group._partial_reduce_output = self.partial

        torch.autograd.Variable._execution_engine.queue_callback(finish)

    def _accumulated(self, gradients: Tensor) -> Tensor | None:
        """Return the sum kept from earlier backward passes, or None.

        The sum is also stored in FSDP's own field, which `reset_iter_state` clears.
        """
        partial = self.partial
        if partial is None or (
            self.backward != torch._C._current_graph_task_id()
            and self.group._partial_reduce_output is not partial
        ):
            return None
        if partial.shape != gradients.shape:
            raise RuntimeError(
                f"a unit has {gradients.numel()} elements of gradients, and had {partial.numel()} "
                "in the backward passes before it, under set_requires_all_reduce(False): change "
                "requires_grad after a backward pass that reduces"
            )
        return partial

    def _check_parameters(self) -> None:
        """Raise on every replica if the replicas' copies of this shard differ; collective."""
        shards = [(p._param_fqn, p.sharded_param.detach()) for p in self.group.fsdp_params]
        named = [(name, shard.to_local()) for name, shard in shards]
        fix = (
            ": seed replicas alike or load the same checkpoint; HookState(check_parameters=False) "
            "or ADASUM_CHECK_PARAMETERS=0 leaves this check out"
        )
        require_equal_parameters(self.state.group, named, fix=fix)
        self.checked = True

    def _operator(self) -> Reducer:
        op = self.state.op
        if Needs.ONE_TREE not in op.needs or self.shards.size == 1:
            return op
        if self.over_shards is None or self.over_shards.op is not op:
            self.over_shards = _OverShards(op, self.shards)
        return self.over_shards


class _OverShards(Reducer):
    """An operator whose dot products are summed over the shards of each parameter too.

    The ranks of a shard group have the same rank among their replicas, so they reduce in the same
    steps and need the same sums.
    """

    def __init__(self, op: Reducer, shards: Group) -> None:
        self.name = op.name
        self.needs = op.needs
        self.reads_tree = op.reads_tree
        self.op = op
        self._shards = shards

    def check(self, dtype: torch.dtype) -> None:
        self.op.check(dtype)

    def reads_tree_of(self, dtype: torch.dtype) -> bool:
        return self.op.reads_tree_of(dtype)

    def algorithm(self, nbytes: int, size: int) -> str:
        return self.op.algorithm(nbytes, size)

    def reduce(self, operands: Operands) -> None:
        def sum_partials(partials: Tensor) -> None:
            if operands.sum_partials is not None:
                operands.sum_partials(partials)
            # A fixed algorithm, so that the order of Adasum's sums depends on no table.
            name = "dot products over shards"
            self._shards.all_reduce(partials, Sum, name=name, algorithm="rd")

        def gather_partials(table: Tensor) -> Tensor:
            tables = self._shards.all_gather(table.unsqueeze(0), name="tables over shards")
            if operands.gather_partials is not None:
                tables = operands.gather_partials(tables).flatten(0, 1)
            return tables

        self.op.reduce(
            replace(operands, gather_partials=gather_partials)
            if operands.tree
            else replace(operands, sum_partials=sum_partials)
        )

    def prescale(self, dtype: torch.dtype, size: int) -> float:
        return self.op.prescale(dtype, size)

    def finish(self, buffer: Tensor, size: int) -> None:
        self.op.finish(buffer, size)
