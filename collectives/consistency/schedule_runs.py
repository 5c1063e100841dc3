"""A group's runs of all-reduce schedules that users wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from typing_extensions import Unpack

from collectives.consistency.arguments import Arguments, ScaleOptions
from collectives.consistency.calls import Calls
from collectives.consistency.requests import Request
from collectives.reducers import Reducer, Sum
from collectives.schedules.schedule import Schedule
from collectives.work import Work

Tensor = torch.Tensor


class ScheduleRuns:
    """The part of a Group that runs users' schedules; each method is a collective, as its are."""

    _call: Calls
    _arguments: Arguments

    @overload
    def run(
        self,
        schedule: Schedule,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        **options: Unpack[ScaleOptions],
    ) -> Tensor: ...
    @overload
    def run(
        self,
        schedule: Schedule,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: Literal[True],
        **options: Unpack[ScaleOptions],
    ) -> Work[Tensor]: ...
    @overload
    def run(
        self,
        schedule: Schedule,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: bool,
        **options: Unpack[ScaleOptions],
    ) -> Tensor | Work[Tensor]: ...

    def run(
        self,
        schedule: Schedule,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Unpack[ScaleOptions],
    ) -> Tensor | Work[Tensor]:
        """Reduce a contiguous tensor over all ranks, in place, by your own all-reduce schedule.

        It is verified before anything is sent, once for as long as it is one of the latest; keep
        the Schedule, as one with another function is another schedule. Ranks whose steps differ get
        a CollectiveMismatchError. A rank that has joined cannot take part.

        Args:
            schedule: An all-reduce of as many ranks as the group has. For an operator that needs
                one expression tree, such as Adasum, one that `verify` says `carries_adasum`.
            tensor: What is reduced.
            op: As in all_reduce.
            segments: As in all_reduce.
            async_op: See the class.
            **options: `name`, `prescale` and `postscale`, as in all_reduce.
        """
        call = self._arguments.run(schedule, tensor, op, segments, **options)
        return self._call(call, async_op=async_op)

    def run_init(
        self,
        schedule: Schedule,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        **options: Unpack[ScaleOptions],
    ) -> Request[Tensor]:
        """Make, with all ranks, a `run` that is started any number of times. Arguments as run."""
        call = self._arguments.run(schedule, tensor, op, segments, **options)
        return Request(self._call, call)
