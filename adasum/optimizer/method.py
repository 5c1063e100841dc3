"""The base class of the methods of reduction: the step around the wrapped optimizer's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import Tensor

from adasum.horovod.process_sets import ProcessSet
from adasum.optimizer.backward import Backward
from adasum.optimizer.bucket import Bucket, Member, place_buckets
from adasum.optimizer.consistency.parameter_check import ParameterCheck
from adasum.optimizer.errors import OptimizerOrderError, explain_shapes
from adasum.optimizer.local_step import local_step, unscale, with_hooks
from adasum.optimizer.pass_tree import PassTree
from adasum.optimizer.planning import Named, PlanBuckets, name_new
from adasum.optimizer.record import Record
from adasum.optimizer.reduction import BucketReducer, Reduction
from collectives import Group, Reducer, Sum
from collectives.modes import outside_modes


@dataclass
class Settings:
    """The arguments of DistributedOptimizer, by name, and values derived from them.

    `one_rank`: whether this rank reduces with no others. `op` is the argument; the reducer's op is
    Sum instead of Average if there is a predivide factor.
    """

    reducer: BucketReducer
    plan_buckets: PlanBuckets
    sparse_as_dense: bool
    one_rank: bool
    op: Reducer
    process_set: ProcessSet


class Method:
    """A method of reduction: it reduces gradients or differences.

    A DistributedOptimizer holds one, which refers to it weakly. A new method implements `start`,
    which packs buckets and installs results, and `take_step`, which reduces and steps.

    Attributes:
        asked: The arguments that select this method, for error texts.
        early: Whether buckets start while backward runs.
        placed: Whether each bucket has its own memory, which GPUs may share.
        final: Whether backward waits for the reductions that it starts.
        differences: Whether differences are reduced, not gradients.
        backward: The records of the parameters, and the hooks on their gradients.
    """

    asked = ""
    early = False
    placed = False
    final = False
    differences = False

    def __init__(
        self,
        wrapper: torch.optim.Optimizer,
        optimizer: torch.optim.Optimizer,
        settings: Settings,
        check: ParameterCheck,
    ) -> None:
        self._wrapper = weakref.ref(wrapper)
        self.base = type(optimizer)
        self.settings, self.check = settings, check
        self.stepping = self.skips_synchronize = False
        self._unscales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
        self._members = _members(optimizer.param_groups)
        self.backward: Backward

    def begin(
        self, named: Sequence[Named], buckets: Sequence[Sequence[Named]], passes: int
    ) -> None:
        """Put hooks on the parameters, given in registration order and in buckets."""
        settings = self.settings
        tree = None
        if settings.reducer.op.ordered:
            tree = PassTree(divides=bool(settings.op.averages) and settings.one_rank)
        self._arena: Tensor | None = None
        early = self.early and not settings.one_rank
        self.backward = Backward(self, named, buckets, passes=passes, early=early, tree=tree)
        self.check.add(named)

    @property
    def is_dropped(self) -> bool:
        """Whether the optimizer has been dropped."""
        return self._wrapper() is None

    @property
    def optimizer(self) -> Any:
        """The optimizer that DistributedOptimizer returned."""
        return self._wrapper()

    @property
    def group(self) -> Group:
        """The ranks that reduce."""
        return self.settings.reducer.group

    # For methods to implement.

    def start(self, bucket: Bucket, members: list[Member]) -> list[Reduction]:
        """Pack the bucket's members that take part, and start reducing them."""
        raise NotImplementedError

    def finish(self) -> None:
        """Finish a step's reduction after all buckets; may call collectives."""

    def take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Reduce and step, in the method's order; the closure is `evaluate` of the user's."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the gradients may be read and changed."""
        raise NotImplementedError

    def finish_gradients(self) -> None:
        """Wait until the gradients are final for step()."""
        self.synchronize()

    def total_norm(self, norm_type: float, foreach: bool | None) -> Tensor:
        """Return the norm of all gradients of the step."""
        return norm_of(self.backward.named(), norm_type, foreach)

    def is_left(self, parameter: Tensor, record: Record) -> bool:
        """Return whether the gradient is left from the last step, to be reduced again."""
        return record.is_left(parameter.grad)

    def agree_on_kept(self) -> None:
        """Raise on every rank unless all ranks step by gradients of the last step."""
        name = "step by the last step's gradients: call optimizer.zero_grad() between two steps"
        device = next(iter(self.backward.records)).device
        self.group.all_reduce(torch.ones(1, device=device), Sum, name=name)

    def state_dict(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict, completed by the other ranks' parts."""
        return packed

    def part_of(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a whole state_dict that this rank loads."""
        return state_dict

    def consolidate_state_dict(self, to: int | None) -> None:
        """Gather every parameter's state, if ranks have different ones."""

    # Shared by all methods.

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the step's closure, and make its gradients dense."""
        loss = closure()
        self.densify()
        return loss

    def step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Reduce and take one step."""
        self.follow_groups()
        self.backward.refuse_taken_over()
        self.check_parameters()
        if closure is None:
            self.backward.refuse_too_many()
            self.densify()
        else:
            closure = partial(self.evaluate, closure)
        self.stepping = True
        try:
            result = self.take_step(closure, options)
        finally:
            self.stepping = False
        self.end_step()
        self.check.run_again()
        return result

    def end_step(self) -> None:
        """Begin a new step."""
        self.backward.restart()
        self.follow_groups()

    def zero_grad(self) -> None:
        """Restart the count of backward passes; the caller zeroes the gradients afterwards."""
        self.backward.restart()
        self.follow_groups()

    def follow_groups(self) -> None:
        """Update the parameters, between two steps, if the groups' members have changed.

        Densification and pruning replace a parameter by one of another length, append some, or
        replace whole groups, without `add_param_group`.
        """
        groups = self.optimizer.param_groups
        if self.backward.in_step or not self.has_other_members():
            return
        before, self._members = self._members, _members(groups)
        here = {parameter for group in self._members for parameter in group}
        names = {parameter: name for name, parameter in self.backward.named()}
        gone = [parameter for parameter in names if parameter not in here]
        self.follow(name_new(names, before, self._members), gone)

    def follow(self, new: Sequence[Named], gone: Sequence[Tensor]) -> None:
        """Reduce other parameters from now on; new ones get buckets by size after all others."""
        left = set(gone)
        plan = [
            [(record.name, p) for record, p in bucket.members if p not in left]
            for bucket in self.backward.buckets
        ]
        kept = [(name, p) for name, p in self.backward.named() if p not in left]
        plan += self.settings.plan_buckets(new)
        self.backward.rebuild([*kept, *new], [part for part in plan if part])
        self.check.add(new)
        self.check.forget(gone)

    def has_other_members(self) -> bool:
        """Return whether the groups' parameters, by identity, changed since the last update."""
        now = [group["params"] for group in self.optimizer.param_groups]
        sizes = list(map(len, now)) == list(map(len, self._members))
        return not sizes or not all(map(is_, chain(*now), chain(*self._members)))

    def require_reduced(self) -> None:
        """Raise if step() would use an unreduced gradient."""
        records = self.backward.records.values()
        if self.has_other_members() or not all(record.active for record in records):
            groups = self.optimizer.param_groups
            self.backward.refuse_given_late(p for group in groups for p in group["params"])

    def check_parameters(self) -> None:
        """Compare new parameters between ranks, before their first reduction."""
        if self.check.run() and self.placed:
            # All ranks are in this call, with the same buckets.
            make = self.settings.reducer.buffer
            self._arena = place_buckets(self.backward.buckets, self._arena, make)

    def densify(self) -> None:
        """Make gradients dense if `sparse_as_dense` is set, with one rank too."""
        for parameter in self.backward.records if self.settings.sparse_as_dense else ():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def refuse_in_flight(self, call: str) -> None:
        """Raise OptimizerOrderError while gradients are being reduced."""
        if self.backward.busy:
            raise OptimizerOrderError(
                f"optimizer.{call} was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are being reduced. Where backward raised, "
                "on every rank, call optimizer.synchronize() (with step_in_backward=True step()) "
                "and then zero_grad(), to leave the batch out"
            )

    @outside_modes()
    def any_rank_skips(self) -> bool:
        """Return whether any rank has non-finite gradients; collective under GradScaler."""
        found = self.optimizer.__dict__.get("found_inf")
        if found is None:
            return False
        total = torch.as_tensor(found, dtype=torch.float32).reshape(1).clone()
        self.group.all_reduce(total, Sum, name="found_inf")
        return bool(total.item())

    def between_hooks(
        self, step: Callable[..., Any], closure: Callable[[], Any] | None, options: dict[str, Any]
    ) -> Any:
        """Run `step(closure, **options)` between the step hooks; None if it is skipped.

        GradScaler leaves unscaling and skipping to this method (`_step_supports_amp_scaling`).
        """
        optimizer = self.optimizer
        if not self._unscales_itself:
            if optimizer.__dict__.get("found_inf", False):
                return None
            unscale(optimizer)

        # `local_step` suppresses hooks, so they run here; they may change the arguments.
        def run(_: Any, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
            return step(closure, **options)

        return with_hooks(run)(optimizer, *(() if closure is None else (closure,)), **options)

    def local_step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Take the wrapped optimizer's step, without step hooks."""
        optimizer = self.optimizer
        settings = self.check.note_settings(optimizer)
        try:
            result = local_step(
                *(optimizer, self.base, closure, options),
                sparse_again=self.settings.sparse_as_dense,
                unscales_itself=self._unscales_itself,
            )
        except RuntimeError as error:
            explain_shapes(self.backward.named(), optimizer.state, error)
            raise
        self.check.note_written(optimizer, settings)
        return result


def _members(groups: Sequence[Mapping[str, Any]]) -> list[list[Tensor]]:
    return [list(group["params"]) for group in groups]


def norm_of(named: Sequence[Named], norm_type: float, foreach: bool | None) -> Tensor:
    """Return the norm of all gradients that this rank has, sparse ones included."""
    values = list(gradient_values(named).values())
    return torch.nn.utils.get_total_norm(values, norm_type, foreach=foreach)


def gradient_values(named: Sequence[Named]) -> dict[int, Tensor]:
    """Return the elements of each gradient that is not empty, by its index in `named`."""
    gradients = {i: p.grad.detach() for i, (_, p) in enumerate(named) if p.grad is not None}
    values = {i: g.coalesce().values() if g.is_sparse else g for i, g in gradients.items()}
    # The inf norm of an empty tensor is undefined.
    return {i: each for i, each in values.items() if each.numel()}


def clip(named: Sequence[Named], max_norm: float, total: Tensor, foreach: bool | None) -> None:
    """Scale gradients with the norm `total` so that it is at most `max_norm`."""
    dense = [p for _, p in named if p.grad is None or not p.grad.is_sparse]
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, total, foreach)
    # The same formula as in torch's function, which cannot scale sparse gradients.
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, parameter in named:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad * coefficient.to(parameter.grad)
