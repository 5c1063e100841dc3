"""A group of ranks and the collectives that users call on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Literal, overload

import torch

from collectives import validation
from collectives.bootstrap.locality import find_locality, locality_on
from collectives.compiling import untraced
from collectives.consistency.arguments import Arguments
from collectives.consistency.calls import Calls
from collectives.consistency.description import Call, Description
from collectives.consistency.owner_collectives import OwnerCollectives
from collectives.consistency.persistent import PersistentCollectives
from collectives.consistency.reductions import Reductions
from collectives.consistency.schedule_runs import ScheduleRuns
from collectives.execution.all_reduce import Runner
from collectives.reducers import Reducer, Sum
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.work import Work

Tensor = torch.Tensor


@untraced
class Group(Reductions, ScheduleRuns, PersistentCollectives, OwnerCollectives):
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
        self._call = Calls(self._runner)
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
    @overload
    def all_gather(
        self, tensor: Tensor, *, name: str | None = None, out: Tensor | None = None, async_op: bool
    ) -> Tensor | Work[Tensor]: ...

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
        return self._call(self._arguments.all_gather(tensor, name, out), async_op=async_op)

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
    @overload
    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | Tensor | None = None,
        *,
        name: str | None = None,
        async_op: bool,
    ) -> tuple[Tensor, Tensor] | Work[tuple[Tensor, Tensor]]: ...

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
        return self._call(self._arguments.all_to_all(tensor, splits, name), async_op=async_op)

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
    @overload
    def broadcast(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None, async_op: bool
    ) -> Tensor | Work[Tensor]: ...

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None, async_op: bool = False
    ) -> Tensor | Work[Tensor]:
        """Copy `root`'s tensor to every rank, in place, and return it."""
        return self._call(self._arguments.broadcast(tensor, root, name), async_op=async_op)

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
        order of all work on a device: calls of both with `async_op` reach it in the order in which
        they are made). It has this group's timeout and hosts, and ends with it, or with its
        own close().
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
        self._call.queue.abort(said)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._call.queue.closed

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
            stack.callback(self._call.queue.close)
            for part in reversed(self._parts):
                stack.callback(part.close)
