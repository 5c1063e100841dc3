"""A group of ranks and the collectives that users call on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

import torch
from typing_extensions import Unpack

from collectives import validation
from collectives.bootstrap.locality import find_locality, locality_on
from collectives.consistency.arguments import Arguments, ReductionOptions
from collectives.consistency.calls import Calls
from collectives.consistency.description import Call, Description
from collectives.consistency.requests import Request
from collectives.cost import LinkRates
from collectives.execution.all_reduce import Runner
from collectives.owners import owners
from collectives.reducers import Reducer, Sum
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.work import Work

Tensor = torch.Tensor


class Group:
    """Ranks that reduce together over one transport.

    Every method is a collective: all ranks of the group call the same ones in the same order. They
    negotiate each call, so a difference between ranks is a CollectiveMismatchError on all of them:
    tensors are as they were before the call, and the group stays usable; after any other error
    raised while a call runs it is not. Between ranks that share memory the negotiation needs no
    message. Any number of asynchronous calls may be under way; they run in the order in which they
    were made.

    Every method checks its arguments before anything is sent: TypeError or ValueError, naming the
    argument and the fix. With `async_op` a method returns a Work, whose wait() returns what the
    method returns without it. `name` tells calls apart in errors, and from other threads.

    Args:
        transport: Between the ranks.
        timeout: Seconds any one step may wait for a peer.
        local_rank: This rank's number on its host; found from the hosts' names unless given.
        local_size: How many ranks are on this host; found unless given.
        topology: The nodes that algorithms see; the hosts unless given, and one rank a node where
            hosts do not hold equal runs of ranks.

    Attributes:
        transport: As given; so is `timeout`.
        rank: This rank's number.
        size: How many ranks there are.
        local_rank: This rank's number on its host.
        local_size: How many ranks are on this host.
        topology: The nodes that algorithms see.
        hosts: A number for every rank's host, the same on all ranks.
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
        if topology is not None:
            validation.instance("topology", topology, Topology, "a Topology")
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
        self._arguments = Arguments(self._runner)
        self._parts: list[Group] = []
        self._whole: Group | None = None

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size})"

    @property
    def num_nodes(self) -> int:
        """Number of hosts that the group's ranks are on, the same on every rank."""
        return len(set(self.hosts))

    def set_link_rates(self, rates: LinkRates | None, device: str | None = None) -> None:
        """Let `auto` choose by these costs, which must be the same on every rank.

        Without it tensors on GPUs have assumed rates (`collectives.cost.ASSUMED`), and those on the
        host what `init` has measured, if anything.

        Args:
            rates: None for a choice by size alone, the same in every run of the program.
            device: For tensors on "cpu" or "cuda" only; for both unless given.
        """
        validation.instance("rates", rates, LinkRates | None, "LinkRates or None")
        if device not in (None, "cpu", "cuda"):
            raise ValueError(f"device must be 'cpu', 'cuda' or None, got {device!r}")
        if device != "cuda":
            self._runner.link_rates = rates
        if device != "cpu":
            self._runner.gpu_link_rates = rates

    def check_algorithm(self, algorithm: str, op: Reducer = Sum) -> None:
        """Raise ValueError where a specification cannot carry `op` on these ranks; sends nothing.

        Args:
            algorithm: As in all_reduce.
            op: As in all_reduce.
        """
        validation.reducer("op", op)
        self._runner.check(parse_all_reduce_spec(algorithm), op, [])

    def all_reduce(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Unpack[ReductionOptions],
    ) -> Tensor | Work:
        """Reduce a contiguous tensor of any shape over all ranks, in place, and return it.

        Args:
            tensor: What is reduced.
            op: Sum, Average, or another Reducer.
            segments: Element boundaries (0, ..., numel) for operators that work per segment.
            async_op: See the class.
            **options: `algorithm`, a specification such as "xring#2", "rd:16k:rechd" or
                "rechd/vhdd" (`collectives.schedules.spec`), "auto" unless given; `name`, see the
                class; `prescale`, a factor applied before the reduction; `postscale`, one applied
                after it.
        """
        call = self._arguments.all_reduce(tensor, op, segments, **options)
        return self._call(call, async_op=async_op)

    def all_reduce_init(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        negotiate: bool = True,
        **options: Unpack[ReductionOptions],
    ) -> Request:
        """Make, with all ranks, an `all_reduce` that is then started any number of times.

        Arguments as all_reduce. Making it is negotiated, and so is each start; making it while a
        rank has joined is a mismatch. With negotiate=False the request is made on this rank alone,
        and each start is negotiated as an all_reduce with the same arguments: other ranks may make
        that call instead, or take part by `join`.
        """
        call = self._arguments.all_reduce(tensor, op, segments, **options)
        return Request(self._call, call, negotiate=negotiate)

    def grouped_all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        async_op: bool = False,
        **options: Unpack[ReductionOptions],
    ) -> list[Tensor] | Work:
        """Reduce many tensors at once, in place, and return them as a list.

        Those of one dtype and device travel packed in one buffer; operators that work per segment
        take every tensor as a segment. Arguments as all_reduce, and `names`, those of the tensors,
        alike on all ranks, by which errors call them; tensors that share memory are a ValueError.
        """
        call = self._arguments.grouped_all_reduce(tensors, op, **options)
        return self._call(call, async_op=async_op)

    def grouped_all_reduce_init(
        self,
        tensors: Sequence[Tensor],
        op: Reducer = Sum,
        *,
        negotiate: bool = True,
        **options: Unpack[ReductionOptions],
    ) -> Request:
        """Make, with all ranks, a `grouped_all_reduce` that is started any number of times.

        Arguments as grouped_all_reduce; negotiate as for all_reduce_init.
        """
        call = self._arguments.grouped_all_reduce(tensors, op, **options)
        return Request(self._call, call, negotiate=negotiate)

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
        result needs all ranks (all_reduce).
        """
        return self._call(self._arguments.reduce(tensor, dst, op, name), async_op=async_op)

    def owners(self, numels: Sequence[int]) -> list[int]:
        """Return each tensor's owner: the rank with the fewest elements so far, the first such."""
        return owners(numels, self.size)

    def reduce_to_owners(
        self, tensors: Sequence[Tensor], op: Reducer = Sum, *, name: str | None = None
    ) -> list[int]:
        """Reduce each tensor onto its owner alone, in place; return the owners.

        Owners are chosen by bytes, in list order. Arguments and other ranks' tensors as in reduce.
        """
        return self._call(self._arguments.reduce_to_owners(tensors, op, name))

    def broadcast_from_owners(
        self, tensors: Sequence[Tensor], *, name: str | None = None
    ) -> list[Tensor]:
        """Copy each tensor to every rank, in place, from the owner that reduce_to_owners chose."""
        return self._call(self._arguments.broadcast_from_owners(tensors, name))

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

        The flattened tensor is split in `size` pieces that differ by at most one element, the
        larger ones first; rank r gets piece r, 1-D.

        Args:
            tensor: What is reduced.
            op: As in all_reduce.
            by_rows: Split the first dimension in that way; pieces have all others.
            name: See the class.
            async_op: See the class.
        """
        call = self._arguments.reduce_scatter(tensor, op, by_rows, name)
        return self._call(call, async_op=async_op)

    def reduce_scatter_init(
        self, tensor: Tensor, op: Reducer = Sum, *, by_rows: bool = False, name: str | None = None
    ) -> Request:
        """Make, with all ranks, a `reduce_scatter` that is started any number of times.

        Each wait() returns a new tensor.
        """
        return Request(self._call, self._arguments.reduce_scatter(tensor, op, by_rows, name))

    def all_gather(
        self, tensor: Tensor, *, name: str | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """Return all ranks' tensors joined along dimension 0 in rank order.

        First dimensions may differ between ranks, the others may not; 0-d tensors are a ValueError.
        """
        return self._call(self._arguments.all_gather(tensor, name), async_op=async_op)

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | Tensor | None = None,
        *,
        name: str | None = None,
        async_op: bool = False,
    ) -> tuple[Tensor, Tensor] | Work:
        """Send rows of the tensor to every rank; return those received, in rank order, and counts.

        The counts are int64, of the rows received from each rank. First dimensions may differ
        between ranks, the others may not.

        Args:
            tensor: The rows. Those beyond the sum of `splits` are not sent.
            splits: How many rows go to each rank, the first ones to rank 0; equally many unless
                given.
            name: See the class.
            async_op: See the class.
        """
        return self._call(self._arguments.all_to_all(tensor, splits, name), async_op=async_op)

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """Copy `root`'s tensor to every rank, in place, and return it."""
        return self._call(self._arguments.broadcast(tensor, root, name), async_op=async_op)

    def broadcast_init(self, tensor: Tensor, root: int = 0, *, name: str | None = None) -> Request:
        """Make, with all ranks, a `broadcast` that is started any number of times."""
        return Request(self._call, self._arguments.broadcast(tensor, root, name))

    def all_gather_bytes(self, payload: bytes, *, name: str | None = None) -> list[bytes]:
        """Return every rank's bytes, by rank; lengths may differ."""
        return self._call(self._arguments.all_gather_bytes(payload, name))

    def barrier(self, name: str | None = None) -> None:
        """Return when every rank has called it: the negotiation alone does that."""
        self._call(Call(Description("barrier", name)))

    def join(self, operators: Iterable[Reducer] = (), *, device: torch.device | None = None) -> int:
        """Wait until every rank has joined, taking part in what the others still call.

        For ranks that run out of data early: they add zeros to reductions (an Average is still
        divided by all ranks), no rows to gathers, and get nothing. Between the others' calls no
        more than the group's timeout may pass.

        A broadcast from a rank that has joined, and whatever else needs one, is a
        CollectiveMismatchError on all ranks, as is any difference between the calls of the others;
        a rank that had joined has not after that.

        Args:
            operators: What the others may reduce with, beside Sum and Average; zero must be their
                identity.
            device: Where zeros for CUDA tensors are made, the current one unless given.

        Returns:
            The rank that joined last, the highest of those that did at once.
        """
        return self._call.join(operators, device)

    def split(self, ranks: Sequence[int]) -> Group | None:
        """Return a group of some of the ranks, whose rank i is `ranks[i]` here; None on the others.

        Every rank of this group calls it, with the same ranks in the same order, which is the order
        that Adasum and all_gather take. The new group has messages of its own: both may be used at
        the same time, from different threads (not with CUDA tensors over NCCL, which wants one
        order of all work on a device). It has this group's timeout, hosts and link rates, and ends
        with it, or with its own close().
        """
        members = validation.distinct_ranks("ranks", ranks, self.size)
        call = Call(Description("split", options={"ranks": members}))
        part: Group | None = self._call(call, run=lambda: self._split(members))
        return part

    def _split(self, members: Sequence[int]) -> Group | None:
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
        part.set_link_rates(self._runner.link_rates, "cpu")
        part.set_link_rates(self._runner.gpu_link_rates, "cuda")
        self._parts.append(part)
        part._whole = self
        return part

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._call.queue.closed

    def close(self) -> None:
        """Let queued calls finish, then end the communication thread and close the transport.

        Groups that were split from this one are closed first. Where one of all this fails the rest
        is closed all the same.
        """
        if self.closed:
            return
        with ExitStack() as stack:
            if self._whole is not None:
                stack.callback(self._whole._parts.remove, self)
                self._whole = None
            stack.callback(self.transport.close)
            stack.callback(self._runner.libraries.close)
            stack.callback(self._call.queue.close)
            for part in reversed(self._parts):
                stack.callback(part.close)
