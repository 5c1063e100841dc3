"""What the distributed optimizers share: a class put in front of the wrapped optimizer's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adasum.optimizer.gradients import GradientReducer, OptimizerOrderError
from adasum.optimizer.parameters import Named, PlanBuckets
from adasum.optimizer.state_average import average_state
from adasum.optimizer.wire import Wire
from adasum.watch import Watcher
from collectives import Group

__all__ = ["Distributed", "check_passes", "densify", "forgets_scaler", "wrap"]

_AMP = ("grad_scale", "found_inf")

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    # The class made for each wrapped optimizer puts its own class after these in the order of
    # resolution, so super() below is that class.
    _Base = object


class Distributed(_Base):
    """The wrapped optimizer with a reduction in its step; `super()` is its own class."""

    # GradScaler then always calls step(), on every rank, and leaves unscaling and skipping to it:
    # so the ranks can agree on a skip.
    _step_supports_amp_scaling = True
    _adasum_base: type[torch.optim.Optimizer]
    _adasum_group: Group | None
    _adasum_wire: Wire
    _adasum_gradients: GradientReducer
    _adasum_native_amp: bool
    _adasum_sparse_as_dense: bool
    _adasum_skip: bool

    @property
    def _adasum_alone(self) -> bool:
        return self._adasum_group is None or self._adasum_group.size == 1

    def _prepare(self) -> None:
        """What the method needs of its own."""
        raise NotImplementedError

    def synchronize(self) -> None:
        raise NotImplementedError

    @contextmanager
    def skip_synchronize(self) -> Iterator[None]:
        """Within it step() does not synchronize: for gradients changed after synchronize()."""
        self._adasum_skip = True
        try:
            yield
        finally:
            self._adasum_skip = False

    def set_backward_passes_per_step(self, passes: int) -> None:
        """From the next step on `passes` backward passes are accumulated."""
        check_passes(passes)
        self._refuse_in_flight("set_backward_passes_per_step()")
        self._adasum_gradients.passes = passes
        self._adasum_gradients.restart()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; the step begins anew, so a batch can be passed over.

        OptimizerOrderError where a backward pass was broken off with gradients under way.
        """
        self._refuse_in_flight("zero_grad()")
        self._adasum_gradients.restart()
        super().zero_grad(*args, **kwargs)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As the wrapped optimizer's; call it in the same order on every rank."""
        self._refuse_in_flight("add_param_group()")
        super().add_param_group(param_group)
        number = len(self.param_groups) - 1
        self._adasum_gradients.add(
            [
                (f"allreduce.noname.{number}.{i}", parameter)
                for i, parameter in enumerate(self.param_groups[number]["params"])
            ]
        )

    def watch(self, watcher: Watcher | None) -> None:
        """Shows `watcher` every reduction from now on (None: no longer); the same on all ranks."""
        self._adasum_wire.watch = watcher

    def average_state(self) -> None:
        """Gives every rank the mean over the ranks of the optimizer's state; collective.

        Adasum's delta method leaves each rank a state of its own (momentum, Adam's moments). Called
        before state_dict(), any rank's checkpoint stands for all. Floating-point tensors are
        averaged over the ranks that have them, and given to those that do not; numbers and tensors
        in lists (LBFGS has such a history) stay each rank's own. ValueError on every rank where
        shapes or dtypes differ.
        """
        self._refuse_in_flight("average_state()")
        if self._adasum_group is not None and self._adasum_group.size > 1:
            average_state(self, self._adasum_group)

    def _refuse_in_flight(self, what: str) -> None:
        if self._adasum_gradients.busy:
            raise OptimizerOrderError(
                f"optimizer.{what} was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are being reduced"
            )

    def _densify(self) -> None:
        """Makes all gradients dense where `sparse_as_dense` asks for it, also on one rank."""
        if self._adasum_sparse_as_dense:
            for _, parameter in self._adasum_gradients.named:
                densify(parameter)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an optimizer wrapped by DistributedOptimizer cannot be copied or pickled: take its "
            "state_dict(), and load it into a new optimizer"
        )

    def _local_step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The wrapped optimizer's own step, unscaling or skipping as a GradScaler asks for."""
        amp = "found_inf" in self.__dict__
        if not amp or self._adasum_native_amp:
            return super().step() if closure is None else super().step(closure)
        if bool(self.__dict__["found_inf"]):
            return None
        scale = self.__dict__.get("grad_scale")
        if scale is not None:
            # Through float64, as GradScaler does it: the float32 reciprocal of a subnormal is inf.
            inverse = scale.double().reciprocal().float()
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(inverse.to(parameter.grad.device))
        # Some optimizers refuse a step while these are set; GradScaler deletes them afterwards.
        held = {key: self.__dict__.pop(key) for key in _AMP if key in self.__dict__}
        try:
            return super().step()
        finally:
            self.__dict__.update(held)


def wrap(
    optimizer: torch.optim.Optimizer,
    method: type[Distributed],
    wire: Wire,
    group: Group | None,
    named: Sequence[Named],
    *,
    passes: int,
    buckets: PlanBuckets,
    sparse_as_dense: bool,
    early: bool,
    final: bool,
) -> torch.optim.Optimizer:
    """An instance of a subclass of `method` and the optimizer's class that shares its __dict__."""
    base = type(optimizer)
    wrapper: Any = object.__new__(type(base.__name__, (method, base), {}))
    native_amp = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    # One dictionary, not a copy: load_state_dict on either replaces state and param_groups in it.
    wrapper.__dict__ = optimizer.__dict__
    wrapper._adasum_base = base
    wrapper._adasum_group = group
    wrapper._adasum_wire = wire
    wrapper._adasum_native_amp = native_amp
    wrapper._adasum_sparse_as_dense = sparse_as_dense
    wrapper._adasum_skip = False
    wrapper._prepare()
    reference = weakref.ref(wrapper)

    def send(members: Sequence[Named], label: str) -> Any:
        target: Any = reference()
        if target is None:
            raise OptimizerOrderError(
                "the optimizer that DistributedOptimizer returned was dropped, and the one given "
                "to it reduces nothing: optimizer = DistributedOptimizer(optimizer) keeps it"
            )
        return target._send(members, label)

    wrapper._adasum_gradients = GradientReducer(
        named,
        send,
        early=early,
        final=final,
        one_rank=wrapper._adasum_alone,
        passes=passes,
        buckets=buckets,
    )
    _keep_scheduler_patch(wrapper)
    return wrapper


def forgets_scaler(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step that drops what GradScaler set for it also when it raises.

    GradScaler does so after steps that return; what it finds it multiplies the next scale by.
    """

    @wraps(step)
    def stepped(self: Any, closure: Callable[[], Any] | None = None) -> Any:
        try:
            return step(self, closure)
        except BaseException:
            for key in _AMP:
                self.__dict__.pop(key, None)
            raise

    return stepped


def densify(parameter: Tensor) -> None:
    """Turns a sparse gradient into a dense one."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        parameter.grad = parameter.grad.to_dense()


def check_passes(passes: int) -> None:
    """ValueError unless it is a number of backward passes."""
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an int >= 1, not {passes!r}")


def _keep_scheduler_patch(wrapper: Any) -> None:
    """A scheduler made before wrapping replaced optimizer.step: the wrapper's takes its place."""
    patched = wrapper.__dict__.pop("step", None)
    if patched is None:
        return
    reference = weakref.ref(wrapper)
    function = type(wrapper).step

    @wraps(function)
    def step(*args: Any, **kwargs: Any) -> Any:
        target: Any = reference()
        target._opt_called = True
        return function(target, *args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    wrapper.step = step
