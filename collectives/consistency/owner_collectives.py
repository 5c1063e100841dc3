"""The collectives in which each tensor belongs to one rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from typing_extensions import Unpack

from collectives.consistency.arguments import Arguments, ScaleOptions
from collectives.consistency.calls import Calls
from collectives.owners import owners
from collectives.reducers import Reducer, Sum
from collectives.schedules import to_owners
from collectives.work import Work

Tensor = torch.Tensor


class OwnerCollectives:
    """The part of a Group that reduces tensors to their owners and copies them from there."""

    size: int
    _call: Calls
    _arguments: Arguments

    def owners(self, numels: Sequence[int]) -> list[int]:
        """Return each tensor's owner: the rank with the fewest elements so far, the first such."""
        return owners(numels, self.size)

    @overload
    def reduce_to_owners(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        owners: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        **options: Unpack[ScaleOptions],
    ) -> list[int]: ...
    @overload
    def reduce_to_owners(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        owners: Sequence[int] | None = None,
        async_op: Literal[True],
        **options: Unpack[ScaleOptions],
    ) -> Work[list[int]]: ...
    @overload
    def reduce_to_owners(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        owners: Sequence[int] | None = None,
        async_op: bool,
        **options: Unpack[ScaleOptions],
    ) -> list[int] | Work[list[int]]: ...

    def reduce_to_owners(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        owners: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Unpack[ScaleOptions],
    ) -> list[int] | Work[list[int]]:
        """Reduce each tensor onto its owner alone, in place; return the owners.

        Op as in reduce. What the other ranks' tensors hold afterwards has no meaning.

        Args:
            tensors: What is reduced.
            op: As in reduce.
            owners: The rank that owns each tensor. Then tensors of one dtype and device travel
                together, packed, in log n steps, and the results have the bits of an all-reduce by
                rd or rechd; those in a FusedBuffer, sorted by `owners_order`, are not packed.
                Unless given, owners are chosen by bytes, in list order, and tensors are reduced one
                after another, with no extra memory but an n-th of one.
            async_op: See the class.
            **options: `name`, `prescale` and `postscale`, as in all_reduce.
        """
        call = self._arguments.reduce_to_owners(tensors, op, owners, **options)
        return self._call(call, async_op=async_op)

    def owners_order(self) -> tuple[int, ...]:
        """Return the ranks in the order in which reduce_to_owners wants their tensors in memory."""
        return to_owners.order(self.size)

    @overload
    def broadcast_from_owners(
        self,
        tensors: Sequence[Tensor],
        *,
        owners: Sequence[int] | None = None,
        name: str | None = None,
        async_op: Literal[False] = False,
    ) -> list[Tensor]: ...
    @overload
    def broadcast_from_owners(
        self,
        tensors: Sequence[Tensor],
        *,
        owners: Sequence[int] | None = None,
        name: str | None = None,
        async_op: Literal[True],
    ) -> Work[list[Tensor]]: ...
    @overload
    def broadcast_from_owners(
        self,
        tensors: Sequence[Tensor],
        *,
        owners: Sequence[int] | None = None,
        name: str | None = None,
        async_op: bool,
    ) -> list[Tensor] | Work[list[Tensor]]: ...

    def broadcast_from_owners(
        self,
        tensors: Sequence[Tensor],
        *,
        owners: Sequence[int] | None = None,
        name: str | None = None,
        async_op: bool = False,
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Copy each tensor to every rank, in place, from its owner, and return them as a list.

        Owners are those that reduce_to_owners was given, or else chose.
        """
        call = self._arguments.broadcast_from_owners(tensors, owners, name)
        return self._call(call, async_op=async_op)
