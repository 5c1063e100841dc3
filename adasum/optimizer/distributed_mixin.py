"""What both methods share: a class placed in front of the wrapped optimizer's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor

from adasum.horovod.process_sets import ProcessSet
from adasum.modes import outside_modes
from adasum.observer import DifferencesObserver, Observer, require_observer
from adasum.optimizer.arguments import require_count, require_order
from adasum.optimizer.buckets.planning import Named
from adasum.optimizer.clipping import clip, norm_of
from adasum.optimizer.consistency.membership import Change, Membership
from adasum.optimizer.consistency.parameter_check import ParameterCheck
from adasum.optimizer.errors import OptimizerOrderError
from adasum.optimizer.reduces import Reduces
from adasum.optimizer.state_average import average_state
from adasum.optimizer.wrapped_step import SCALER_STATE, WrappedStep
from collectives import Reducer
from collectives.tree_order import in_order

# The methods in which ranks may wait for each other, or which change what hooks do.
COLLECTIVE_METHODS = (
    *("step", "zero_grad", "synchronize", "clip_grad_norm_", "add_param_group"),
    *("average_state", "reduce_local_steps", "consolidate_state_dict"),
)


class DistributedMixin(Reduces, WrappedStep):
    """The wrapped optimizer with a reduction in its step.

    DistributedOptimizer makes a class of a method and the wrapped optimizer's class, so that
    super() below is the optimizer's class.
    """

    # Whether buckets start while backward runs, and backward returns only once they are reduced.
    _adasum_early = False
    # Whether differences are reduced, not gradients.
    _adasum_differences = False
    # How it is asked for, in errors.
    _adasum_asked = ""
    _adasum_final = False
    _adasum_skip = False
    # Whether more backward passes than asked for are an error.
    _adasum_counts_passes = True
    # Whether this is inside of `step`.
    _adasum_stepping = False
    _adasum_membership: Membership
    _adasum_check: ParameterCheck

    def _prepare(self) -> None:
        """Set the attributes of the method's own."""
        raise NotImplementedError

    def _take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        """Reduce and step, in the method's order; the closure is that of `step`, by `_evaluate`."""
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
        return self._adasum_hooks.names

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        """Evaluate the closure of a step, and make its gradients dense."""
        loss = closure()
        self._densify(self._adasum_hooks.named)
        return loss

    def step(self, closure: Callable[[], Any] | None = None, **options: Any) -> Any:
        """Reduce and take one step.

        By the gradient method a closure is evaluated as often as the wrapped optimizer asks for.
        Each time its gradients are reduced, and so is a loss returned as a floating-point tensor,
        so that optimizers that decide by the loss decide alike on every rank. By the delta method
        a closure sees this rank's data alone. Hooks of `register_step_pre_hook` see the gradients
        that are stepped by, those of `register_step_post_hook` the parameters that are installed.

        Args:
            closure: Evaluates the model, calls backward and returns the loss.
            options: What the wrapped optimizer's step takes beside it.

        Returns:
            What the wrapped optimizer's step returns: the loss with a closure, else None.

        Raises:
            OptimizerOrderError: The call comes where gradients would be lost or stepped by twice.
            CollectiveMismatchError: Where the ranks' parameters or settings differ: at the first
                step, or at a later one that compares them (`check_every`).
            CollectiveError: A reduction failed.
        """
        try:
            self._follow_groups(reducing=closure is None)
            self._adasum_hooks.refuse_taken_over()
            if closure is None:
                self._adasum_check.warn_without_gradients()
            self._check_parameters()
            if closure is None:
                if self._adasum_counts_passes:
                    self._adasum_hooks.refuse_too_many()
                self._densify(self._adasum_hooks.named)
            else:
                closure = partial(self._evaluate, closure)
            self._adasum_stepping = True
            result = self._take_step(closure, options)
        except BaseException:
            # GradScaler itself drops what it has set only after steps that return, and multiplies
            # its next scale by what is left.
            for key in SCALER_STATE:
                self.__dict__.pop(key, None)
            raise
        finally:
            self._adasum_stepping = False
        self._adasum_hooks.restart()
        self._check_again()
        self._end_step()
        return result

    def _end_step(self) -> None:
        """Do what is left when a step is over."""

    def _follow_groups(self, reducing: bool = False) -> None:
        """Take note of parameters that users have put into the groups, or taken from them.

        reducing: whether the gradients are reduced next; then those of the others come first, as on
        ranks whose backward has reduced them already.
        """
        change = self._adasum_membership.update(self.param_groups, self._adasum_hooks.names)
        if change is not None:
            if reducing and self._adasum_early:
                self._adasum_hooks.end_buckets()
            self._follow(change)

    def _follow(self, change: Change) -> None:
        """Reduce other parameters from now on, in buckets by size behind all others."""
        buckets = self._adasum_settings.plan_buckets(change.new)
        self._adasum_hooks.add(change.new, buckets)
        self._adasum_hooks.forget(change.gone)
        self._adasum_check.add(change.new)
        self._adasum_check.forget(change.gone)

    def _check_parameters(self) -> None:
        self._adasum_check.run()

    def _check_again(self) -> None:
        """Let ranks compare a part of the parameters now and then, after a step."""
        self._adasum_check.run_again()

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
            ValueError: `passes` is not an int >= 1, or cuts the tree of order="tree".
            OptimizerOrderError: Gradients are being reduced; or, with order="tree", some of a
                step's passes are over, whose gradients would be lost.
        """
        require_count("backward_passes_per_step", passes, 1)
        self._refuse_in_flight("set_backward_passes_per_step()")
        if self._adasum_hooks.holds_gradients:
            raise OptimizerOrderError(
                "set_backward_passes_per_step() was called between two passes of a step, whose "
                "tree would be another: call it after step(), or zero_grad() to leave them out"
            )
        reducer, op = self._adasum_settings.reducer, self._adasum_settings.op
        if reducer.op.ordered:
            order: Any = {**reducer.op.order_options, "passes": passes}
            size = self._adasum_group.size
            require_order("tree", op, order["accumulate"], passes, size, 1.0)
            reducer.op = in_order(op, **order)
        self._adasum_hooks.passes = passes
        self._adasum_hooks.restart()

    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Clip the gradients that step() takes by the norm of all of them, and return that norm.

        As `torch.nn.utils.clip_grad_norm_` does, but for gradients that are not all on this rank
        (mode="owners"), too: then it is collective. It synchronizes first. By Adasum's delta
        method and with local steps these are this rank's own gradients.

        Args:
            max_norm: The norm that they have at most afterwards.
            norm_type: The p of the p-norm, above 0; inf is the largest absolute value.
            error_if_nonfinite: Raise RuntimeError where the norm is not finite.
            foreach: As in torch.

        Raises:
            ValueError: `norm_type` is not above 0.
            RuntimeError: See `error_if_nonfinite`; on every rank where gradients are reduced.
            OptimizerOrderError: With step_in_backward, where clipping comes too late.
        """
        if not norm_type > 0:
            raise ValueError(f"norm_type must be above 0, not {norm_type!r}")
        self._follow_groups(reducing=True)
        self._finish_gradients()
        total = self._total_norm(float(norm_type), foreach)
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {total.item()}, so they cannot "
                "be clipped: pass error_if_nonfinite=False to scale them by it all the same"
            )
        clip(self._adasum_hooks.named, max_norm, total, foreach)
        return total

    def _finish_gradients(self) -> None:
        """Wait until the gradients are those that step() takes."""
        self.synchronize()

    def _total_norm(self, norm_type: float, foreach: bool | None) -> Tensor:
        """Return the norm of all gradients that step() takes."""
        return norm_of(self._adasum_hooks.named, norm_type, foreach)

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """Zero the gradients, and count backward passes anew: a batch may be left out.

        Raises:
            OptimizerOrderError: backward was interrupted, with reductions in flight.
        """
        self._refuse_in_flight("zero_grad()")
        self._follow_groups()
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
        # Between backward and step() that is step()'s, behind the gradients of the others.
        if not self._adasum_hooks.any_reached or self._adasum_hooks.ended:
            self._follow_groups()

    def set_observer(self, observer: Observer | None) -> None:
        """Show an observer every reduction from now on; None ends it. The same on all ranks.

        Raises:
            TypeError: It lacks a method of `adasum.observer.Observer`.
        """
        require_observer(observer)
        if isinstance(observer, DifferencesObserver):
            observer.differences = self._adasum_differences
        self._adasum_settings.reducer.observer = observer

    @outside_modes()
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
            average_state(self, self._adasum_group)

    def reduce_local_steps(self) -> None:
        """Reduce now what the steps since the last reduction have changed; collective.

        For the end of training, before an evaluation or a checkpoint: afterwards parameters are
        equal on all ranks, and the next reduction is `local_steps` steps away. With local_steps=1,
        where every step reduces, it does nothing.
        """

    def consolidate_state_dict(self, to: int | None = 0) -> None:
        """Gather every parameter's state, so that `state_dict()` is whole; collective.

        Without mode="owners", where every rank has all of its state, it does nothing. Else it holds
        until the next step. The states are copies on the CPU, made one parameter after another:
        beside them a rank needs no more memory than for the largest.

        Args:
            to: The rank whose state_dict is wanted, its number among the ranks that reduce
                together; None for every rank.

        Raises:
            ValueError: `to` is no such rank.
            TypeError: On every rank, where a state holds something that cannot be sent.
        """

    def _refuse_in_flight(self, call: str) -> None:
        if self._adasum_hooks.busy:
            raise OptimizerOrderError(
                f"optimizer.{call} was called after loss.backward() but before optimizer.step() or "
                "optimizer.synchronize(): the gradients are being reduced. Where backward raised, "
                "on every rank, call optimizer.synchronize() (with step_in_backward=True step()) "
                "and then zero_grad(), to leave the batch out"
            )

    def _densify(self, named: Sequence[Named]) -> None:
        if not self._adasum_settings.sparse_as_dense:
            return
        for _, parameter in named:
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "an optimizer wrapped by DistributedOptimizer cannot be copied or pickled: take its "
            "state_dict(), and load it into a new optimizer"
        )
