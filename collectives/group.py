"""A group of ranks and the collectives that users call on it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch

from collectives import validation
from collectives.bootstrap.locality import find_locality, locality_on
from collectives.consistency.calls import Calls
from collectives.consistency.description import Description, describe_tensor
from collectives.consistency.requests import Request
from collectives.cost import LinkRates
from collectives.execution.all_reduce import Runner, Specs
from collectives.execution.gathering import as_tensor
from collectives.owners import owners
from collectives.reducers import Reducer, Sum
from collectives.schedules.spec import format_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.work import Work

Tensor = torch.Tensor
_formatted = lru_cache(format_all_reduce_spec)


class Group:
    """Ranks that reduce together over one transport.

    Every method is a collective: all ranks of the group call the same ones in the same order. They
    agree on each call, so a difference between ranks is a CollectiveMismatchError on all of them:
    tensors are as they were before the call, and the group stays usable; after any other error
    raised while a call runs it is not. Ranks that share memory agree without a message. Any number
    of asynchronous calls may be under way; they run in the order in which they were made.

    timeout: seconds any one step may wait for a peer. local_rank, local_size: this rank's place on
    its host; found from the hosts' names unless given. hosts: a number for every rank's host.
    topology: the nodes that algorithms see;
    the hosts unless given, and one rank a node where hosts do not hold equal runs of ranks.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        timeout: float,
        local_rank: int | None = None,
        local_size: int | None = None,
        topology: Topology | None = None,
    ) -> None:
        validation.timeout(timeout)
        if topology is not None and not isinstance(topology, Topology):
            raise TypeError(f"topology must be a Topology, got {type(topology).__name__}")
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.timeout = timeout
        locality = find_locality(transport, timeout, local_rank, local_size, topology)
        self.local_rank = locality.local_rank
        self.local_size = locality.local_size
        self.topology = locality.topology
        self.hosts = locality.hosts
        self._runner = Runner(transport, locality.topology, timeout)
        self._call = Calls(self._runner)
        self._requests = 0
        self._parts: list[Group] = []
        self._whole: Group | None = None

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size})"

    @property
    def num_nodes(self) -> int:
        """Hosts that the group's ranks are on, taken as equally filled."""
        return math.ceil(self.size / self.local_size)

    def set_link_rates(self, rates: LinkRates | None) -> None:
        """Let `auto` choose by these measured costs, which must be the same on every rank.

        None: by size alone, the same algorithms in every run of the program.
        """
        self._runner.link_rates = rates

    def all_reduce(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        algorithm: str | None = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        segments: Sequence[int] | None = None,
        async_op: bool = False,
    ) -> Tensor | Work:
        """Reduce a contiguous tensor of any shape over all ranks, in place, and return it.

        op: Sum, Average, or another Reducer. algorithm: a specification string such as "xring#2",
        "rd:16k:rechd" or "rechd/vhdd" (`collectives.spec`); "auto" unless given. prescale,
        postscale: factors applied before and after. segments: element boundaries (0, ..., numel)
        for operators that work per segment. With async_op a Work is returned whose wait() returns
        the tensor.

        Raises TypeError or ValueError, before anything is sent, for arguments that are not valid.
        """
        call = self._describe_all_reduce(tensor, op, algorithm, name, prescale, postscale, segments)
        return self._call(call, [tensor], op, async_op=async_op)

    def all_reduce_init(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        algorithm: str | None = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        segments: Sequence[int] | None = None,
        negotiate: bool = True,
    ) -> Request:
        """Agree with all ranks on an all_reduce that is then started any number of times.

        Arguments and errors as all_reduce. With negotiate=False the request is made on this rank
        alone, and each start is negotiated as an all_reduce with the same arguments: other ranks
        may make that call instead, or take part by `join`.
        """
        call = self._describe_all_reduce(tensor, op, algorithm, name, prescale, postscale, segments)
        return self._request(call, [tensor], op, negotiate)

    def _describe_all_reduce(
        self,
        tensor: Tensor,
        op: Reducer,
        algorithm: str | None,
        name: str | None,
        prescale: float,
        postscale: float,
        segments: Sequence[int] | None,
    ) -> Description:
        """Check the arguments of an all-reduce and describe it."""
        validation.tensor("tensor", tensor)
        if segments is not None:
            segments = validation.segments(segments, tensor.numel())
        specs = self._reduction([tensor], op, algorithm, prescale, postscale)
        options = {**_options(op, specs, prescale, postscale), "segments": segments}
        return Description("all_reduce", name, options, [describe_tensor(tensor)])

    def _request(
        self, call: Description, tensors: list[Tensor], op: Reducer = Sum, negotiate: bool = True
    ) -> Request:
        """Agree with all ranks on a request's making; describe its starts."""
        if not negotiate:
            return Request(self._call, call, tensors, op)
        made = replace(call, kind=f"{call.kind}_init")
        self._call(made, tensors, op, run=lambda: None)
        # Alike on all ranks, which make their requests in one order.
        self._requests += 1
        return Request(self._call, replace(call, request=self._requests), tensors, op)

    def grouped_all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        algorithm: str | None = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        async_op: bool = False,
    ) -> list[Tensor] | Work:
        """Reduce many tensors at once, in place, and return them as a list.

        Those of one dtype and device travel packed in one buffer; operators that work per segment
        take every tensor as a segment. Arguments and errors as all_reduce; tensors that share
        memory are a ValueError.
        """
        tensors = validation.tensor_list("tensors", tensors)
        call = self._describe_grouped(tensors, op, algorithm, name, prescale, postscale)
        return self._call(call, tensors, op, async_op=async_op)

    def grouped_all_reduce_init(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        algorithm: str | None = None,
        name: str | None = None,
        prescale: float = 1.0,
        postscale: float = 1.0,
        negotiate: bool = True,
    ) -> Request:
        """Agree with all ranks on a grouped_all_reduce that is started any number of times.

        Arguments and errors as grouped_all_reduce; negotiate as for all_reduce_init.
        """
        tensors = validation.tensor_list("tensors", tensors)
        call = self._describe_grouped(tensors, op, algorithm, name, prescale, postscale)
        return self._request(call, tensors, op, negotiate)

    def _describe_grouped(
        self,
        tensors: Sequence[Tensor],
        op: Reducer,
        algorithm: str | None,
        name: str | None,
        prescale: float,
        postscale: float,
    ) -> Description:
        """Check the arguments of a grouped all-reduce and describe it."""
        specs = self._reduction(tensors, op, algorithm, prescale, postscale)
        options = _options(op, specs, prescale, postscale)
        return Description("grouped_all_reduce", name, options, list(map(describe_tensor, tensors)))

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: Reducer = Sum,
        *,
        name: str | None = None,
        async_op: bool = False,
    ) -> Tensor | Work:
        """Reduce a contiguous tensor onto rank `dst`, in place, and return it.

        No rank allocates more than one n-th of the tensor. On the other ranks the tensor holds
        partial results afterwards, as torch.distributed's does. Sum and Average only: Adasum's
        answer needs all ranks (all_reduce).
        """
        validation.tensor("tensor", tensor)
        validation.rank("dst", dst, self.size)
        self._owned([tensor], op)
        call = Description("reduce", name, {"op": str(op), "dst": dst}, [describe_tensor(tensor)])
        return self._call(call, [tensor], op, async_op=async_op)

    def owners(self, numels: Sequence[int]) -> list[int]:
        """The owner of each variable: the rank with the least so far, the lowest of equals."""
        return owners(numels, self.size)

    def reduce_to_owners(
        self, tensors: Sequence[Tensor], op: Reducer = Sum, *, name: str | None = None
    ) -> list[int]:
        """Reduce each tensor onto its owner alone, in place; return the owners.

        Owners are chosen by bytes, in list order. Arguments and other ranks' tensors as in reduce.
        """
        tensors = validation.tensor_list("tensors", tensors)
        self._owned(tensors, op)
        described = list(map(describe_tensor, tensors))
        call = Description("reduce_to_owners", name, {"op": str(op)}, described)
        chosen: list[int] = self._call(call, tensors, op)
        return chosen

    def broadcast_from_owners(
        self, tensors: Sequence[Tensor], *, name: str | None = None
    ) -> list[Tensor]:
        """Copy each tensor to every rank, in place, from the owner that reduce_to_owners chose."""
        tensors = validation.tensor_list("tensors", tensors)
        for tensor in tensors:
            self.transport.check_device(tensor.device)
        call = Description("broadcast_from_owners", name, {}, list(map(describe_tensor, tensors)))
        self._call(call, tensors)
        return tensors

    def _owned(self, tensors: Sequence[Tensor], op: Reducer) -> None:
        """Check the arguments of a reduction onto single ranks."""
        self._reduction(tensors, op, None, 1.0, 1.0)
        if op.needs_one_tree:
            raise ValueError(f"op {op} needs all ranks: use all_reduce")

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        by_rows: bool = False,
        name: str | None = None,
        async_op: bool = False,
    ) -> Tensor | Work:
        """Reduce over all ranks and return this rank's piece; `tensor` is left as it is.

        The flattened tensor is cut in `size` pieces that differ by at most one element, the larger
        ones first; rank r gets piece r, 1-D. by_rows: the first dimension is cut in the same way,
        and pieces have all others.
        """
        call = self._describe_reduce_scatter(tensor, op, by_rows, name)
        return self._call(call, [tensor], op, async_op=async_op)

    def reduce_scatter_init(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        by_rows: bool = False,
        name: str | None = None,
    ) -> Request:
        """Agree with all ranks on a reduce_scatter that is started any number of times.

        Arguments and errors as reduce_scatter. Each wait() returns a new tensor.
        """
        call = self._describe_reduce_scatter(tensor, op, by_rows, name)
        return self._request(call, [tensor], op)

    def _describe_reduce_scatter(
        self, tensor: Tensor, op: Reducer, by_rows: bool, name: str | None
    ) -> Description:
        """Check the arguments of a reduce-scatter and describe it."""
        validation.tensor("tensor", tensor, written=False)
        if not isinstance(by_rows, bool):
            raise TypeError(f"by_rows must be a bool, got {type(by_rows).__name__}")
        if by_rows:
            _check_rows(tensor)
        self._reduction([tensor], op, None, 1.0, 1.0)
        options = {"op": str(op), "by_rows": by_rows}
        return Description("reduce_scatter", name, options, [describe_tensor(tensor)])

    def all_gather(
        self, tensor: Tensor, *, name: str | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """All ranks' tensors joined along dimension 0 in rank order.

        First dimensions may differ between ranks, the others may not; 0-d tensors are a ValueError.
        """
        validation.tensor("tensor", tensor, written=False)
        _check_rows(tensor)
        self.transport.check_device(tensor.device)
        call = Description("all_gather", name, {}, [describe_tensor(tensor, any_rows=True)])
        return self._call(call, [tensor], async_op=async_op)

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | Tensor | None = None,
        *,
        name: str | None = None,
        async_op: bool = False,
    ) -> tuple[Tensor, Tensor] | Work:
        """Send rows of the tensor to every rank; return what came, in rank order, and how much.

        splits: how many rows go to each rank, the first ones to rank 0; equally many unless given.
        Rows beyond their sum are not sent. The second answer has the numbers of rows that came from
        each rank, int64. First dimensions may differ between ranks, the others may not.
        """
        validation.tensor("tensor", tensor, written=False)
        _check_rows(tensor)
        self.transport.check_device(tensor.device)
        counts = validation.row_splits("splits", splits, tensor.shape[0], self.size)
        described = [describe_tensor(tensor, any_rows=True), describe_tensor(counts)]
        call = Description("all_to_all", name, {}, described)
        return self._call(call, [tensor, counts], async_op=async_op)

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """Copy `root`'s tensor to every rank, in place, and return it."""
        call = self._describe_broadcast(tensor, root, name)
        return self._call(call, [tensor], async_op=async_op)

    def broadcast_init(self, tensor: Tensor, root: int = 0, *, name: str | None = None) -> Request:
        """Agree with all ranks on a broadcast that is started any number of times.

        Arguments and errors as broadcast.
        """
        return self._request(self._describe_broadcast(tensor, root, name), [tensor])

    def _describe_broadcast(self, tensor: Tensor, root: int, name: str | None) -> Description:
        """Check the arguments of a broadcast and describe it."""
        validation.tensor("tensor", tensor)
        validation.rank("root", root, self.size)
        self.transport.check_device(tensor.device)
        return Description("broadcast", name, {"root": root}, [describe_tensor(tensor)])

    def all_gather_bytes(self, payload: bytes, *, name: str | None = None) -> list[bytes]:
        """Every rank's bytes, by rank; lengths may differ."""
        if not isinstance(payload, bytes | bytearray | memoryview):
            raise TypeError(f"payload must be bytes, got {type(payload).__name__}")
        data = as_tensor(payload)
        call = Description("all_gather_bytes", name, {}, [describe_tensor(data, any_rows=True)])
        pieces: list[bytes] = self._call(call, [data])
        return pieces

    def barrier(self, name: str | None = None) -> None:
        """Return when every rank has called it: the negotiation alone does that."""
        self._call(Description("barrier", name), [])

    def join(self, operators: Iterable[Reducer] = (), *, device: torch.device | None = None) -> int:
        """Wait until every rank has joined, taking part in what the others still call.

        For ranks that run out of data early: they add zeros to reductions (an Average is still
        divided by all ranks), no rows to gathers, and get nothing. Returns the rank that joined
        last, the highest of those that did at once. Between the others' calls no more than the
        group's timeout may pass.

        operators: what the others may reduce with, beside Sum and Average; zero must be their
        identity. device: where zeros for CUDA tensors are made, the current one unless given. A
        broadcast from a rank that has joined, and whatever else needs one, is a
        CollectiveMismatchError on all ranks, as is any difference between the calls of the others;
        a rank that had joined has not after that.
        """
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        known = list(operators)
        for op in known:
            validation.reducer("operators", op)
        return self._call.join(known, device)

    def split(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of the ranks, whose rank i is `ranks[i]` here; None on the others.

        Every rank of this group calls it, with the same ranks in the same order, which is the order
        that Adasum and all_gather take. The new group has messages of its own: both may be used at
        the same time, from different threads (not with CUDA tensors over NCCL, which wants one
        order of all work on a device). It has this group's timeout, hosts and links, and ends with
        it, or with its own close().

        TypeError or ValueError for ranks that are not distinct ranks of this group.
        """
        members = validation.distinct_ranks("ranks", ranks, self.size)

        def run() -> Group | None:
            if self.rank not in members:
                return None
            hosts = [self.hosts[rank] for rank in members]
            transport = self.transport.split(members, self.timeout)
            locality = locality_on(hosts, transport.rank)
            part = Group(
                transport,
                timeout=self.timeout,
                local_rank=locality.local_rank,
                local_size=locality.local_size,
                topology=locality.topology,
            )
            part.hosts = locality.hosts
            part.set_link_rates(self._runner.link_rates)
            self._parts.append(part)
            part._whole = self
            return part

        call = Description("split", options={"ranks": members})
        part: Group | None = self._call(call, [], run=run)
        return part

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._call.queue.closed

    def close(self) -> None:
        """Let queued calls finish, then end the communication thread and close the transport.

        Groups that were split from this one are closed first.
        """
        if not self.closed:
            for part in list(self._parts):
                part.close()
            self._call.queue.close()
            self._runner.libraries.close()
            self.transport.close()
            whole, self._whole = self._whole, None
            if whole is not None:
                whole._parts.remove(self)

    def _reduction(
        self,
        tensors: Sequence[Tensor],
        op: Reducer,
        algorithm: str | None,
        prescale: float,
        postscale: float,
    ) -> Specs:
        """Check the arguments that all reductions share; return the algorithm's ranges."""
        validation.reducer("op", op)
        specs = validation.algorithm("algorithm", algorithm)
        validation.scale("prescale", prescale)
        validation.scale("postscale", postscale)
        for tensor in tensors:
            op.check(tensor.dtype)
            self.transport.check_device(tensor.device)
            if (prescale != 1.0 or postscale != 1.0) and not (
                tensor.dtype.is_floating_point or tensor.dtype.is_complex
            ):
                raise TypeError(f"prescale and postscale need a floating dtype, got {tensor.dtype}")
        self._runner.check(specs, op, tensors)
        return specs


def _options(op: Reducer, specs: Specs, prescale: float, postscale: float) -> dict[str, Any]:
    return {
        "op": str(op),
        "algorithm": _formatted(specs),
        "prescale": float(prescale),
        "postscale": float(postscale),
    }


def _check_rows(tensor: Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError("tensor must have a first dimension: use reshape(1)")
