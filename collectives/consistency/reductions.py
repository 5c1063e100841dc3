"""The collectives that reduce tensors over a group's ranks.

Overloads say what `async_op` changes: of three, the last is for a flag that is only known when the
program runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import torch
from typing_extensions import Unpack

from collectives.consistency.arguments import Arguments, ReductionOptions, ScaleOptions
from collectives.consistency.calls import Calls
from collectives.reducers import Reducer, Sum
from collectives.work import Work

Tensor = torch.Tensor


class Reductions:
    """The part of a Group that reduces tensors; each method is a collective, as the Group's are."""

    _call: Calls
    _arguments: Arguments

    @overload
    def all_reduce(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: Literal[False] = False,
        **options: Unpack[ReductionOptions],
    ) -> Tensor: ...
    @overload
    def all_reduce(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: Literal[True],
        **options: Unpack[ReductionOptions],
    ) -> Work[Tensor]: ...
    @overload
    def all_reduce(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: bool,
        **options: Unpack[ReductionOptions],
    ) -> Tensor | Work[Tensor]: ...

    def all_reduce(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Unpack[ReductionOptions],
    ) -> Tensor | Work[Tensor]:
        """Reduce a contiguous tensor of any shape over all ranks, in place, and return it.

        Args:
            tensor: What is reduced.
            op: Sum, Average, or another Reducer.
            segments: Element boundaries (0, ..., numel) for operators that work per segment.
            async_op: See the class.
            **options: `algorithm`, a specification such as "xring#2", "rd:16k:rechd" or
                "rechd/vhdd" (`collectives.schedules.spec`), "auto" unless given; `name`, see the
                class; `prescale`, a factor applied before the reduction; `postscale`, one applied
                after it. Integers are multiplied in float64 and truncated towards zero.
        """
        call = self._arguments.all_reduce(tensor, op, segments, **options)
        return self._call(call, async_op=async_op)

    @overload
    def grouped_all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        packed: bool = False,
        async_op: Literal[False] = False,
        **options: Unpack[ReductionOptions],
    ) -> list[Tensor]: ...
    @overload
    def grouped_all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        packed: bool = False,
        async_op: Literal[True],
        **options: Unpack[ReductionOptions],
    ) -> Work[list[Tensor]]: ...
    @overload
    def grouped_all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        packed: bool = False,
        async_op: bool,
        **options: Unpack[ReductionOptions],
    ) -> list[Tensor] | Work[list[Tensor]]: ...

    def grouped_all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        packed: bool = False,
        async_op: bool = False,
        **options: Unpack[ReductionOptions],
    ) -> list[Tensor] | Work[list[Tensor]]:
        """Reduce many tensors at once, in place, and return them as a list.

        Those of one dtype, device and range of the specification travel packed in one buffer;
        operators that work per segment take every tensor as a segment. Tensors that lie in a
        FusedBuffer, or one behind the other in any memory, each a multiple of 64 bytes long (256 on
        CUDA), are reduced where they are.

        Args:
            tensors: What is reduced; tensors that share memory are a ValueError.
            op: As in all_reduce.
            packed: Whether a specification's limits are for the elements of all tensors of a dtype
                and device together, not for each tensor's own.
            async_op: See the class.
            **options: As in all_reduce, and `names`, those of the tensors, alike on all ranks, by
                which errors call them.
        """
        call = self._arguments.grouped_all_reduce(tensors, op, packed=packed, **options)
        return self._call(call, async_op=async_op)

    @overload
    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: Reducer = Sum,
        *,
        name: str | None = None,
        async_op: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: Reducer = Sum,
        *,
        name: str | None = None,
        async_op: Literal[True],
    ) -> Work[Tensor]: ...
    @overload
    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: Reducer = Sum,
        *,
        name: str | None = None,
        async_op: bool,
    ) -> Tensor | Work[Tensor]: ...

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: Reducer = Sum,
        *,
        name: str | None = None,
        async_op: bool = False,
    ) -> Tensor | Work[Tensor]:
        """Reduce a contiguous tensor onto rank `dst`, in place, and return it.

        Up to 1 MiB a tree of log n steps may be what takes the least time; of a larger tensor no
        rank allocates more than one n-th. On the other ranks the tensor holds partial results
        afterwards, as torch.distributed's does. Sum and Average only: Adasum's result needs all
        ranks (all_reduce).
        """
        return self._call(self._arguments.reduce(tensor, dst, op, name), async_op=async_op)

    @overload
    def reduce_scatter(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        by_rows: bool = False,
        out: Tensor | None = None,
        async_op: Literal[False] = False,
        **options: Unpack[ScaleOptions],
    ) -> Tensor: ...
    @overload
    def reduce_scatter(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        by_rows: bool = False,
        out: Tensor | None = None,
        async_op: Literal[True],
        **options: Unpack[ScaleOptions],
    ) -> Work[Tensor]: ...
    @overload
    def reduce_scatter(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        by_rows: bool = False,
        out: Tensor | None = None,
        async_op: bool,
        **options: Unpack[ScaleOptions],
    ) -> Tensor | Work[Tensor]: ...

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        by_rows: bool = False,
        out: Tensor | None = None,
        async_op: bool = False,
        **options: Unpack[ScaleOptions],
    ) -> Tensor | Work[Tensor]:
        """Reduce over all ranks and return this rank's piece; `tensor` is left as it is.

        The flattened tensor is split in `size` pieces that differ by at most one element, the
        larger ones first; rank r gets piece r, 1-D.

        Args:
            tensor: What is reduced.
            op: As in all_reduce.
            by_rows: Split the first dimension in that way; pieces have all others.
            out: Where the piece is written, and what is returned; a new tensor unless given. Of the
                piece's shape and the tensor's dtype and device, and apart from it in memory.
            async_op: See the class.
            **options: `name`, `prescale` and `postscale`, as in all_reduce.
        """
        call = self._arguments.reduce_scatter(tensor, op, by_rows, out, **options)
        return self._call(call, async_op=async_op)
