"""What every method of reduction has: the step around the wrapped optimizer's own."""

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
    """What DistributedOptimizer was asked for, by its arguments' names, and what follows from it.

    `one_rank` says that this rank reduces with no other; `op` is as asked for, the reducer's is Sum
    where Average is divided before and after it.
    """

    reducer: BucketReducer
    plan_buckets: PlanBuckets
    sparse_as_dense: bool
    one_rank: bool
    op: Reducer
    process_set: ProcessSet


class Method:
    """What is reduced, and when: gradients or differences.

    An optimizer of DistributedOptimizer holds one, which refers to it weakly. To add a method, say
    in `start` what of a bucket is packed and where its result goes, and in `take_step` in which
    order it reduces and steps.

    Attributes:
        asked: The arguments that select this method, for error texts.
        early: Whether buckets have their turn while backward runs.
        placed: Whether the memory of each bucket is its own, and may be shared by the GPUs.
        final: Whether backward returns only when what it started is reduced.
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
        """Put hooks on the parameters: (name, parameter) in registration order, and in buckets."""
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
        """Whether nobody holds the optimizer."""
        return self._wrapper() is None

    @property
    def optimizer(self) -> Any:
        """The optimizer that DistributedOptimizer returned."""
        return self._wrapper()

    @property
    def group(self) -> Group:
        """The ranks that reduce."""
        return self.settings.reducer.group

    # What a method says.

    def start(self, bucket: Bucket, members: list[Member]) -> list[Reduction]:
        """Pack the members of a bucket that take part, and start reducing them."""
        raise NotImplementedError

    def finish(self) -> None:
        """Do what is left when all buckets of a step are reduced; may call collectives."""

    def take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Reduce and step, in the method's order; `evaluate` has made the closure dense."""
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait until the gradients may be read and changed."""
        raise NotImplementedError

    def finish_gradients(self) -> None:
        """Wait until the gradients are those that step() takes."""
        self.synchronize()

    def total_norm(self, norm_type: float, foreach: bool | None) -> Tensor:
        """Return the norm of all gradients that step() takes."""
        return norm_of(self.backward.named(), norm_type, foreach)

    def is_left(self, parameter: Tensor, record: Record) -> bool:
        """Return whether the last step has left the parameter's gradient, which is reduced."""
        return record.is_left(parameter.grad)

    def agree_on_kept(self) -> None:
        """Make sure that all ranks step by gradients of the last step."""
        name = "step by the last step's gradients: call optimizer.zero_grad() between two steps"
        device = next(iter(self.backward.records)).device
        self.group.all_reduce(torch.ones(1, device=device), Sum, name=name)

    def state_dict(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Return the wrapped optimizer's state_dict with what other ranks have of it."""
        return packed

    def part_of(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return what of a whole state_dict this rank loads."""
        return state_dict

    def consolidate_state_dict(self, to: int | None) -> None:
        """Gather every parameter's state, if ranks have different ones."""

    # What all have in common.

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the closure of a step, and make its gradients dense."""
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
        """Count backward passes anew; the gradients are zeroed behind it."""
        self.backward.restart()
        self.follow_groups()

    def follow_groups(self) -> None:
        """Take note, between two steps, of parameters put into the groups or taken from them.

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
        """Reduce other parameters from now on: new ones in buckets by size behind all others."""
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
        """Return whether the groups hold other parameters, by identity, than when last followed."""
        now = [group["params"] for group in self.optimizer.param_groups]
        sizes = list(map(len, now)) == list(map(len, self._members))
        return not sizes or not all(map(is_, chain(*now), chain(*self._members)))

    def require_reduced(self) -> None:
        """Raise if step() would step by a gradient of this rank alone."""
        records = self.backward.records.values()
        if self.has_other_members() or not all(record.active for record in records):
            groups = self.optimizer.param_groups
            self.backward.refuse_given_late(p for group in groups for p in group["params"])

    def check_parameters(self) -> None:
        """Let ranks compare the parameters that are new, before anything of them is reduced."""
        if self.check.run() and self.placed:
            # All ranks are here, with the same buckets.
            make = self.settings.reducer.buffer
            self._arena = place_buckets(self.backward.buckets, self._arena, make)

    def densify(self) -> None:
        """Make gradients dense if `sparse_as_dense` asks for it, on one rank too."""
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
        """Return whether any rank's gradients hold a non-finite value; collective by GradScaler."""
        found = self.optimizer.__dict__.get("found_inf")
        if found is None:
            return False
        total = torch.as_tensor(found, dtype=torch.float32).reshape(1).clone()
        self.group.all_reduce(total, Sum, name="found_inf")
        return bool(total.item())

    def between_hooks(
        self, step: Callable[..., Any], closure: Callable[[], Any] | None, options: dict[str, Any]
    ) -> Any:
        """Return `step(closure, **options)`, run between the step hooks; None if it is skipped.

        GradScaler leaves unscaling and skipping to this (`_step_supports_amp_scaling`).
        """
        optimizer = self.optimizer
        if not self._unscales_itself:
            if optimizer.__dict__.get("found_inf", False):
                return None
            unscale(optimizer)

        # The hooks of the class's own step are not run, and may change arguments of this one.
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
    gradients = [p.grad.detach() for _, p in named if p.grad is not None]
    values = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    # Of no elements there is no largest.
    values = [each for each in values if each.numel()]
    return torch.nn.utils.get_total_norm(values, norm_type, foreach=foreach)


def clip(named: Sequence[Named], max_norm: float, total: Tensor, foreach: bool | None) -> None:
    """Scale the gradients, whose norm is `total`, so that it is `max_norm` at most."""
    dense = [p for _, p in named if p.grad is None or not p.grad.is_sparse]
    torch.nn.utils.clip_grads_with_norm_(dense, max_norm, total, foreach)
    # As torch's function computes it, which cannot scale sparse gradients.
    coefficient = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for _, parameter in named:
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad * coefficient.to(parameter.grad)
