"""What both methods share: a class placed in front of the wrapped optimizer's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adasum.horovod.process_sets import ProcessSet
from adasum.observer import Observer, require_observer
from adasum.optimizer.backward_hooks import BackwardHooks, OptimizerOrderError
from adasum.optimizer.bucket_reduction import BucketReducer, Reduction
from adasum.optimizer.parameter_check import ParameterCheck
from adasum.optimizer.parameters import Named, PlanBuckets
from adasum.optimizer.state_average import average_state
from collectives import Reducer, Sum

# What GradScaler sets on an optimizer for the time of a step.
_SCALER_STATE = ("grad_scale", "found_inf")

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    # `wrap` makes a class of this mixin and the wrapped optimizer's class, so that super() below is
    # the optimizer's class.
    _Base = object


@dataclass
class Settings:
    """What DistributedOptimizer was asked for.

    Attributes:
        reducer: Reduces each bucket.
        plan_buckets: Divides parameters into buckets by size.
        passes: Backward passes of a step.
        sparse_as_dense: Whether sparse gradients are made dense first.
        one_rank: Whether this rank reduces with no other.
        op: As asked for; the reducer's is Sum where Average is divided before and after it.
        process_set: As asked for.
        local_steps: Steps between two reductions.
        check_parameters: Whether ranks compare their parameters before the first reduction.
    """

    reducer: BucketReducer
    plan_buckets: PlanBuckets
    passes: int
    sparse_as_dense: bool
    one_rank: bool
    op: Reducer
    process_set: ProcessSet
    local_steps: int = 1
    check_parameters: bool = True


class DistributedMixin(_Base):
    """The wrapped optimizer with a reduction in its step; `super()` is its own class."""

    # Makes GradScaler call step() always and on every rank, and leave unscaling and skipping to it,
    # so that the ranks can skip together.
    _step_supports_amp_scaling = True
    # Whether buckets start while backward runs, and backward returns only once they are reduced.
    _adasum_early = False
    _adasum_final = False
    _adasum_skip = False
    _adasum_base: type[torch.optim.Optimizer]
    _adasum_hooks: BackwardHooks
    # None where nothing is to be compared.
    _adasum_check: ParameterCheck | None
    _adasum_settings: Settings
    _adasum_unscales_itself: bool

    def _prepare(self) -> None:
        """Set the attributes of the method's own."""
        raise NotImplementedError

    def _start_bucket(self, members: Sequence[Named], bucket: str) -> list[Reduction]:
        """Start reducing the members of a bucket."""
        raise NotImplementedError

    def _finish_reductions(self) -> None:
        """Do what is left when all buckets are reduced."""

    def _take_step(self, closure: Callable[[], Any] | None) -> Any:
        """Reduce and step, in the method's order; the closure is `step`'s, through `_evaluate`."""
        raise NotImplementedError

    @property
    def op(self) -> Reducer:
        """The reducer that DistributedOptimizer was given."""
        return self._adasum_settings.op

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce."""
        return self._adasum_settings.process_set

    @property
    def backward_passes_per_step(self) -> int:
        """How many backward passes a step takes; `set_backward_passes_per_step` changes it."""
        return self._adasum_hooks.passes

    @property
    def _parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter: Horovod's, which scripts and its own tests read."""
        return {parameter: name for name, parameter in self._adasum_hooks.named}

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the closure of a step, and make its gradients dense."""
        loss = closure()
        self._densify(self._adasum_hooks.named)
        return loss

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce and take one step.

        By the gradient method a closure is evaluated as often as the wrapped optimizer asks for.
        Each time its gradients are reduced, and so is a loss returned as a floating-point tensor,
        so that optimizers that decide by the loss decide alike on every rank. By the delta method
        a closure sees this rank's data alone.

        Args:
            closure: Evaluates the model, calls backward and returns the loss.

        Returns:
            What the wrapped optimizer's step returns: the loss with a closure, else None.

        Raises:
            OptimizerOrderError: The call comes where gradients would be lost or stepped by twice.
            CollectiveMismatchError: At the first step, where the ranks' parameters differ.
            CollectiveError: A reduction failed.
        """
        try:
            if self._adasum_check is not None and closure is None:
                self._adasum_check.warn_without_gradients()
            self._check_parameters()
            if closure is None:
                self._densify(self._adasum_hooks.named)
            else:
                closure = partial(self._evaluate, closure)
            result = self._take_step(closure)
        except BaseException:
            # GradScaler itself drops what it has set only after steps that return, and multiplies
            # its next scale by what is left.
            for key in _SCALER_STATE:
                self.__dict__.pop(key, None)
            raise
        self._adasum_hooks.restart()
        return result

    def _check_parameters(self) -> None:
        """Let ranks compare the parameters that are new, before anything of them is reduced."""
        if self._adasum_check is not None:
            self._adasum_check.run()

    def synchronize(self) -> None:
        """Wait until the gradients may be read and changed."""
        raise NotImplementedError

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Keep step() from synchronizing: for gradients changed after synchronize()."""
        self._adasum_skip = True
        try:
            yield
        finally:
            self._adasum_skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accumulate `passes` backward passes from now on; to be called between two steps.

        Raises:
            ValueError: `passes` is not an int >= 1.
            OptimizerOrderError: Gradients are being reduced.
        """
        require_passes(passes)
        self._refuse_in_flight("set_backward_passes_per_step()")
        self._adasum_hooks.passes = passes
        self._adasum_hooks.restart()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Do as the wrapped optimizer, and begin the step anew: a batch may be left out.

        Raises:
            OptimizerOrderError: backward was interrupted, with reductions in flight.
        """
        self._refuse_in_flight("zero_grad()")
        self._adasum_hooks.restart()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Do as the wrapped optimizer; call it in the same order on every rank.

        The parameters have buckets by size of their own, reduced after all others.

        Raises:
            OptimizerOrderError: Gradients are being reduced.
        """
        self._refuse_in_flight("add_param_group()")
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        added = enumerate(self.param_groups[number]["params"])
        named = [(f"allreduce.noname.{number}.{i}", parameter) for i, parameter in added]
        buckets = self._adasum_settings.plan_buckets(named)
        self._adasum_hooks.add(named, buckets)
        if self._adasum_check is not None:
            self._adasum_check.add(named, buckets)

    def set_observer(self, observer: Observer | None) -> None:
        """Show an observer every reduction from now on; None ends it. The same on all ranks.

        Raises:
            TypeError: It lacks a method of `adasum.observer.Observer`.
        """
        require_observer(observer)
        self._adasum_settings.reducer.observer = observer

    def average_state(self) -> None:
        """Average the optimizer's state over the ranks; collective.

        Adasum's delta method leaves each rank a state of its own (momentum, Adam's moments). After
        this call any rank's state_dict() stands for all. Floating-point tensors are averaged over
        the ranks that have them, and given to those that do not; numbers, and tensors in lists
        (LBFGS's history), stay as they are on each rank.

        Raises:
            ValueError: On every rank, where shapes or dtypes differ.
        """
        self._refuse_in_flight("average_state()")
        if not self._adasum_settings.one_rank:
            average_state(self, self._adasum_settings.reducer.group)

    def _refuse_in_flight(self, call: str) -> None:
        if self._adasum_hooks.busy:
            raise OptimizerOrderError(
                f"optimizer.{call} was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are being reduced"
            )

    def _any_rank_skips(self) -> bool:
        """Return whether, under GradScaler, any rank's gradients hold a non-finite value."""
        found = self.__dict__.get("found_inf")
        if found is None:
            return False
        total = torch.as_tensor(found, dtype=torch.float32).reshape(1).clone()
        self._adasum_settings.reducer.group.all_reduce(total, Sum, name="found_inf")
        return bool(total.item())

    def _densify(self, named: Sequence[Named]) -> None:
        """Make gradients dense where `sparse_as_dense` asks for it, on one rank too."""
        if self._adasum_settings.sparse_as_dense:
            for _, parameter in named:
                if parameter.grad is not None and parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()

    def _evaluate_and_resparsify(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._resparsify()
        return loss

    def _resparsify(self) -> None:
        """Make gradients that were made dense sparse by rows again for SparseAdam, as Horovod does.

        It refuses dense ones, and leaves what belongs to rows without a gradient alone.
        """
        if not (self._adasum_settings.sparse_as_dense and isinstance(self, torch.optim.SparseAdam)):
            return
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and not parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_sparse(1)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an optimizer wrapped by DistributedOptimizer cannot be copied or pickled: take its "
            "state_dict(), and load it into a new optimizer"
        )

    def _local_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take the wrapped optimizer's step, unscaled or skipped as GradScaler asks for."""
        if closure is None:
            self._resparsify()
        else:
            closure = partial(self._evaluate_and_resparsify, closure)
        scaled = "found_inf" in self.__dict__
        if not scaled or self._adasum_unscales_itself:
            return super().step() if closure is None else super().step(closure)
        if bool(self.__dict__["found_inf"]):
            return None
        scale = self.__dict__.get("grad_scale")
        if scale is not None:
            # By float64, as GradScaler does it: a subnormal's reciprocal is infinite in float32.
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        # Some optimizers refuse a step while these are set; GradScaler deletes them afterwards.
        held = {key: self.__dict__.pop(key) for key in _SCALER_STATE if key in self.__dict__}
        try:
            return super().step()
        finally:
            self.__dict__.update(held)


# torch wraps the step of any optimizer class not so marked, and would run step hooks twice.
vars(DistributedMixin)["step"].hooked = True


def wrap(
    optimizer: torch.optim.Optimizer,
    method: type[DistributedMixin],
    named: Sequence[Named],
    buckets: Sequence[Sequence[Named]],
    settings: Settings,
) -> torch.optim.Optimizer:
    """Return an instance of a subclass of `method` and the optimizer's class.

    It shares the optimizer's __dict__: load_state_dict on either replaces state and param_groups
    for both.

    Args:
        optimizer: Left as it is, but for what is added to its __dict__.
        method: One of the two methods.
        named: (name, parameter) of every parameter, in registration order.
        buckets: The same pairs, divided into buckets in the order of their reductions.
        settings: What the method needs to know.
    """
    base = type(optimizer)
    wrapper: Any = object.__new__(type(base.__name__, (method, base), {}))
    wrapper.__dict__ = optimizer.__dict__
    wrapper._adasum_base = base
    wrapper._adasum_settings = settings
    wrapper._adasum_unscales_itself = getattr(optimizer, "_step_supports_amp_scaling", False)
    wrapper._adasum_check = None
    if settings.check_parameters and not settings.one_rank:
        wrapper._adasum_check = ParameterCheck(settings.reducer.group)
        wrapper._adasum_check.add(named, buckets)
    wrapper._prepare()
    reference = weakref.ref(wrapper)

    def start_bucket(members: Sequence[Named], name: str) -> list[Reduction]:
        target: Any = reference()
        if target is None:
            raise OptimizerOrderError(
                "the optimizer that DistributedOptimizer returned was dropped, and the one given "
                "to it reduces nothing: optimizer = DistributedOptimizer(optimizer) keeps it"
            )
        if settings.one_rank:
            return []
        target._check_parameters()
        target._densify(members)
        return target._start_bucket(members, name)

    def finish() -> None:
        target: Any = reference()
        if target is not None and not settings.one_rank:
            target._finish_reductions()

    wrapper._adasum_hooks = BackwardHooks(
        named,
        buckets,
        start_bucket,
        passes=settings.passes,
        early=method._adasum_early and not settings.one_rank,
        final=method._adasum_final,
        finish=finish,
    )
    _keep_scheduler_patch(wrapper)
    return wrapper


def require_passes(passes: int) -> None:
    """Raise ValueError unless it is a number of backward passes."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an int >= 1, not {passes!r}")


def _keep_scheduler_patch(wrapper: Any) -> None:
    """Patch the wrapper's step as a scheduler that was made before has patched the optimizer's.

    By the two marks that torch's schedulers look for, which are private to torch.
    """
    if wrapper.__dict__.pop("step", None) is None:
        return
    reference = weakref.ref(wrapper)

    @wraps(type(wrapper).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        target: Any = reference()
        target._opt_called = True
        return type(target).step(target, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    wrapper.step = step
