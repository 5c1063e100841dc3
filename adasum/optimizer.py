"""DistributedOptimizer: an optimizer whose gradients or steps are reduced over the ranks."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from adasum.compression import Compression, Compressor
from adasum.gradients import GradientReducer, OptimizerOrderError, Wire
from adasum.parameters import Groups, Named, name_parameters
from adasum.reducer import Adasum
from collectives import Average, Group, Reducer, Sum, default_group

__all__ = ["DistributedOptimizer"]

_AMP = ("grad_scale", "found_inf")

if TYPE_CHECKING:
    _Base = torch.optim.Optimizer
else:
    # The class made for each wrapped optimizer puts its own class after these in the order of
    # resolution, so super() below is that class.
    _Base = object


class _Distributed(_Base):
    """What the distributed optimizers share; `super()` is the wrapped optimizer's class."""

    # GradScaler then always calls step(), on every rank, and leaves unscaling and skipping to it:
    # so the ranks can agree on a skip.
    _step_supports_amp_scaling = True
    _adasum_group: Group
    _adasum_gradients: GradientReducer
    _adasum_native_amp: bool
    _adasum_skip: bool
    _adasum_groups_added: int

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
        _check_passes(passes)
        self._refuse_in_flight("set_backward_passes_per_step()")
        self._adasum_gradients.passes = passes
        self._adasum_gradients.restart()

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As the wrapped optimizer's; OptimizerOrderError while gradients are being reduced."""
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

    def _refuse_in_flight(self, what: str) -> None:
        if self._adasum_gradients.busy:
            raise OptimizerOrderError(
                f"optimizer.{what} was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are being reduced"
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


class _GradientMethod(_Distributed):
    """Sum and Average: each step sees the reduced gradients."""

    def synchronize(self) -> None:
        """Waits until every gradient is the reduced one, issuing what backward left over."""
        self._adasum_gradients.synchronize()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step with the reduced gradients.

        A closure is evaluated as often as the wrapped optimizer asks; each time its gradients are
        reduced, and so is a loss returned as a floating-point tensor, so that optimizers that
        decide by the loss decide alike on every rank.
        """
        gradients = self._adasum_gradients
        if closure is not None and self._adasum_skip:
            raise ValueError(
                "step(closure) within skip_synchronize() would leave its gradients unreduced"
            )
        amp = "found_inf" in self.__dict__
        if self._adasum_group.size > 1 and amp and not gradients.synchronized:
            raise OptimizerOrderError(
                "GradScaler looked at gradients that were not reduced yet: call "
                "optimizer.synchronize() before scaler.unscale_() or scaler.step(), and "
                "scaler.step() within optimizer.skip_synchronize()"
            )
        if closure is None:
            if self._adasum_skip:
                if not gradients.synchronized:
                    raise OptimizerOrderError(
                        "step() within skip_synchronize() needs synchronize() before it: the "
                        "gradients were not reduced"
                    )
            else:
                if gradients.synchronized and not amp:
                    warnings.warn(
                        "optimizer.step() called without optimizer.skip_synchronize() after "
                        "optimizer.synchronize(); the gradients are not reduced a second time",
                        stacklevel=3,
                    )
                self.synchronize()
            answer = self._local_step()
        else:
            answer = self._local_step(self._reduced(closure))
        gradients.restart()
        return answer

    def _reduced(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def evaluate() -> Any:
            loss = closure()
            self.synchronize()
            if (
                isinstance(loss, Tensor)
                and loss.is_floating_point()
                and self._adasum_group.size > 1
            ):
                loss = loss.detach().clone()
                self._adasum_group.all_reduce(loss, self._adasum_loss_op, name="closure's loss")
            return loss

        return evaluate

    _adasum_loss_op: Reducer


class _DeltaMethod(_Distributed):
    """Adasum: every rank takes its own step, and the differences are reduced.

    Parameters after the step are before + Adasum over the ranks of (after - before), per parameter.
    The optimizer's state follows each rank's own gradients.
    """

    _adasum_wire: Wire

    def synchronize(self) -> None:
        """Marks the gradients as final; they stay this rank's own, so nothing is waited for.

        It is here so that Horovod's way to clip works: synchronize(), clip, step() within
        skip_synchronize(), which clips this rank's gradients. The step's differences are reduced in
        any case.
        """
        self._adasum_gradients.synchronize()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """The local step (a closure sees this rank's data), then before + reduced difference."""
        gradients = self._adasum_gradients
        gradients.densify()
        if self._adasum_group.size == 1:
            answer = self._local_step(closure)
        elif self._any_rank_skips():
            answer = None
        else:
            with torch.no_grad():
                before = [
                    [
                        (parameter, parameter.clone())
                        for _, parameter in members
                        if _moves(parameter)
                    ]
                    for members in gradients.buckets
                ]
            answer = self._local_step(closure)
            with torch.no_grad():
                self._reduce_differences(before)
        gradients.restart()
        return answer

    def _any_rank_skips(self) -> bool:
        """Under GradScaler: whether any rank's gradients hold a non-finite value."""
        found = self.__dict__.get("found_inf")
        if found is None:
            return False
        total = torch.as_tensor(found, dtype=torch.float32).reshape(1).clone()
        self._adasum_group.all_reduce(total, Sum, name="found_inf")
        return bool(total.item())

    def _reduce_differences(self, before: Sequence[Sequence[tuple[Tensor, Tensor]]]) -> None:
        flights = []
        try:
            for number, bucket in enumerate(before):
                if bucket:
                    differences = [parameter.sub_(old) for parameter, old in bucket]
                    flights.append(
                        (self._adasum_wire.reduce_async(differences, f"deltas {number}"), bucket)
                    )
            for flight, bucket in flights:
                flight.wait()
                for parameter, old in bucket:
                    parameter.add_(old)
        except BaseException:
            # A parameter must not be left holding a difference; nor may a reduction still queued
            # write to it once it is restored.
            for flight, _ in flights:
                with suppress(Exception):
                    flight.wait()
            for bucket in before:
                for parameter, old in bucket:
                    parameter.copy_(old)
            raise


def _moves(parameter: Tensor) -> bool:
    # Optimizers step by the gradient, also one left over from before the parameter was frozen.
    return parameter.requires_grad or parameter.grad is not None


def DistributedOptimizer(
    optimizer: torch.optim.Optimizer,
    named_parameters: Iterable[Named] | None = None,
    compression: type[Compressor] = Compression.none,
    backward_passes_per_step: int = 1,
    op: Reducer = Average,
    gradient_predivide_factor: float = 1.0,
    groups: Groups = None,
    sparse_as_dense: bool = False,
    process_set: None = None,
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
    sparse_as_dense: turns sparse gradients into dense ones; else they raise NotImplementedError.

    The group in use is the default group at this call. Errors: TypeError for no optimizer or no
    compression, ValueError for bad op, names, groups, counts and factors, NotImplementedError for
    process_set.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, not {type(optimizer).__name__}"
        )
    if isinstance(optimizer, _Distributed) or "_adasum_gradients" in optimizer.__dict__:
        raise ValueError("optimizer is already wrapped by DistributedOptimizer")
    if process_set is not None:
        raise NotImplementedError("process_set is not supported yet: pass process_set=None")
    if op not in (Sum, Average, Adasum):
        raise ValueError(f"op must be Sum, Average or Adasum, not {op!r}")
    if not (hasattr(compression, "compress") and hasattr(compression, "decompress")):
        raise TypeError(f"compression must have compress and decompress, not {compression!r}")
    _check_passes(backward_passes_per_step)
    if gradient_predivide_factor != 1.0 and op is not Average:
        raise ValueError("gradient_predivide_factor not supported with op != Average")
    if not gradient_predivide_factor > 0:
        raise ValueError(
            f"gradient_predivide_factor must be positive, not {gradient_predivide_factor!r}"
        )
    group = default_group()
    named = name_parameters(optimizer, named_parameters)
    wire = Wire(group, op, compression)
    if gradient_predivide_factor != 1.0:
        wire.op = Sum
        wire.prescale = 1.0 / gradient_predivide_factor
        wire.postscale = gradient_predivide_factor / group.size
    gradients = GradientReducer(
        named,
        wire=None if op is Adasum or group.size == 1 else wire,
        passes=backward_passes_per_step,
        groups=groups,
        sparse_as_dense=sparse_as_dense,
    )
    return _wrap(optimizer, op, wire, gradients)


def _wrap(
    optimizer: torch.optim.Optimizer, op: Reducer, wire: Wire, gradients: GradientReducer
) -> torch.optim.Optimizer:
    base = type(optimizer)
    method = _DeltaMethod if op is Adasum else _GradientMethod
    wrapper: Any = object.__new__(type(base.__name__, (method, base), {}))
    native_amp = bool(getattr(optimizer, "_step_supports_amp_scaling", False))
    # One dictionary, not a copy: load_state_dict on either replaces state and param_groups in it.
    wrapper.__dict__ = optimizer.__dict__
    wrapper._adasum_group = wire.group
    wrapper._adasum_gradients = gradients
    wrapper._adasum_wire = wire
    wrapper._adasum_loss_op = op
    wrapper._adasum_native_amp = native_amp
    wrapper._adasum_skip = False
    _keep_scheduler_patch(wrapper)
    return wrapper


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


def _check_passes(passes: int) -> None:
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise ValueError(f"backward_passes_per_step must be an int >= 1, not {passes!r}")


# torch wraps the step of any optimizer class not so marked, and would run step hooks twice.
vars(_GradientMethod)["step"].hooked = True
vars(_DeltaMethod)["step"].hooked = True
