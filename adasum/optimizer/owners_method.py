"""mode="owners": one rank steps each parameter and keeps its optimizer state.

Sources: TensorFlow's parameter servers; Rajbhandari et al., "ZeRO", arXiv 1910.02054, stage 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.horovod import objects
from adasum.optimizer.bucket import Member, dtype_of_gradient
from adasum.optimizer.gradient_method import GradientMethod
from adasum.optimizer.local_step import parameters_of
from adasum.optimizer.method import gradient_values
from adasum.optimizer.planning import Named
from adasum.real_pairs import as_reals
from collectives import Needs, Reducer, Sum, validation
from collectives.modes import outside_modes
from collectives.schedules.spec import parse_all_reduce_spec


def reduces_to_owners(op: Reducer, algorithm: str | None) -> bool:
    """Return whether only the owners receive gradients.

    Sums can use rechd's steps, and Adasum the steps of `auto`. With any other algorithm, gradients
    are all-reduced.
    """
    specs = parse_all_reduce_spec(algorithm or "auto")
    of_sums = {"auto", "rd", "rechd"} if op.associative or op.ordered else set()
    able = of_sums or ({"auto"} if op.reads_tree else set())
    return all(each.inner is None and each.outer in able for each in specs)


class OwnersMethod(GradientMethod):
    """Reduces each gradient to its parameter's owner, which steps and broadcasts the parameter.

    After the reduction, the gradients of parameters that this rank does not own are None, so that
    the wrapped optimizer leaves these out. After each step all gradients are None.
    """

    asked = "mode='owners'"

    # Buckets go to their owners by messages, not through shared memory.
    placed = False

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.owners: dict[Tensor, int] = {}
        # Parameters that were reduced in any step so far: their owners may change them.
        self._reduced: dict[Tensor, None] = {}
        # Every parameter's state by number, once gathered, until the next step.
        self._whole_state: Mapping[int, Any] | None = None
        # Whether ranks have states that others lack.
        self._is_scattered = bool(self.optimizer.state)
        # A gradient's element that shows an overflow, its former value, and whether it is NaN now.
        self._mark: tuple[Tensor, Tensor, Tensor] | None = None
        # Another rank's parameter that got a gradient of zeros, for GradScaler to see.
        self._substitute: Tensor | None = None
        reducer = self.settings.reducer
        self._to_owners = reduces_to_owners(reducer.op, reducer.algorithm)
        if self._to_owners and (reducer.op.associative or reducer.op.ordered):
            # With an observer, gradients are all-reduced: by the algorithm with the same bits.
            reducer.algorithm = "direct" if Needs.ALL_OPERANDS in reducer.op.needs else "rechd"
        self._assign(parameters_of(self.optimizer), [])

    def _assign(self, new: Sequence[Tensor], states: Sequence[bytes]) -> None:
        """Give parameters owners, and drop the states of parameters that other ranks own.

        Trainable parameters come first, each to the rank that owns the fewest bytes: then no rank
        has more than an n-th of all state plus the largest one. `states` has one entry per rank,
        with a byte 0 or 1 per parameter: whether the rank has its state. If only some ranks do, the
        first of them becomes the owner: the user has replaced a parameter and moved its state,
        which only the old owner had.
        """
        loads = [0] * self.group.size
        for parameter, rank in self.owners.items():
            loads[rank] += parameter.nbytes
        for k in sorted(range(len(new)), key=lambda k: not new[k].requires_grad):
            holders = [i for i, each in enumerate(states) if each[k : k + 1] == b"1"]
            some = 0 < len(holders) < sum(map(bool, states))
            rank = holders[0] if some else loads.index(min(loads))
            self.owners[new[k]] = rank
            loads[rank] += new[k].nbytes
            if rank != self.group.rank:
                self.optimizer.state.pop(new[k], None)

    def is_mine(self, parameter: Tensor) -> bool:
        """Return whether this rank steps the parameter."""
        return self.owners.get(parameter) == self.group.rank

    @outside_modes()
    def _own_new(self) -> None:
        """Give owners to new parameters; collective if there are any."""
        new = [each for each in parameters_of(self.optimizer) if each not in self.owners]
        if new:
            mine = b"".join(b"1" if self.optimizer.state.get(each) else b"0" for each in new)
            name = "which ranks have states of new parameters"
            self._assign(new, self.group.all_gather_bytes(mine, name=name))

    def follow(self, new: Sequence[Named], gone: Sequence[Tensor]) -> None:
        """Reduce other parameters from now on, and forget the owners of old ones."""
        super().follow(new, gone)
        for parameter in gone:
            self.owners.pop(parameter, None)
            self._reduced.pop(parameter, None)
        self._whole_state = None

    def check_parameters(self) -> None:
        """Compare new parameters, and give them owners."""
        super().check_parameters()
        if len(self.owners) != len(self.backward.records):
            self._own_new()

    # Gradients.

    def sorted(self, members: list[Member]) -> list[Member]:
        """Return the bucket's members in the order that reduce_to_owners needs in memory."""
        if not self._to_owners:
            # Keep the order: in an all-reduce a tensor's place may decide its bits.
            return members
        return sorted(members, key=lambda each: self.owners[each[1]])

    def owners_of(self, members: Sequence[Member]) -> tuple[int, ...] | None:
        """Return the members' owners; None if all ranks get the gradients."""
        if not self._to_owners or self.settings.reducer.observer is not None:
            return None
        return tuple(self.owners[parameter] for _, parameter in members)

    @outside_modes()
    @torch.no_grad()
    def finish(self) -> None:
        """Drop gradients of other ranks' parameters and those that no rank had; share overflows.

        After an overflow on one rank, GradScaler then skips the step on all ranks.
        """
        self._unmark()
        records = self.backward.records
        reduced = [p for p, record in records.items() if record.active]
        if not reduced:
            return
        self._reduced.update(dict.fromkeys(reduced))
        mine = [p for p in reduced if self.is_mine(p)]
        others = [p for p in reduced if not self.is_mine(p)]
        for parameter in others:
            parameter.grad = None
        had = torch.tensor([records[p].had for p in reduced], dtype=torch.float32, device="cpu")
        if reduced[0].is_cuda:
            # The host waits for the GPU only if it must read the counts.
            had = had.pin_memory().to(reduced[0].device, non_blocking=True)
        overflowed = ~super().total_norm(math.inf, None).isfinite()
        counts = torch.cat([had, overflowed.to(had).reshape(1)])
        self.group.all_reduce(counts, Sum, name="which parameters have gradients")
        if not all(records[p].had for p in mine):
            for parameter, count in zip(reduced, counts.tolist(), strict=False):
                if not count:
                    parameter.grad = None
        self._show_overflow(counts[-1] > 0, mine, others)

    def _show_overflow(self, overflowed: Tensor, mine: list[Tensor], others: list[Tensor]) -> None:
        """Put a NaN into one of this rank's gradients if any rank has overflowed, until `_unmark`.

        GradScaler looks only at this rank's gradients, and needs at least one; its next scale must
        be the same on all ranks. Nothing here waits for a GPU.
        """
        gradients = [p.grad for p in mine if p.grad is not None and _is_writable(p.grad)]
        if not gradients and others:
            self._substitute = max(others, key=lambda each: bool(each.numel()))
            zeros = torch.zeros_like(self._substitute, dtype=dtype_of_gradient(self._substitute))
            self._substitute.grad = zeros
            gradients = [zeros] if _is_writable(zeros) else []
        if gradients:
            # Through `data`, since torch's count of changes is for changes by the user.
            element = gradients[0].data[(0,) * gradients[0].dim()]
            self._mark = element, element.clone(), overflowed.to(element.device)
            element.masked_fill_(self._mark[2], float("nan"))

    @torch.no_grad()
    def _unmark(self) -> None:
        """Restore the marked element, and drop the substitute's gradient."""
        if self._mark is not None:
            element, value, overflowed = self._mark
            # Without an overflow the element may have been clipped or unscaled since: keep it.
            element.copy_(torch.where(overflowed, value, element))
        if self._substitute is not None:
            self._substitute.grad = None
        self._substitute = self._mark = None

    # The step.

    def between_hooks(
        self, step: Callable[..., Any], closure: Callable[[], Any] | None, options: dict[str, Any]
    ) -> Any:
        """Step unless GradScaler has found a non-finite gradient on any rank."""
        if self.any_rank_skips():
            return None
        self._unmark()
        return super().between_hooks(step, closure, options)

    def evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the step's closure, and reduce its gradients and its loss."""
        loss = super().evaluate(closure)
        self._unmark()
        return loss

    def local_step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Step the parameters that this rank owns, and broadcast parameters from their owners."""
        self._whole_state, self._is_scattered = None, True
        result = super().local_step(closure, **options)
        self._broadcast_parameters()
        return result

    @outside_modes()
    @torch.no_grad()
    def _broadcast_parameters(self) -> None:
        buckets: dict[int, list[Tensor]] = {}
        for parameter in self._reduced:
            number = self.backward.records[parameter].bucket
            buckets.setdefault(number, []).append(parameter)
        started = []
        for number, parameters in sorted(buckets.items()):
            targets = [as_reals(each.detach()) for each in parameters]
            sent = [target.contiguous() for target in targets]
            ranks = [self.owners[parameter] for parameter in parameters]
            name = f"parameters of {self.backward.buckets[number].name}"
            work: Any = self.group.broadcast_from_owners(
                sent, owners=ranks, name=name, async_op=True
            )
            started.append((work, targets, sent))
        for work, targets, sent in started:
            work.wait()
            for target, result in zip(targets, sent, strict=True):
                if result is not target:
                    target.copy_(result)

    def end_step(self) -> None:
        """Set all gradients to None, and begin a new step."""
        for parameter in self.backward.records:
            parameter.grad = None
        super().end_step()

    def zero_grad(self) -> None:
        """Restart the count of backward passes."""
        super().zero_grad()
        self._unmark()

    @outside_modes()
    def total_norm(self, norm_type: float, foreach: bool | None) -> Tensor:
        """Return the norm of all owners' gradients, with the bits of the replicated run.

        As in torch, it is the norm of the gradients' norms, in the order of the parameters.
        """
        parameters, named = parameters_of(self.optimizer), self.backward.named()
        if not parameters:
            return super().total_norm(norm_type, foreach)
        zero = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
        mine = gradient_values(named)
        if mine and foreach is not False:
            found = dict(zip(mine, torch._foreach_norm([*mine.values()], norm_type), strict=True))
        else:
            found = {i: torch.linalg.vector_norm(each, norm_type) for i, each in mine.items()}
        norms = torch.stack([found.get(i, zero).to(zero) for i in range(len(named))])
        # Every gradient is on one rank, so the sum does not round.
        self.group.all_reduce(norms, Sum, name="norm of the gradients")
        widest = max((p.dtype for p in parameters), key=lambda dtype: dtype.itemsize)
        norms = norms.to(torch.promote_types(widest.to_real(), torch.float32))
        return torch.linalg.vector_norm(norms, norm_type)

    # States.

    @outside_modes()
    def consolidate_state_dict(self, to: int | None) -> None:
        """Gather every parameter's state to rank `to`, or to all for None; collective."""
        self.follow_groups()
        self._own_new()
        group, parameters = self.group, parameters_of(self.optimizer)
        if to is not None:
            validation.rank("to", to, group.size)
        held = self._all_states(torch.optim.Optimizer.state_dict(self.optimizer)["state"])
        mine = b"0" if held is None else b"1"
        has = group.all_gather_bytes(mine, name="states: who has them")
        wanted = range(group.size) if to is None else [to]
        gathered = held
        if not all(has[rank] == b"1" for rank in wanted):
            found = {}
            for number, parameter in enumerate(parameters):
                owner, state = self.owners[parameter], self.optimizer.state.get(parameter)
                sent = objects.encode(dict(state)) if self.is_mine(parameter) and state else b""
                received = objects.broadcast_bytes(group, owner, sent, f"state {number}")
                if received:
                    # Decoded on every rank, so that all raise if it cannot be sent.
                    what = f"the state of parameter {number} on rank {owner}"
                    found[number] = objects.decode(received, what)
            gathered = found
        if group.rank in wanted:
            self._whole_state = gathered

    def state_dict(self, packed: dict[str, Any]) -> dict[str, Any]:
        """Return the state of all parameters; raise RuntimeError if others' states are missing."""
        whole = self._all_states(packed["state"])
        if whole is not None:
            packed["state"] = whole
        elif self._is_scattered:
            raise RuntimeError(
                "mode='owners' keeps each parameter's state on one rank: call "
                f"optimizer.consolidate_state_dict(to={self.group.rank}) on every rank before "
                "optimizer.state_dict() on this one"
            )
        return packed

    def _all_states(self, mine: Mapping[int, Any]) -> Mapping[int, Any] | None:
        """Return the states of all parameters, with the present states of this rank's.

        None if this rank lacks the others' states, or one of its own was removed since.
        """
        whole = self._whole_state
        if whole is None:
            return None
        parameters = enumerate(parameters_of(self.optimizer))
        numbers = [i for i, each in parameters if self.is_mine(each)]
        if any(number in whole and number not in mine for number in numbers):
            return None
        return {**whole, **copy.deepcopy(mine)}

    def part_of(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's part of a whole state_dict, saved with any number of ranks."""
        states = state_dict["state"]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        pairs = zip(saved, parameters_of(self.optimizer), strict=False)
        foreign = {number for number, parameter in pairs if not self.is_mine(parameter)}
        mine = {key: value for key, value in states.items() if key not in foreign}
        # Kept for a state_dict() or a broadcast before the next step.
        self._whole_state = {i: states[key] for i, key in enumerate(saved) if key in states}
        self._is_scattered = bool(states)
        return {**state_dict, "state": mine}


def _is_writable(gradient: Tensor) -> bool:
    """Return whether an element can be overwritten: not if autograd records the gradient."""
    return gradient.layout is torch.strided and gradient.numel() > 0 and not gradient.requires_grad
