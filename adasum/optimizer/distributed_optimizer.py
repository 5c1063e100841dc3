"""DistributedOptimizer: wraps an optimizer so that ranks reduce its gradients or its steps."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor, require_compressor
from adasum.horovod.arguments import require
from adasum.horovod.capabilities import warn_of_scaled_rate
from adasum.horovod.process_sets import ProcessSet, global_process_set, group_of
from adasum.observer import DifferencesObserver, Observer, require_observer
from adasum.optimizer.arguments import (
    choose_method,
    require_count,
    require_groups,
    require_operator,
    require_optimizer,
    require_order,
    require_own_autograd,
    require_reducer_of,
)
from adasum.optimizer.consistency.descriptions import (
    Setting,
    describe_hyperparameters,
    describe_value,
)
from adasum.optimizer.consistency.parameter_check import ParameterCheck, checks_parameters
from adasum.optimizer.errors import OptimizerOrderError
from adasum.optimizer.gradient_method import GradientMethod
from adasum.optimizer.local_step import SCALER_STATE, refuse_plain_steps
from adasum.optimizer.method import Method, Settings, clip
from adasum.optimizer.owners_method import OwnersMethod
from adasum.optimizer.planning import Groups, Named, name_parameters, plan_buckets
from adasum.optimizer.wrapping import class_of, guard_methods, keep_scheduler_patch
from adasum.reducer import UNWEIGHTED, AdasumReducer
from collectives import Average, Reducer, default_group
from collectives.reducers import AnyReducer
from collectives.tree_order import in_order


class DistributedOptimizer(torch.optim.Optimizer):
    """An optimizer that trains one model on all ranks; Horovod's names and meaning.

    It is also an instance of the given optimizer's class, and shares state, parameter groups and
    hooks with it. Learning-rate schedulers and GradScaler work on it. With one rank it gives the
    same bits as the plain optimizer, without copies. It reduces over the default group at the time
    of its creation.

    Args:
        optimizer: A new or resumed optimizer; it can be wrapped only once.
        named_parameters: (name, parameter) of every parameter, as from model.named_parameters().
            Names appear in errors, and their order fixes the order of reduction.
        compression: Compression.none, fp16 or bf16, or a class with their two methods.
        backward_passes_per_step: The number of passes to sum gradients over before the reduction;
            more passes before step() raise OptimizerOrderError.
        op: Average and Sum reduce the gradients while backward produces them. Adasum reduces the
            change that the local step makes: delta = after - before, per parameter; the result
            before + reduced delta is installed. Another Reducer, which must say whether it
            `averages`, reduces gradients like Average; missing gradients count as zeros.
        gradient_predivide_factor: With Average, divides by it before the sum and by size/factor
            after it.
        num_groups: Horovod's deprecated name of `groups`; 0 means that it is not given.
        groups: None for buckets by size, a number of buckets, or lists of parameters, one list per
            bucket.
        sparse_as_dense: Makes sparse gradients dense first. Otherwise Sum and Average gather them,
            the delta method leaves them to the optimizer, and Adasum of gradients refuses them.
            SparseAdam, which refuses dense gradients, gets the reduced ones as sparse again.
        process_set: Reduces over its ranks only; on other ranks the optimizer is the plain one.
        algorithm: An algorithm of `collectives`: "vhdd", or "rechd/vhdd" for an average within each
            node and Adasum across nodes (then scale the learning rate by local_size()).
        mode: "owners" keeps each parameter's optimizer state on one rank, its owner: gradients are
            reduced to the owners, which step and broadcast the parameters (ZeRO's stage 1). With
            Sum and Average only the owners receive gradients, with the bits of rd and rechd, unless
            `algorithm` selects another. After step() all gradients are None. The optimizer must
            step each parameter by itself. None keeps the state on every rank.
        weighted: With Adasum, weighs both sides of each pair by their numbers of ranks, so that n
            parallel gradients weigh 1/n each, for every n. False weighs both sides equally, as
            Horovod does. With a power of two of ranks both give the same bits, except for "xring"
            and the other algorithms in rank order.
        check_parameters: At the first step, ranks compare a checksum of every parameter, the
            optimizer's class, its hyperparameters and these arguments, and raise
            CollectiveMismatchError if one differs; new parameters are compared at their first step.
            False disables this check and `check_every`. Default: the environment variable
            ADASUM_CHECK_PARAMETERS, 0 or 1; True if that is not set. Must agree on all ranks.
        method: "gradient" reduces the gradients, like the DDP hook: all ranks have one optimizer
            state, and clipping sees the reduced gradient. "delta" reduces the change of each rank's
            own step, by Adasum or your own operator that averages. Default: "delta" for Adasum
            without mode="owners", otherwise "gradient".
        step_in_backward: With the delta method, takes each bucket's local step and starts reducing
            its difference while backward runs; gradients cannot be changed before step() then.
        memory_size: Largest size of buckets in MiB; 25 unless this or `groups_size` is given.
        groups_size: Largest number of parameters in buckets by size.
        check_every: The number of steps between comparisons; 0 for never. Ranks compare the
            hyperparameters and the next part of the parameters (16 MiB, at least one parameter),
            and raise CollectiveMismatchError if they differ.
        order: "tree", with Sum and Average of gradients: every element is summed by one balanced
            tree, whose leaves are the passes of all ranks, rank by rank. So 8 ranks with one pass,
            4 with 2 and 1 with 8 get the same bits, for all buckets, algorithms and transports.
            With several ranks, passes must be 1, 2, 4, 8, .... Between two passes there are no
            gradients: optimizer.zero_grad() discards passes, model.zero_grad() does not. Average
            divides once, by ranks times passes.
        accumulate: With an order and one pass: torch.float32 to add in float32 and round once.

    Raises:
        TypeError: `optimizer` is not an optimizer, `compression` lacks a method, or another
            argument has the wrong type.
        ValueError: An argument or ADASUM_CHECK_PARAMETERS has a bad value, or arguments exclude
            each other.

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

    # The method of reduction; the given optimizer shares it, as it shares all of its __dict__.
    _adasum: Method
    # GradScaler then always calls step(), on every rank, and leaves unscaling and skipping to it,
    # so that the ranks can skip together.
    _step_supports_amp_scaling = True

    def __new__(cls, optimizer: torch.optim.Optimizer, *_: Any, **__: Any) -> DistributedOptimizer:
        """Make an instance of a subclass of this class and the optimizer's."""
        require_optimizer(optimizer)
        return object.__new__(class_of(cls, type(optimizer)))

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        named_parameters: Iterable[Named] | None = None,
        compression: type[Compressor] = Compression.none,
        backward_passes_per_step: int = 1,
        op: AnyReducer = Average,
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
        method: Literal["delta", "gradient"] | None = None,
        step_in_backward: bool = False,
        memory_size: float | None = None,
        groups_size: int | None = None,
        check_every: int = 100,
        order: Literal["tree"] | None = None,
        accumulate: torch.dtype | None = None,
    ) -> None:
        op = require_operator(op, weighted, gradient_predivide_factor)
        require_compressor(compression)
        require_count("backward_passes_per_step", backward_passes_per_step, 1)
        require("algorithm", algorithm, str, type(None))
        require("sparse_as_dense", sparse_as_dense, bool)
        require("step_in_backward", step_in_backward, bool)
        require("check_parameters", check_parameters, bool, type(None))
        require_count("check_every", check_every, 0, ", 0 for never")
        kind = choose_method(optimizer, op, method, mode, step_in_backward)
        groups = require_groups(num_groups, groups)
        named = name_parameters(optimizer, named_parameters)
        members = default_group() if process_set is None else group_of(process_set)
        group, reduces_by = members or default_group(), op if weighted else UNWEIGHTED
        one_rank = members is None or members.size == 1
        passes, factor = backward_passes_per_step, float(gradient_predivide_factor)
        require_order(order, op, accumulate, passes, 1 if members is None else group.size, factor)
        if members is not None:
            reduces_by = in_order(reduces_by, order, accumulate, passes)
        reducer = require_reducer_of(group, reduces_by, compression, algorithm, factor)
        by_size = partial(plan_buckets, memory_size=memory_size, groups_size=groups_size)
        settings = Settings(
            reducer, by_size, sparse_as_dense, one_rank, op, process_set or global_process_set
        )
        asked = [
            ("op", str(reduces_by)),
            ("the method", kind.__name__),
            ("compression", describe_value(compression)),
            ("algorithm", repr(algorithm)),
            ("gradient_predivide_factor", str(factor)),
            ("order", str(order)),
            ("accumulate", str(accumulate)),
            ("sparse_as_dense", str(sparse_as_dense)),
            ("check_every", str(check_every)),
        ]
        if isinstance(op, AdasumReducer):
            warn_of_scaled_rate(algorithm)
        if kind.early and not one_rank:
            require_own_autograd(group, named)
        buckets = by_size(named, groups)
        if not one_rank and kind is not GradientMethod:
            guard_methods(type(self), type(optimizer), kind.asked)
        self.__dict__ = optimizer.__dict__
        check = ParameterCheck(
            group,
            partial(_settings_of, weakref.ref(self), type(optimizer), asked),
            every=check_every,
            compares=checks_parameters(check_parameters) and not one_rank,
        )
        if one_rank and kind is OwnersMethod:
            kind = GradientMethod
        self._adasum = kind(self, optimizer, settings, check)
        self._adasum.begin(named, buckets, passes)
        keep_scheduler_patch(self)
        if not one_rank:
            refuse_plain_steps(optimizer, self)

    @property
    def op(self) -> Reducer:
        """The reducer that DistributedOptimizer was given."""
        return self._adasum.settings.op

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce."""
        return self._adasum.settings.process_set

    @property
    def backward_passes_per_step(self) -> int:
        """The number of backward passes per step; `set_backward_passes_per_step` changes it."""
        return self._adasum.backward.passes

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter: Horovod's, which scripts and its own tests read."""
        return {parameter: name for name, parameter in self._adasum.backward.named()}

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Reduce and take one step.

        With the gradient method, the wrapped optimizer evaluates a closure as often as it needs.
        Each time the gradients are reduced, and the loss too, if it is a floating-point tensor, so
        that optimizers that decide by the loss decide alike on every rank. With the delta method a
        closure sees only this rank's data. Hooks of `register_step_pre_hook` see the gradients of
        the step, hooks of `register_step_post_hook` the installed parameters.

        Args:
            closure: Evaluates the model, calls backward and returns the loss.
            options: Further arguments of the wrapped optimizer's step.

        Returns:
            The result of the wrapped optimizer's step: the loss with a closure, otherwise None.

        Raises:
            OptimizerOrderError: Gradients would be lost or used twice.
            CollectiveMismatchError: The ranks' parameters or settings differ: at the first step, or
                at a later one that compares them (`check_every`).
            CollectiveError: A reduction failed.
        """
        try:
            return self._adasum.step(closure, options)
        except BaseException:
            # GradScaler removes these attributes only after steps that return; left behind, they
            # would change its next scale.
            for key in SCALER_STATE:
                self.__dict__.pop(key, None)
            raise

    def synchronize(self) -> None:
        """Wait until the gradients may be read and changed.

        With the gradient method, all gradients are reduced then. backward waits for the reductions
        that it started: if it produced every gradient, this call is not needed. A trainable
        parameter without a gradient contributes zeros and receives the reduced gradient, so that
        all ranks have one, for every path of backward; if no rank has one, it stays None. With the
        delta method, gradients stay this rank's own, and the call does nothing.
        """
        self._adasum.synchronize()

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Keep step() from synchronizing, after gradients were changed by the user."""
        self._adasum.skips_synchronize = True
        try:
            yield
        finally:
            self._adasum.skips_synchronize = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate `passes` backward passes from now on; call it between two steps.

        Raises:
            ValueError: `passes` is not an int >= 1, or does not fit the tree of order="tree".
            OptimizerOrderError: Gradients are being reduced; or, with order="tree", the gradients
                of this step's earlier passes would be lost.
        """
        require_count("backward_passes_per_step", passes, 1)
        held = self._adasum
        held.refuse_in_flight("set_backward_passes_per_step()")
        if held.backward.tree is not None and held.backward.tree.holds_gradients:
            raise OptimizerOrderError(
                "set_backward_passes_per_step() was called between two passes of a step, whose "
                "tree would be another: call it after step(), or zero_grad() to leave them out"
            )
        reducer = held.settings.reducer
        if reducer.op.ordered:
            order: Any = {**reducer.op.order_options, "passes": passes}
            require_order("tree", self.op, order["accumulate"], passes, held.group.size, 1.0)
            reducer.op = in_order(self.op, **order)
        held.backward.passes = passes
        held.backward.restart()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients by their total norm, and return that norm.

        Like `torch.nn.utils.clip_grad_norm_`, but also for mode="owners", which spreads gradients
        over the ranks: then it is collective. It synchronizes first. With the delta method it clips
        this rank's own gradients.

        Args:
            max_norm: The largest norm of the result.
            norm_type: The p of the p-norm, above 0; inf is the largest absolute value.
            error_if_nonfinite: Raise RuntimeError if the norm is not finite.
            foreach: As in torch.

        Raises:
            ValueError: `norm_type` is not above 0.
            RuntimeError: See `error_if_nonfinite`; on every rank if gradients are reduced.
            OptimizerOrderError: With step_in_backward, since clipping comes too late.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be above 0, got {norm_type!r}")
        self._adasum.finish_gradients()
        total = self._adasum.total_norm(float(norm_type), foreach)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot "
                "be clipped: pass error_if_nonfinite=False to scale them by it all the same"
            )
        clip(self._adasum.backward.named(), max_norm, total, foreach)
        return total

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients, and restart the count of backward passes, to leave a batch out.

        All ranks must leave it out. If this rank's backward did not reach every parameter, another
        rank's may have, and wait for this rank: then gradients are reduced before they are zeroed.

        Raises:
            OptimizerOrderError: backward was interrupted, with reductions in flight.
        """
        self._adasum.refuse_in_flight("zero_grad()")
        self._adasum.zero_grad()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group to the wrapped optimizer; call it in the same order on every rank.

        The parameters get their own buckets by size, reduced after all others. If called between
        backward and step(), they are reduced from the next step on.

        Raises:
            OptimizerOrderError: Gradients are being reduced.
        """
        self._adasum.refuse_in_flight("add_param_group()")
        super().add_param_group(param_group)
        self._adasum.follow_groups()

    def set_observer(self, observer: Observer | None) -> None:
        """Show an observer every reduction from now on, or stop with None; the same on all ranks.

        Raises:
            TypeError: The observer lacks a method of `adasum.observer.Observer`.
        """
        require_observer(observer)
        if isinstance(observer, DifferencesObserver):
            observer.differences = self._adasum.differences
        self._adasum.settings.reducer.observer = observer

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather every parameter's state, so that `state_dict()` is whole; collective.

        Without mode="owners" it does nothing, since every rank has all of its state. Otherwise the
        result holds until the next step. The states are copies on the CPU, made one parameter after
        another: the only further memory is for the largest state.

        Args:
            to: The rank that will call state_dict(), numbered among the ranks that reduce together;
                None for every rank.

        Raises:
            ValueError: `to` is not such a rank.
            TypeError: On every rank, if a state holds something that cannot be sent.
        """
        self._adasum.refuse_in_flight("consolidate_state_dict()")
        self._adasum.consolidate_state_dict(to)

    def state_dict(self) -> dict[str, Any]:
        """Return the state and the parameter groups; not collective.

        Raises:
            RuntimeError: With mode="owners", if other ranks have states that this one lacks: call
                `consolidate_state_dict()` on all ranks before.
        """
        return self._adasum.state_dict(super().state_dict())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a whole state_dict, saved with any number of ranks.

        Every rank loads it, or only the root of a following `broadcast_optimizer_state`.
        """
        self._adasum.refuse_in_flight("load_state_dict()")
        super().load_state_dict(self._adasum.part_of(state_dict))

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an optimizer wrapped by DistributedOptimizer cannot be copied or pickled: take its "
            "state_dict(), and load it into a new optimizer"
        )


# The one signature that editors and help() show.
DistributedOptimizer.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    DistributedOptimizer.__init__.__get__(object())
)


def _settings_of(
    reference: weakref.ref[DistributedOptimizer], base: type, asked: Sequence[Setting]
) -> list[Setting]:
    """Return the settings that must agree on all ranks, with the present hyperparameters."""
    wrapper: Any = reference()
    passes = ("backward_passes_per_step", str(wrapper.backward_passes_per_step))
    return [*describe_hyperparameters(wrapper, base), *asked, passes]
