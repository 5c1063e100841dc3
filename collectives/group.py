"""A group of ranks and the collectives that users call on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
from typing_extensions import Unpack

from collectives import validation
from collectives.arguments import Arguments, ReductionOptions, ScaleOptions
from collectives.bootstrap.locality import find_locality, locality_on
from collectives.call import Call
from collectives.calls import Calls
from collectives.execution.all_reduce import Runner
from collectives.execution.operations import owners, symmetric_empty
from collectives.modes import untraced_methods
from collectives.recorder import GroupRecord
from collectives.reducers import NODE_RANKS, AnyReducer, Reducer, Sum
from collectives.requests import Request
from collectives.schedules.schedule import Schedule
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.topology import Topology
from collectives.transport.base import Transport
from collectives.tree_order import in_order

Tensor = torch.Tensor


@untraced_methods
class Group:
    """Ranks that reduce together over one transport.

    Every method is a collective: all ranks of the group call the same methods in the same order.
    They negotiate each call, without messages if ranks share memory. If ranks make different calls,
    all of them raise a CollectiveMismatchError: tensors are unchanged, and the group stays usable.
    After any other error in calls the group is unusable. Asynchronous calls run in the order
    of their starts. Up to 8,192 may be under way: one more waits for the oldest, except in a
    callback.

    Every method checks its arguments before anything is sent, and raises TypeError or ValueError
    with the argument and the fix. With `async_op` a method returns a Work; its wait() returns the
    method's result. `name` names the call in errors, and distinguishes calls of several threads.

    No gradient flows through these methods. While grad mode is on, they raise ValueError for
    results of operations that autograd has recorded (not for leaves and their views), and for
    tensors with a tangent. Gradients flow through adasum's functions, such as `adasum.allreduce`.

    Args:
        transport: The transport between the ranks.
        timeout: Seconds that each step may wait for a peer.
        local_rank: This rank's number on its host; by default found from the hosts' names.
        local_size: The number of ranks on this host; by default found like `local_rank`.
        topology: The nodes that algorithms see; by default the hosts, or one rank per node if the
            hosts are not equal runs of consecutive ranks.

    Attributes:
        rank: This rank's number, from 0 to `size` - 1; `local_rank` and `local_size` count the
            ranks of its host.
        hosts: By rank, a number for its host; the same on all ranks.

    Examples:
        >>> def mean(group):
        ...     mine = torch.tensor([group.rank + 1.0])
        ...     return group.all_reduce(mine, collectives.Average)
        >>> collectives.run_threads(2, mean)
        [tensor([1.5000]), tensor([1.5000])]
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
        self._record = GroupRecord(self.ranks, self.rank)
        self._calls = Calls(self._runner, self._record)
        self._arguments = Arguments(self._runner)
        self._parts: list[Group] = []
        self._whole: Group | None = None

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size}{self.transport.of_ranks})"

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks' names in errors: their numbers in the group that this one was split from.

        In a Group made from a torch.distributed process group, their numbers there.
        """
        return tuple(self.transport.names) or tuple(range(self.size))

    @property
    def num_nodes(self) -> int:
        """The number of hosts of the group's ranks; the same on all ranks."""
        return len(set(self.hosts))

    def check_algorithm(
        self, algorithm: str, op: AnyReducer = Sum, *, order: Literal["tree"] | None = None
    ) -> None:
        """Raise ValueError if a specification cannot carry `op` on these ranks; sends nothing.

        The arguments are described in all_reduce.
        """
        op = in_order(validation.reducer("op", op), order)
        self._runner.check(parse_all_reduce_spec(algorithm), op, [])

    def reduces_by_tree(
        self, tensors: Tensor | Sequence[Tensor], op: AnyReducer, **options: Any
    ) -> bool:
        """Return whether an all-reduce gives `op` all ranks' operands at once, for all tensors.

        Adasum then has a Gram matrix of every segment. The arguments are the same as for all_reduce
        or, with a list of tensors, grouped_all_reduce. Sends nothing; the result is the same on all
        ranks, and for later calls if the tensors keep their memory.
        """
        kind = "all_reduce" if isinstance(tensors, Tensor) else "grouped_all_reduce"
        return self._calls.reduces_by_tree(getattr(self._arguments, kind)(tensors, op, **options))

    def all_reduce(
        self,
        tensor: Tensor,
        op: AnyReducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Unpack[ReductionOptions],
    ) -> Any:
        """Reduce a contiguous tensor of any shape over all ranks, in place, and return it.

        Args:
            tensor: The tensor to reduce.
            op: Sum, Average, or another Reducer; also SUM, AVG, MIN, MAX and PRODUCT of
                torch.distributed.ReduceOp.
            segments: Element boundaries (0, ..., numel) for operators that work per segment.
            async_op: See the class.
            **options: `algorithm`, a specification such as "xring#2", "rd:16k:rechd" or
                "rechd/vhdd" (`collectives.schedules.spec`), by default "auto"; `name`, see the
                class; `prescale` and `postscale`, factors applied before and after the reduction:
                integers are multiplied by them in float64 and truncated.
                `order="tree"`, for Sum and Average: every element is summed by the balanced tree
                over the ranks, ((0 + 1) + (2 + 3)) + ..., for any algorithm, size, offset, packing
                and transport; each addition rounds to the tensor's dtype or, with
                `accumulate=torch.float32`, is made in float32, rounded once at the end. Average
                divides once, after the sum. Algorithms that add in another order raise ValueError;
                "auto" chooses among the others.

        Examples:
            >>> collectives.run_threads(2, lambda group: group.all_reduce(torch.ones(2)))
            [tensor([2., 2.]), tensor([2., 2.])]
        """
        call = self._arguments.all_reduce(tensor, op, segments, **options)
        return self._calls.run(call, async_op)

    def grouped_all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: AnyReducer = Sum,
        *,
        packed: bool = False,
        async_op: bool = False,
        **options: Unpack[ReductionOptions],
    ) -> Any:
        """Reduce many tensors at once, in place, and return them as a list.

        Tensors of one dtype and device, in one range of the specification, are packed into one
        buffer. Operators that work per segment get one segment per tensor. Tensors in a FusedBuffer
        are reduced there, without packing, and also adjacent tensors in one allocation if the
        length of each is a multiple of 64 bytes (256 on CUDA).

        Raises ValueError if tensors share memory. The limits of a specification apply to each
        tensor's elements or, with `packed`, to the elements of all tensors of one dtype and device
        together. `names` are names of the tensors for errors, the same on all ranks. The other
        arguments are described in all_reduce.
        """
        call = self._arguments.grouped_all_reduce(tensors, op, packed=packed, **options)
        return self._calls.run(call, async_op)

    def reduce(
        self,
        tensor: Tensor,
        dst: int = 0,
        op: AnyReducer = Sum,
        *,
        order: Literal["tree"] | None = None,
        accumulate: torch.dtype | None = None,
        name: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce a contiguous tensor to rank `dst`, in place, and return it.

        Up to 1 MiB a tree of log2 n steps may be used; for larger tensors no rank allocates more
        than an n-th of the size. On the other ranks the tensor holds partial results afterwards, as
        in torch.distributed. Only for associative operators, such as Sum and Average: Adasum's
        result needs all ranks (all_reduce). all_reduce describes `order` and `accumulate`.
        """
        options: ScaleOptions = {"name": name, "order": order, "accumulate": accumulate}
        return self._calls.run(self._arguments.reduce(tensor, dst, op, **options), async_op)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: AnyReducer = Sum,
        *,
        by_rows: bool = False,
        out: Tensor | None = None,
        async_op: bool = False,
        **options: Unpack[ScaleOptions],
    ) -> Any:
        """Reduce over all ranks and return this rank's slice; `tensor` is not changed.

        The flattened tensor is split into `size` slices whose lengths differ by at most one, the
        longer ones first; rank r gets slice r, 1-D.

        With `by_rows` only the first dimension is split in this way. The slice is written to `out`,
        if given, which must have the slice's shape and the tensor's dtype and device, and share no
        memory with the tensor. The other arguments are described in all_reduce.

        With order="tree" and a float16 or bfloat16 tensor, `out` may be float32, on all ranks: the
        narrow dtype is sent, sums are made in float32 (accumulate=torch.float32 is implied), and
        the slice is not rounded.
        """
        call = self._arguments.reduce_scatter(tensor, op, by_rows, out, **options)
        return self._calls.run(call, async_op)

    def run(
        self,
        schedule: Schedule,
        tensor: Tensor,
        op: AnyReducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Unpack[ScaleOptions],
    ) -> Any:
        """Reduce a contiguous tensor over all ranks, in place, by your own all-reduce schedule.

        The schedule is verified before anything is sent. Results for the latest schedules are
        cached: keep the Schedule object, since a new one with another function is verified again.
        If the ranks' steps differ, all raise a CollectiveMismatchError. Ranks that have joined
        cannot take part.

        The schedule must be an all-reduce with the group's number of ranks. For an operator that
        needs one expression tree, such as Adasum, `verify` must find that it `carries_adasum`. The
        other arguments are described in all_reduce.
        """
        call = self._arguments.run(schedule, tensor, op, segments, **options)
        return self._calls.run(call, async_op)

    def owners(self, numels: Sequence[int]) -> list[int]:
        """Return each tensor's owner: the lowest of the ranks with the fewest elements so far."""
        return owners(numels, self.size)

    def reduce_to_owners(
        self,
        tensors: Sequence[Tensor],
        op: AnyReducer = Sum,
        *,
        owners: Sequence[int] | None = None,
        async_op: bool = False,
        **options: Unpack[ScaleOptions],
    ) -> Any:
        """Reduce each tensor to its owner only, in place; return the owners.

        On other ranks the tensors have arbitrary values afterwards. `op` must be an operator for
        reduce, with the bits of an all-reduce by rd or rechd, or one that reads trees, such as
        Adasum, which is all-reduced by auto. `owners` is the owner's rank for each tensor: tensors
        of one dtype and device are then packed into one buffer, unless they are in a FusedBuffer,
        sorted by owner. Without `owners`, they are chosen by bytes, in list order, and tensors are
        reduced one after another, with extra memory for one tensor. The other arguments are
        described in all_reduce.
        """
        call = self._arguments.reduce_to_owners(tensors, op, owners, **options)
        return self._calls.run(call, async_op)

    def broadcast_from_owners(
        self,
        tensors: Sequence[Tensor],
        *,
        owners: Sequence[int] | None = None,
        name: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Copy each tensor from its owner to every rank, in place, and return them as a list.

        By default, owners are chosen as in reduce_to_owners.
        """
        call = self._arguments.broadcast_from_owners(tensors, owners, name)
        return self._calls.run(call, async_op)

    def all_gather(
        self,
        tensor: Tensor,
        *more: Tensor,
        name: str | None = None,
        out: Tensor | None = None,
        async_op: bool = False,
    ) -> Any:
        """Return all ranks' tensors joined along dimension 0 in rank order.

        Only the first dimension may differ between ranks; 0-d tensors raise ValueError.

        The result is written to `out`, if given; the tensor may be a part of it. Raises
        CollectiveMismatchError unless `out` has the number of rows of all ranks' tensors together.
        """
        if more:
            raise TypeError(
                "all_gather takes one tensor: pass the tensor for all ranks' rows as out="
            )
        return self._calls.run(self._arguments.all_gather(tensor, name, out), async_op)

    def all_to_all(
        self,
        tensor: Tensor,
        splits: Sequence[int] | Tensor | None = None,
        *,
        name: str | None = None,
        async_op: bool = False,
    ) -> Any:
        """Send rows of the tensor to every rank; return received rows, in rank order, and counts.

        The counts, int64 [size], are the numbers of rows from each rank. Only the first dimension
        of the tensors may differ between ranks.

        `splits` are the numbers of rows for each rank, the first ones for rank 0; by default they
        are equal. Rows beyond their sum are not sent.

        Examples:
            >>> def exchange(group):
            ...     return group.all_to_all(torch.tensor([10, 20]) + group.rank)
            >>> collectives.run_threads(2, exchange)
            [(tensor([10, 11]), tensor([1, 1])), (tensor([20, 21]), tensor([1, 1]))]
        """
        return self._calls.run(self._arguments.all_to_all(tensor, splits, name), async_op)

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None, async_op: bool = False
    ) -> Any:
        """Copy `root`'s tensor to every rank, in place, and return it."""
        return self._calls.run(self._arguments.broadcast(tensor, root, name), async_op)

    def all_gather_bytes(self, payload: bytes, *, name: str | None = None) -> list[bytes]:
        """Return the bytes of all ranks, in rank order; lengths may differ."""
        return self._calls.run(self._arguments.all_gather_bytes(payload, name))

    def symmetric_empty(self, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return uninitialised memory of this rank's GPU that its node's GPUs reach, 1-D.

        On a node's GPUs, an all-reduce by `auto` with Sum, Average or Adasum is one launch per
        rank. It does not copy tensors in this memory, nor the tensors of a FusedBuffer in it: each
        GPU reads its slice straight from all others and writes the result to them. On one node,
        sums have the same bits as `kernels.sum_n` of all ranks' vectors. All ranks must pass
        tensors at the same place of the same allocation, also to a request's `start`; otherwise
        calls are a mismatch.

        For ranks with one GPU each, equal numbers per node, connected there by NVLink, with NCCL.
        Raises ValueError elsewhere, and TransportError if torch has no such memory. It lives until
        the group is closed, and starts at a multiple of 256 bytes. All ranks must pass the same
        `numel` and `dtype`: float16, bfloat16, float32 or float64.
        """
        # Read here: the communication thread may have another current GPU.
        device = self.transport.device
        if device is None and torch.cuda.is_available():
            device = torch.device("cuda", torch.cuda.current_device())
        call = self._arguments.symmetric_empty(numel, dtype, self.topology.local_size, device)
        call.instead = lambda: symmetric_empty(self._runner, call, device)
        memory: Tensor = self._calls.run(call)
        return memory

    def buffer(self, nbytes: int, device: torch.device) -> Tensor | None:
        """Return memory of this rank's GPU that its node's GPUs reach, uninitialised, uint8.

        Tensors in it are reduced without a copy, as in `symmetric_empty`. None on all ranks if the
        GPUs share no memory, `device` is not a GPU, or ADASUM_NODE_MEMORY is 0. `nbytes` must be a
        multiple of 8 and the same on all ranks.
        """
        runner = self._runner
        local_size = self.topology.local_size
        shares = 1 < local_size <= NODE_RANKS and self.transport.shares_gpu_memory(device)
        if not (shares and runner.staging_bytes):
            return None
        call = self._arguments.symmetric_empty(nbytes // 8, torch.float64, local_size, device)
        call.instead = lambda: runner.try_node_memory(nbytes, device)
        number: int | None = self._calls.run(call)
        return None if number is None else self.transport.node_memories[number].tensor

    def barrier(self, name: str | None = None) -> None:
        """Wait until every rank has called it; only the negotiation is needed."""
        self._calls.run(Call("barrier", name))

    def join(self, operators: Iterable[Reducer] = (), *, device: torch.device | None = None) -> int:
        """Take part in the other ranks' calls until every rank has joined.

        For ranks that run out of data early. They add zeros to reductions (an Average still divides
        by the number of all ranks) and no rows to gathers, and get no results. The time between two
        calls of the others must not exceed the group's timeout.

        If calls need a joined rank, such as broadcasts from it, or if the others' calls differ, all
        ranks raise a CollectiveMismatchError. After that no rank is joined any more.

        `operators` are operators that the others may use in addition to Sum and Average; zero must
        be their identity. `device` is the GPU for zeros that stand for CUDA tensors, by default the
        current one.

        Returns:
            The rank that joined last; the highest one if several did so at once.
        """
        return self._calls.join(operators, device)

    def all_reduce_init(
        self,
        tensor: Tensor,
        op: AnyReducer = Sum,
        *,
        segments: Sequence[int] | None = None,
        negotiate: bool = True,
        **options: Unpack[ReductionOptions],
    ) -> Request[Tensor]:
        """Make an `all_reduce` that can be started any number of times.

        all_reduce describes the arguments. All ranks make the request together: they negotiate this
        call and each start. If a rank has joined (`join`), this call is a mismatch. With
        negotiate=False, it is not a collective, and each start is negotiated as an
        all_reduce with the same arguments: other ranks may call that instead, or take part by
        `join`.

        Examples:
            >>> def once(group):
            ...     request = group.all_reduce_init(torch.ones(2), collectives.Average)
            ...     request.start()
            ...     return request.wait()
            >>> collectives.run_threads(2, once)
            [tensor([1., 1.]), tensor([1., 1.])]
        """
        return self._request("all_reduce", tensor, op, segments, negotiate=negotiate, **options)

    def grouped_all_reduce_init(
        self, tensors: Sequence[Tensor], op: AnyReducer = Sum, **options: Any
    ) -> Request[list[Tensor]]:
        """Make a `grouped_all_reduce` that can be started repeatedly; `negotiate` as above."""
        return self._request("grouped_all_reduce", tensors, op, **options)

    def reduce_scatter_init(
        self, tensor: Tensor, op: AnyReducer = Sum, **options: Any
    ) -> Request[Tensor]:
        """Make a `reduce_scatter` that can be started repeatedly.

        Each wait() returns a new tensor, or `out` if given.
        """
        return self._request("reduce_scatter", tensor, op, **options)

    def broadcast_init(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None
    ) -> Request[Tensor]:
        """Make a `broadcast` that can be started repeatedly."""
        return self._request("broadcast", tensor, root, name)

    def reduce_to_owners_init(
        self, tensors: Sequence[Tensor], op: AnyReducer = Sum, **options: Any
    ) -> Request[list[int]]:
        """Make a `reduce_to_owners` that can be started repeatedly; `negotiate` as above."""
        return self._request("reduce_to_owners", tensors, op, **options)

    def run_init(
        self, schedule: Schedule, tensor: Tensor, op: AnyReducer = Sum, **options: Any
    ) -> Request[Tensor]:
        """Make a `run` that can be started repeatedly."""
        return self._request("run", schedule, tensor, op, **options)

    def _request(
        self, kind: str, *arguments: Any, negotiate: bool = True, **options: Any
    ) -> Request[Any]:
        call = getattr(self._arguments, kind)(*arguments, **options)
        return Request(self._calls, call, negotiate=negotiate)

    def split(self, ranks: Sequence[int]) -> Group | None:
        """Return a group of some ranks: its rank i is `ranks[i]` here; None on other ranks.

        Every rank of this group calls it, with the same ranks in the same order. Different threads
        may use both groups at the same time, except for CUDA tensors over NCCL, whose work on each
        device must have one order: there calls of both groups with `async_op` run in the order of
        their starts. The new group has this one's timeout, and is closed with this one, or by its
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
        self._record.attach_part(part._record, members)
        # Now two groups use the GPU, so both must start their work there in the caller's order.
        self.transport.shares_gpu = transport.shares_gpu = True
        self._parts.append(part)
        part._whole = self
        return part

    def abort(self, reason: str = "") -> None:
        """Make the group unusable immediately, from any thread; a second call does nothing.

        All calls under way, queued or later raise TransportError, and the flight record is written.
        On the peers the call under way, or the next one, raises an error that names this rank and
        the `reason`; over gloo, which cannot notify them, at the timeout. Groups split from this
        one are aborted too. close() must still be called.
        """
        validation.instance("reason", reason, str, "a str")
        reason = reason.encode(errors="replace").decode()
        said = f"{self.transport.me} called abort()" + (f": {reason}" if reason else "")
        # A copy: another thread may close a part now, which removes it from the list.
        for part in list(self._parts):
            part.abort(reason)
        self._calls.queue.abort(said)

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._calls.queue.closed

    def close(self) -> None:
        """Let queued calls finish, then end the communication thread and close the transport.

        Queued calls may continue while they make progress. Groups that were split from this one are
        closed first, and everything is closed even if a part of it fails.

        Raises:
            TransportError: Asynchronous calls were lost; the text has their number and the reason.
        """
        if self.closed:
            return
        # The stack calls these from the last to the first, each of them even if others raise.
        with ExitStack() as stack:
            if self._whole is not None:
                stack.callback(self._whole._parts.remove, self)
                self._whole = None
            stack.callback(self.transport.close)
            stack.callback(self._runner.libraries.close)
            stack.callback(self._calls.queue.close)
            for part in reversed(self._parts):
                stack.callback(part.close)
