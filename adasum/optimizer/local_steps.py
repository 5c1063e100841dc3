"""Local steps: ranks step by themselves, and the difference of several steps is reduced.

Sources: Stich, "Local SGD converges fast and communicates little", arXiv 1805.09767; with Adasum in
the place of the average, the delta method.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from adasum.optimizer.buckets.kinds import describe_kind, kind_of
from adasum.optimizer.consistency.membership import Change
from adasum.optimizer.delta_method import MAX_IN_FLIGHT, DeltaMethod, may_step

_KEY = "local_steps"


class LocalStepsMethod(DeltaMethod):
    """The delta method with several local steps between two reductions.

    Beside the buckets in flight it keeps a copy of the model, as the last reduction left it.
    """

    _adasum_asked = "local_steps"
    # Nothing is reduced before step(), so any number of backward passes may come before it.
    _adasum_counts_passes = False
    # The parameters' values when the period began; of those that may have changed since.
    _adasum_start: dict[Tensor, Tensor]
    _adasum_taken = 0

    def _prepare(self) -> None:
        super()._prepare()
        self._adasum_start = {}

    def _check_parameters(self) -> None:
        """Compare the values that the period began with: after local steps ranks differ."""
        self._adasum_check.run(self._adasum_start if self._adasum_taken else {})

    def synchronize(self) -> None:
        """Do nothing: gradients stay this rank's own. See `reduce_local_steps`."""

    def _take_step(self, closure: Callable[[], Any] | None, options: dict[str, Any]) -> Any:
        if self._adasum_settings.one_rank:
            return self._between_hooks(self._local_step, closure, options)
        self._remember_start()
        if self._skips():
            self._count_step()
            return None
        return self._between_hooks(self._step_and_count, closure, options)

    def _step_and_count(self, closure: Callable[[], Any] | None, **options: Any) -> Any:
        result = self._local_step(closure, **options)
        self._count_step()
        return result

    def _count_step(self) -> None:
        """Reduce where this step is the last one of its period."""
        self._adasum_taken += 1
        if self._adasum_taken >= self._adasum_settings.local_steps:
            self._reduce_difference()

    def reduce_local_steps(self) -> None:
        """Reduce the difference now, and begin a period anew."""
        if self._adasum_settings.one_rank:
            return
        self._follow_groups()
        self._remember_start()
        self._reduce_difference()
        self._adasum_hooks.restart()

    def _follow(self, change: Change) -> None:
        """Follow a change where a period ends.

        Raises:
            ValueError: A parameter has left the optimizer with local steps that are not reduced.
        """
        stepped = [each for each in change.gone if each in self._adasum_start]
        if stepped and self._adasum_taken:
            raise ValueError(
                f"{self._adasum_hooks.names[stepped[0]]} was taken out of param_groups after "
                f"{self._adasum_taken} local steps that are not reduced: call "
                "optimizer.reduce_local_steps() before"
            )
        super()._follow(change)
        for parameter in change.gone:
            self._adasum_start.pop(parameter, None)

    @torch.no_grad()
    def _remember_start(self) -> None:
        """Copy the parameters that may step from now on; all of them where a period begins.

        ValueError: one has changed in the middle of a period, so that there is no difference.
        """
        for name, parameter in self._adasum_hooks.named:
            start = self._adasum_start.get(parameter)
            if start is not None and kind_of(start) != kind_of(parameter):
                if self._adasum_taken:
                    raise ValueError(
                        f"{name} was {describe_kind(start)} when this period of local steps began "
                        f"and is {describe_kind(parameter)} after {self._adasum_taken} of them: "
                        "its shape, dtype, device or strides can change where a period ends, so "
                        "call optimizer.reduce_local_steps() before"
                    )
                start = None
                del self._adasum_start[parameter]
            if start is None and may_step(parameter):
                self._adasum_start[parameter] = _like(parameter).copy_(parameter)
            elif start is not None and not self._adasum_taken:
                start.copy_(parameter)

    def _reduce_difference(self) -> None:
        self._adasum_buffers.restart()
        try:
            with self._reducing_from(dict(self._adasum_start)):
                self._adasum_hooks.synchronize(max_in_flight=MAX_IN_FLIGHT)
        finally:
            self._adasum_taken = 0

    def _check_again(self) -> None:
        self._adasum_check.run_again(equal=not self._adasum_taken)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state; between two reductions also how far this rank is from one.

        Under "local_steps": the number of steps since the last reduction, and the values of the
        parameters at that time, by number. Between two reductions each rank's state_dict is its
        own, and so are its parameters.
        """
        packed = super().state_dict()
        if self._adasum_taken:
            numbers = {parameter: i for i, parameter in enumerate(self._adasum_parameters())}
            start = {numbers[each]: value for each, value in self._adasum_start.items()}
            packed[_KEY] = {"taken": self._adasum_taken, "start": start}
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state_dict, and go on as far from the next reduction as it was.

        Load the model's parameters of the same rank and the same time, too.
        """
        super().load_state_dict(state_dict)
        saved = state_dict.get(_KEY, {"taken": 0, "start": {}})
        parameters = self._adasum_parameters()
        self._adasum_taken = saved["taken"]
        self._adasum_start = {
            parameters[number]: _like(parameters[number]).copy_(value)
            for number, value in saved["start"].items()
        }

    def set_backward_passes_per_step(self, passes: int) -> None:
        """Accept 1 alone; ValueError for another number."""
        if passes != 1:
            raise ValueError(
                f"local_steps={self._adasum_settings.local_steps} and backward_passes_per_step="
                f"{passes!r} exclude each other"
            )


def _like(parameter: Tensor) -> Tensor:
    """Return memory for the parameter's values with its strides, whatever those are."""
    dtype, device, shape, stride = kind_of(parameter)
    return torch.empty_strided(shape, stride, dtype=dtype, device=device)
