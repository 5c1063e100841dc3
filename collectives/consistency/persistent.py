"""The collectives that a group's ranks make once and start any number of times."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from typing_extensions import Unpack

from collectives.consistency.arguments import Arguments, ReductionOptions, ScaleOptions
from collectives.consistency.calls import Calls
from collectives.consistency.requests import Request
from collectives.reducers import Reducer, Sum

Tensor = torch.Tensor


class PersistentCollectives:
    """The part of a Group that makes requests; each method is a collective, as the Group's are."""

    _call: Calls
    _arguments: Arguments

    def all_reduce_init(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        negotiate: bool = True,
        **options: Unpack[ReductionOptions],
    ) -> Request[Tensor]:
        """Make, with all ranks, an `all_reduce` that is then started any number of times.

        Arguments as all_reduce. Making it is negotiated, and so is each start; making it while a
        rank has joined is a mismatch. With negotiate=False the request is made on this rank alone,
        and each start is negotiated as an all_reduce with the same arguments: other ranks may make
        that call instead, or take part by `join`.
        """
        call = self._arguments.all_reduce(tensor, op, segments, **options)
        return Request(self._call, call, negotiate=negotiate)

    def grouped_all_reduce_init(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        packed: bool = False,
        negotiate: bool = True,
        **options: Unpack[ReductionOptions],
    ) -> Request[list[Tensor]]:
        """Make, with all ranks, a `grouped_all_reduce` that is started any number of times.

        Arguments as grouped_all_reduce; negotiate as for all_reduce_init.
        """
        call = self._arguments.grouped_all_reduce(tensors, op, packed=packed, **options)
        return Request(self._call, call, negotiate=negotiate)

    def reduce_scatter_init(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        by_rows: bool = False,
        out: Tensor | None = None,
        **options: Unpack[ScaleOptions],
    ) -> Request[Tensor]:
        """Make, with all ranks, a `reduce_scatter` that is started any number of times.

        Arguments as reduce_scatter. Each wait() returns a new tensor, unless it is to write to
        `out`.
        """
        call = self._arguments.reduce_scatter(tensor, op, by_rows, out, **options)
        return Request(self._call, call)

    def broadcast_init(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None
    ) -> Request[Tensor]:
        """Make, with all ranks, a `broadcast` that is started any number of times."""
        return Request(self._call, self._arguments.broadcast(tensor, root, name))

    def reduce_to_owners_init(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        owners: Sequence[int] | None = None,
        negotiate: bool = True,
        **options: Unpack[ScaleOptions],
    ) -> Request[list[int]]:
        """Make, with all ranks, a `reduce_to_owners` that is started any number of times.

        Arguments as reduce_to_owners; negotiate as for all_reduce_init.
        """
        call = self._arguments.reduce_to_owners(tensors, op, owners, **options)
        return Request(self._call, call, negotiate=negotiate)
