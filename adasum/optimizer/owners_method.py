"""mode="owners": each parameter is stepped, and its optimizer state kept, by one rank alone.

Sources: TensorFlow's parameter servers; Rajbhandari et al., "ZeRO", arXiv 1910.02054, stage 1.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from adasum.modes import outside_modes
from adasum.optimizer.buckets.planning import Named
from adasum.optimizer.buckets.reduction import Owners
from adasum.optimizer.consistency.membership import Change
from adasum.optimizer.errors import OptimizerOrderError
from adasum.optimizer.gradient_method import GradientMethod
from adasum.optimizer.overflow import SharedOverflow
from adasum.optimizer.owned_state import HAS, LACKS, assign_owners, gather_states
from adasum.real_pairs import as_reals
from collectives import Needs, Reducer, Sum
from collectives.reducers import Max
from collectives.schedules.spec import parse_all_reduce_spec


def reduces_to_owners(op: Reducer, algorithm: str | None) -> bool:
    """Return whether gradients go to their owners alone.

    Those of a sum do by rechd's steps, and Adasum's by those that `auto` takes. By another
    algorithm that was asked for they are all-reduced.
    """
    specs = parse_all_reduce_spec(algorithm or "auto")
    of_sums = {"auto", "rd", "rechd"} if op.associative or op.ordered else set()
    able = of_sums or ({"auto"} if op.reads_tree else set())
    return all(each.inner is None and each.outer in able for each in specs)


class OwnersMethod(GradientMethod):
    """Reduces each gradient onto its parameter's owner, which steps and broadcasts the parameter.

    After `synchronize` the gradients of parameters that this rank does not own are None, so that
    the wrapped optimizer leaves them out.
    """

    _adasum_asked = "mode='owners'"
    _adasum_owners: dict[Tensor, int]
    # Whether parameters have come that have no owner yet.
    _adasum_unowned = False
    # The parameters that were reduced in any step, so that owners may change them: the bucket of
    # each.
    _adasum_reduced: dict[Tensor, str]
    # Every parameter's state by number, from its gathering until the next step; else None.
    _adasum_whole_state: Mapping[int, Any] | None = None
    # Whether ranks have states that others lack.
    _adasum_scattered = False
    _adasum_overflow: SharedOverflow
    # The parameters whose gradients were reduced onto other ranks, until they are zeroed: those of
    # earlier steps, and of this one.
    _adasum_given: set[Tensor]
    _adasum_giving: set[Tensor]
    # A parameter to whose gradient of the last step backward has added, until they are zeroed.
    _adasum_added = ""
    # The ranks' places in a buffer.
    _adasum_places: Mapping[int, int]
    # Whether gradients go to their owners alone.
    _adasum_to_owners: bool

    def _prepare(self) -> None:
        super()._prepare()
        self._adasum_owners, self._adasum_reduced = {}, {}
        self._adasum_given, self._adasum_giving = set(), set()
        self._adasum_overflow = SharedOverflow()
        reducer = self._adasum_settings.reducer
        op = reducer.op
        self._adasum_to_owners = reduces_to_owners(op, reducer.algorithm)
        if self._adasum_to_owners and (op.associative or op.ordered):
            # While an observer watches, gradients are all-reduced, to the same bits.
            reducer.algorithm = "direct" if Needs.ALL_OPERANDS in op.needs else "rechd"
        self._adasum_places = {rank: i for i, rank in enumerate(self._adasum_group.owners_order())}
        self._adasum_scattered = bool(self.state)
        self._assign_owners(self._adasum_parameters(), [])

    def _assign_owners(self, new: Sequence[Tensor], states: Sequence[bytes]) -> None:
        """Give parameters owners, and drop the states of other ranks' ones."""
        assign_owners(self._adasum_owners, new, self._adasum_group.size, states)
        for parameter in new:
            if not self._is_mine(parameter):
                self.state.pop(parameter, None)

    def _is_mine(self, parameter: Tensor) -> bool:
        rank = self._adasum_group.rank
        return self._adasum_owners.get(parameter, rank) == rank

    def _owner_of(self, parameter: Tensor) -> int:
        # One that has left the optimizer since backward has no owner, and any will do.
        return self._adasum_owners.get(parameter, 0)

    def _wants(self, parameter: Tensor) -> bool:
        if parameter is self._adasum_overflow.substitute or not super()._wants(parameter):
            return False
        gradient = parameter.grad
        left, _ = self._adasum_left.get(id(gradient), (None, None))
        # Zeros in the place of the last step's, as by zero_grad(set_to_none=False), are this rank's
        # alone: the others had nothing to zero.
        return left is None or gradient is None or left() is not gradient or bool(gradient.any())

    def _follow(self, change: Change) -> None:
        """Follow a change of the parameters.

        OptimizerOrderError: one comes back whose gradient was reduced onto its owner alone.
        """
        for name, parameter in change.new:
            if self._is_left(parameter):
                raise OptimizerOrderError(
                    f"{name} was taken out of param_groups and put back between backward and "
                    "step(), and with mode='owners' its owner alone has its gradient: step all "
                    "groups at once, or call zero_grad() and backward() before"
                )
        super()._follow(change)
        reduced = [each for each in change.gone if each in self._adasum_reduced]
        self._adasum_given |= {each for each in reduced if not self._is_mine(each)}
        for parameter in change.gone:
            self._adasum_owners.pop(parameter, None)
            self._adasum_reduced.pop(parameter, None)
        self._adasum_whole_state = None
        self._adasum_unowned = True

    def _end_step(self) -> None:
        # A step that is skipped has left its mark in a gradient, whose memory the next may use.
        self._adasum_overflow.undo()
        super()._end_step()
        self._adasum_given |= self._adasum_giving
        self._adasum_giving.clear()

    def _is_left(self, parameter: Tensor) -> bool:
        if parameter not in self._adasum_given:
            return super()._is_left(parameter)
        if parameter.grad is None and self._is_zeroed():
            self._adasum_given.clear()
        return parameter.grad is None and parameter in self._adasum_given

    def _is_zeroed(self) -> bool:
        """Return whether what the last step has left is gone, as by `model.zero_grad()`.

        The gradients of this rank's own parameters say so: those of the others are None anyway.
        """
        mine = filter(self._is_mine, self._adasum_reduced)
        return bool(self._adasum_left) and not any(map(super()._is_left, mine))

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients, and count backward passes anew: a batch may be left out."""
        self._adasum_given.clear()
        self._adasum_giving.clear()
        self._adasum_added = ""
        self._adasum_overflow.undo()
        left = self._adasum_left
        super().zero_grad(*args, **kwargs)
        # By then those that have gone since the last call are in it.
        self._adasum_given.clear()
        # To be told by `_wants` where they are zeros now.
        self._adasum_left = left

    @staticmethod
    def _wants_before(parameter: Tensor) -> bool:
        return True

    def _before_gradient(self, parameter: Tensor) -> None:
        """Note where backward adds to a gradient that was reduced, which this rank alone has.

        Another network's backward may, as a generator's to those of its discriminator, which are
        zeroed before they are used.
        """
        gradient = parameter.grad
        left, _ = self._adasum_left.pop(id(gradient), (None, None))
        if left is None or gradient is None or gradient is not left():
            if super()._wants_before(parameter):
                super()._before_gradient(parameter)
        # Somebody may have changed it, to zeros or to something else.
        elif bool(gradient.any()):
            self._adasum_added = self._adasum_added or self._adasum_hooks.names[parameter]

    def _refuse_added(self) -> None:
        """Raise OptimizerOrderError where backward has added to a gradient of the last step."""
        if self._adasum_added:
            raise OptimizerOrderError(
                f"backward has added to the gradient of {self._adasum_added} from the last step, "
                "which with mode='owners' its owner alone has: call optimizer.zero_grad() between "
                "two steps"
            )

    def _take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        if closure is None:
            self._refuse_added()
        return super()._take_step(closure, options)

    def _check_parameters(self) -> None:
        super()._check_parameters()
        self._own_new_parameters()

    @outside_modes()
    def _own_new_parameters(self) -> None:
        """Give owners to the parameters that have come; collective where any have.

        Where a parameter has replaced another, only the owner of that one can have moved its state
        to the new one, so it has to own that, too.
        """
        if not self._adasum_unowned:
            return
        new = [each for each in self._adasum_parameters() if each not in self._adasum_owners]
        mine = b"".join(HAS if self.state.get(each) else LACKS for each in new)
        name = "which ranks have states of new parameters"
        self._assign_owners(new, self._adasum_group.all_gather_bytes(mine, name=name))
        self._adasum_unowned = False

    def _sorted(self, members: list[Named]) -> list[Named]:
        if not self._adasum_to_owners:
            return members
        return sorted(members, key=lambda each: self._adasum_places[self._owner_of(each[1])])

    def _gradients_everywhere(self, named: Sequence[Named]) -> list[Named]:
        return []

    def _owners_of(self, parameters: Sequence[Tensor]) -> Owners:
        if not self._adasum_to_owners or self._adasum_settings.reducer.observer is not None:
            return None
        return list(map(self._owner_of, parameters))

    def _note_started(self, members: Sequence[Named], bucket: str) -> None:
        for _, parameter in members:
            if parameter in self._adasum_owners:
                self._adasum_reduced.setdefault(parameter, bucket)

    @outside_modes()
    @torch.no_grad()
    def _finish_reductions(self) -> None:
        """Keep this rank's own gradients, and let every rank see a non-finite one of any."""
        # What a reduction before this one, in the same step, has left.
        self._adasum_overflow.undo()
        super()._finish_reductions()
        if not self._adasum_reduced:
            return
        mine = [each for each in self._adasum_reduced if self._is_mine(each)]
        # Another may have been given a gradient that is reduced in the next round.
        taken = filter(self._adasum_hooks.taken, self._adasum_reduced)
        others = [each for each in taken if not self._is_mine(each)]
        # None where no rank had one.
        self._adasum_giving.update(each for each in others if each.grad is not None)
        for parameter in others:
            parameter.grad = None
        # A rank without gradients has a zero on the CPU.
        device = next(iter(self._adasum_reduced)).device
        finite = super()._total_norm(math.inf, None).isfinite().to(device)
        self._adasum_overflow.share(self._adasum_group, finite, mine, others)

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = super()._evaluate(closure)
        self._refuse_added()
        self._adasum_overflow.undo()
        return loss

    def _between_hooks(
        self, step: Callable[..., Any], closure: Callable[[], Any] | None, options: dict[str, Any]
    ) -> Any:
        if self._any_rank_skips():
            return None
        if "found_inf" in self.__dict__:
            self._adasum_overflow.keep()
        self._adasum_overflow.undo()
        return super()._between_hooks(step, closure, options)

    def _local_step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        self._adasum_whole_state, self._adasum_scattered = None, True
        result = super()._local_step(closure, **options)
        self._broadcast_parameters()
        return result

    @outside_modes()
    @torch.no_grad()
    def _broadcast_parameters(self) -> None:
        """Give every rank the parameters that their owners have stepped."""
        buckets: dict[str, list[Tensor]] = {}
        for parameter, bucket in self._adasum_reduced.items():
            buckets.setdefault(bucket, []).append(parameter)
        started = []
        for bucket, parameters in buckets.items():
            targets = [as_reals(each.detach()) for each in parameters]
            sent = [target.contiguous() for target in targets]
            ranks = [self._adasum_owners[parameter] for parameter in parameters]
            name = f"parameters of {bucket}"
            broadcast: Any = self._adasum_group.broadcast_from_owners
            work = broadcast(sent, owners=ranks, name=name, async_op=True)
            started.append((work, targets, sent))
        for work, targets, sent in started:
            work.wait()
            for target, result in zip(targets, sent, strict=True):
                if result is not target:
                    target.copy_(result)

    @outside_modes()
    def _total_norm(self, norm_type: float, foreach: bool | None) -> Tensor:
        """Return the norm of all owners' gradients."""
        mine = super()._total_norm(norm_type, foreach)
        if not self._adasum_parameters():
            return mine
        # A rank without gradients has a zero on the CPU.
        total = mine.to(self._adasum_parameters()[0].device, torch.float64).reshape(1)
        if norm_type == math.inf:
            self._adasum_group.all_reduce(total, Max, name="norm of the gradients")
        else:
            total.pow_(norm_type)
            self._adasum_group.all_reduce(total, Sum, name="norm of the gradients")
            total.pow_(1.0 / norm_type)
        widest = max((p.dtype for p in self._adasum_parameters()), key=lambda dtype: dtype.itemsize)
        return total[0].to(torch.promote_types(widest.to_real(), torch.float32))

    @outside_modes()
    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather every parameter's state: `DistributedMixin.consolidate_state_dict`."""
        self._refuse_in_flight("consolidate_state_dict()")
        self._follow_groups()
        self._own_new_parameters()
        parameters, owners = self._adasum_parameters(), self._adasum_owners
        states = [(owners[each], self.state.get(each, {})) for each in parameters]
        held = self._whole_state(super().state_dict()["state"])
        whole = gather_states(self._adasum_group, states, to, held)
        if whole is not None:
            self._adasum_whole_state = whole

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all parameters, and the parameter groups; not collective.

        Raises:
            RuntimeError: This rank has not the state of other ranks' parameters: where a step was
                taken, `consolidate_state_dict()` has to be called on all ranks before.
        """
        packed = super().state_dict()
        whole = self._whole_state(packed["state"])
        if whole is not None:
            packed["state"] = whole
        elif self._adasum_scattered:
            raise RuntimeError(
                "mode='owners' keeps each parameter's state on one rank: call "
                f"optimizer.consolidate_state_dict(to={self._adasum_group.rank}) on every rank "
                "before optimizer.state_dict() on this one"
            )
        return packed

    def _whole_state(self, mine: Mapping[int, Any]) -> Mapping[int, Any] | None:
        """Return the states of all parameters, this rank's as they are now.

        None where this rank has not the others', or its own were taken out since it had.
        """
        whole = self._adasum_whole_state
        if whole is None:
            return None
        numbers = [i for i, each in enumerate(self._adasum_parameters()) if self._is_mine(each)]
        if any(number in whole and number not in mine for number in numbers):
            return None
        return {**whole, **copy.deepcopy(mine)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state_dict, of any number of ranks, and keep this rank's part.

        Every rank loads it, or the root of a broadcast_optimizer_state.
        """
        self._refuse_in_flight("load_state_dict()")
        states = state_dict["state"]
        saved = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = self._adasum_parameters()
        pairs = zip(saved, parameters, strict=False)
        foreign = {number for number, parameter in pairs if not self._is_mine(parameter)}
        mine = {key: value for key, value in states.items() if key not in foreign}
        super().load_state_dict({**state_dict, "state": mine})
        # For a state_dict() or a broadcast before the next step.
        self._adasum_whole_state = {i: states[key] for i, key in enumerate(saved) if key in states}
        self._adasum_scattered = bool(states)

    def average_state(self) -> None:
        """Raise OptimizerOrderError: every state is on one rank alone."""
        raise OptimizerOrderError(
            "average_state() makes no sense with mode='owners', where no two ranks have a state "
            "of the same parameter: call consolidate_state_dict()"
        )


class SoleOwnerMethod(GradientMethod):
    """mode="owners" with one rank, which steps every parameter: what several refuse, it does."""

    average_state = OwnersMethod.average_state
