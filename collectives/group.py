"""A group of ranks and the collectives that users call on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Literal, overload

import torch
from typing_extensions import Unpack

from collectives import validation
from collectives.arguments import Arguments, ReductionOptions, ScaleOptions
from collectives.bootstrap.locality import find_locality, locality_on
from collectives.calls import Calls
from collectives.compiling import untraced
from collectives.execution.all_reduce import Runner
from collectives.execution.call import Call
from collectives.owners import owners
from collectives.reducers import Reducer, Sum
from collectives.requests import Request
from collectives.schedules import to_owners
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.work import Work

Tensor = torch.Tensor


@untraced
class Group:
    """Ranks that reduce together over one transport.

    Every method is a collective: all ranks of the group call the same ones in the same order. They
    negotiate each call, so a difference between ranks is a CollectiveMismatchError on all of them:
    tensors are as they were before the call, and the group stays usable; after any other error
    raised while a call runs it is not. Between ranks that share memory the negotiation needs no
    message. Asynchronous calls run in the order in which they were made. So many may be under way
    that no program should notice, 8,192: who makes another one then waits for the oldest, but for a
    callback, which waits for none.

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
        self._calls = Calls(self._runner)
        self._arguments = Arguments(self._runner)
        self._parts: list[Group] = []
        self._whole: Group | None = None

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}{self.transport.of_ranks})"

    @property
    def ranks(self) -> tuple[int, ...]:
        """What errors call the ranks: their numbers in the group that all were split from.

        Of a Group of some of a process group's ranks, their numbers in torch.distributed.
        """
        return tuple(self.transport.names) or tuple(range(self.size))

    @property
    def num_nodes(self) -> int:
        """Number of hosts that the group's ranks are on, the same on every rank."""
        return len(set(self.hosts))

    def check_algorithm(self, algorithm: str, op: Reducer = Sum) -> None:
        """Raise ValueError where a specification cannot carry `op` on these ranks; sends nothing.

        Args:
            algorithm: As in all_reduce.
            op: As in all_reduce.
        """
        validation.reducer("op", op)
        self._runner.check(parse_all_reduce_spec(algorithm), op, [])

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
        return self._calls.run(call, async_op=async_op)

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
        return self._calls.run(call, async_op=async_op)

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
        return self._calls.run(self._arguments.reduce(tensor, dst, op, name), async_op=async_op)

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
        return self._calls.run(call, async_op=async_op)

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
        return self._calls.run(call, async_op=async_op)

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
        return self._calls.run(call, async_op=async_op)

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
        return self._calls.run(call, async_op=async_op)

    @overload
    def all_gather(
        self,
        tensor: Tensor,
        *,
        name: str | None = None,
        out: Tensor | None = None,
        async_op: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def all_gather(
        self,
        tensor: Tensor,
        *,
        name: str | None = None,
        out: Tensor | None = None,
        async_op: Literal[True],
    ) -> Work[Tensor]: ...

    def all_gather(
        self,
        tensor: Tensor,
        *,
        name: str | None = None,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Tensor | Work[Tensor]:
        """Return all ranks' tensors joined along dimension 0 in rank order.

        First dimensions may differ between ranks, the others may not; 0-d tensors are a ValueError.

        Args:
            tensor: This rank's.
            name: See the class.
            out: Where the result is written, and what is returned; a new tensor unless given. It
                has the tensor's dtype, device and shape but for the first dimension, and is apart
                from it in memory; other rows than all ranks have are a CollectiveMismatchError.
            async_op: See the class.
        """
        return self._calls.run(self._arguments.all_gather(tensor, name, out), async_op=async_op)

    @overload
    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | Tensor | None = None,
        *,
        name: str | None = None,
        async_op: Literal[False] = False,
    ) -> tuple[Tensor, Tensor]: ...
    @overload
    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | Tensor | None = None,
        *,
        name: str | None = None,
        async_op: Literal[True],
    ) -> Work[tuple[Tensor, Tensor]]: ...

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | Tensor | None = None,
        *,
        name: str | None = None,
        async_op: bool = False,
    ) -> tuple[Tensor, Tensor] | Work[tuple[Tensor, Tensor]]:
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
        return self._calls.run(self._arguments.all_to_all(tensor, splits, name), async_op=async_op)

    @overload
    def broadcast(
        self,
        tensor: Tensor,
        root: int = 0,
        *,
        name: str | None = None,
        async_op: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def broadcast(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None, async_op: Literal[True]
    ) -> Work[Tensor]: ...

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None, async_op: bool = False
    ) -> Tensor | Work[Tensor]:
        """Copy `root`'s tensor to every rank, in place, and return it."""
        return self._calls.run(self._arguments.broadcast(tensor, root, name), async_op=async_op)

    def all_gather_bytes(self, payload: bytes, *, name: str | None = None) -> list[bytes]:
        """Return every rank's bytes, by rank; lengths may differ."""
        return self._calls.run(self._arguments.all_gather_bytes(payload, name))

    def barrier(self, name: str | None = None) -> None:
        """Return when every rank has called it: the negotiation alone does that."""
        self._calls.run(Call("barrier", name))

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
        return self._calls.join(operators, device)

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
        return Request(self._calls, call, negotiate=negotiate)

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
        return Request(self._calls, call, negotiate=negotiate)

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
        return Request(self._calls, call)

    def broadcast_init(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None
    ) -> Request[Tensor]:
        """Make, with all ranks, a `broadcast` that is started any number of times."""
        return Request(self._calls, self._arguments.broadcast(tensor, root, name))

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
        return Request(self._calls, call, negotiate=negotiate)

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
        return Request(self._calls, call)

    def split(self, ranks: Sequence[int]) -> Group | None:
        """Return a group of some of the ranks, whose rank i is `ranks[i]` here; None on the others.

        Every rank of this group calls it, with the same ranks in the same order, which is the order
        that Adasum and all_gather take. The new group has messages of its own: both may be used at
        the same time, from different threads (not with CUDA tensors over NCCL, which wants one
        order of all work on a device: calls of both with `async_op` reach it in the order in which
        they are made). It has this group's timeout and hosts, and ends with it, or with its
        own close().
        """
        members = validation.distinct_ranks("ranks", ranks, self.size)
        call = Call("split", options={"ranks": members}, instead=lambda: self._split(members))
        part: Group | None = self._calls.run(call)
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
        # As far as CUDA tensors go, for both.
        self.transport.shares_gpu = transport.shares_gpu = True
        self._parts.append(part)
        part._whole = self
        return part

    def abort(self, reason: str = "") -> None:
        """Make the group unusable at once, from any thread; a second time does nothing.

        What is under way or queued raises TransportError, as does every later call; on the peers
        their call, or their next one, is an error that names this rank and the reason. Groups split
        from this one are aborted, too. Over gloo, which tells the peers nothing, calls end by
        their timeout. close() is still to be called.

        Args:
            reason: What errors say, on this rank and on its peers.
        """
        validation.instance("reason", reason, str, "a str")
        said = f"{self.transport.me} called abort()" + (f": {reason}" if reason else "")
        for part in list(self._parts):
            part.abort(reason)
        self._calls.queue.abort(said)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._calls.queue.closed

    def close(self) -> None:
        """Let queued calls finish, then end the communication thread and close the transport.

        They have all the time that they need as long as they progress: `timeout` is for each step.
        Groups that were split from this one are closed first. Where one of all this fails the rest
        is closed all the same.

        Raises:
            TransportError: Asynchronous calls were lost; the text says how many, and why.
        """
        if self.closed:
            return
        with ExitStack() as stack:
            if self._whole is not None:
                stack.callback(self._whole._parts.remove, self)
                self._whole = None
            stack.callback(self.transport.close)
            stack.callback(self._runner.libraries.close)
            stack.callback(self._calls.queue.close)
            for part in reversed(self._parts):
                stack.callback(part.close)
