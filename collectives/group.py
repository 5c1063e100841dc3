"""A group of ranks and the collectives that users call on it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from . import checks
from .agreement import gather_bytes, gather_pieces
from .algorithms import ring, tree
from .calls import Calls
from .cost import Links
from .owners import owners
from .place import find_place, place_of
from .reducers import Reducer, Sum
from .runner import Runner, Specs
from .spec import format_all_reduce_spec
from .split import split_bounds
from .topology import Topology
from .transport.base import Transport
from .work import Work

Tensor = torch.Tensor
_CPU = torch.device("cpu")


class Group:
    """Ranks that reduce together over one transport.

    Every method is a collective: all ranks of the group call the same ones in the same order. They
    agree on the call before any data is sent, so a difference between ranks is a
    CollectiveMismatchError on all of them and the group stays usable; after any other error raised
    while a call runs it is not. Any number of asynchronous calls may be under way; they run in the
    order in which they were made.

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
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.timeout = timeout
        place = find_place(transport, timeout, local_rank, local_size, topology)
        self.local_rank = place.local_rank
        self.local_size = place.local_size
        self.topology = place.topology
        self.hosts = place.hosts
        self._runner = Runner(transport, place.topology, timeout)
        self._call = Calls(self._runner)
        self._parts: list[Group] = []

    def __repr__(self) -> str:
        return f"Group(rank={self.rank}, size={self.size})"

    @property
    def num_nodes(self) -> int:
        """Hosts that the group's ranks are on, taken as equally filled."""
        return math.ceil(self.size / self.local_size)

    def use_links(self, links: Links | None) -> None:
        """Let `auto` choose by these measured costs, which must be the same on every rank.

        None: by size alone, the same algorithms in every run of the program.
        """
        self._runner.links = links

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
        checks.tensor("tensor", tensor)
        if segments is not None:
            segments = checks.segments(segments, tensor.numel())
        specs = self._reduction([tensor], op, algorithm, prescale, postscale)
        entries = [
            *_header("all_reduce", name, op, specs, prescale, postscale),
            f"segments={None if segments is None else tuple(segments)}",
            _describe(tensor),
        ]

        def run(label: str) -> Tensor:
            flat = tensor.detach().view(-1)
            self._runner.all_reduce(flat, op, specs, segments, prescale, postscale, label)
            return tensor

        return self._call("all_reduce", name, entries, run, tensor.device, async_op)

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
        tensors = checks.tensor_list("tensors", tensors)
        specs = self._reduction(tensors, op, algorithm, prescale, postscale)
        entries = _header("grouped_all_reduce", name, op, specs, prescale, postscale)
        entries += [f"tensors[{i}]: {_describe(t)}" for i, t in enumerate(tensors)]
        parts: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            parts.setdefault((tensor.dtype, tensor.device), []).append(tensor.detach())

        def run(label: str) -> list[Tensor]:
            for part in parts.values():
                self._runner.all_reduce_packed(part, op, specs, prescale, postscale, label)
            return tensors

        device = tensors[0].device if tensors else _CPU
        return self._call("grouped_all_reduce", name, entries, run, device, async_op)

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
        checks.tensor("tensor", tensor)
        checks.rank("dst", dst, self.size)
        specs = self._owned([tensor], op)
        entries = _header("reduce", name, op, specs, 1.0, 1.0)
        entries += [f"dst={dst}", _describe(tensor)]

        def run(label: str) -> Tensor:
            self._reduce_onto(tensor, dst, op, label)
            return tensor

        return self._call("reduce", name, entries, run, tensor.device, async_op)

    def owners(self, numels: Sequence[int]) -> list[int]:
        """The owner of each variable: the rank with the least so far, the lowest of equals."""
        return owners(numels, self.size)

    def reduce_to_owners(
        self, tensors: Sequence[Tensor], op: Reducer = Sum, *, name: str | None = None
    ) -> list[int]:
        """Reduce each tensor onto its owner alone, in place; return the owners.

        Owners are chosen by bytes, in list order. Arguments and other ranks' tensors as in reduce.
        """
        tensors = checks.tensor_list("tensors", tensors)
        specs = self._owned(tensors, op)
        chosen = self.owners([tensor.nbytes for tensor in tensors])
        entries = _header("reduce_to_owners", name, op, specs, 1.0, 1.0)
        entries += [f"tensors[{i}]: {_describe(t)}" for i, t in enumerate(tensors)]

        def run(label: str) -> list[int]:
            for tensor, owner in zip(tensors, chosen, strict=True):
                self._reduce_onto(tensor, owner, op, label)
            return chosen

        device = tensors[0].device if tensors else _CPU
        return self._call("reduce_to_owners", name, entries, run, device, False)

    def broadcast_from_owners(
        self, tensors: Sequence[Tensor], *, name: str | None = None
    ) -> list[Tensor]:
        """Copy each tensor to every rank, in place, from the owner that reduce_to_owners chose."""
        tensors = checks.tensor_list("tensors", tensors)
        for tensor in tensors:
            self.transport.check_device(tensor.device)
        chosen = self.owners([tensor.nbytes for tensor in tensors])
        entries = [f"broadcast_from_owners({name or ''})"]
        entries += [f"tensors[{i}]: {_describe(t)}" for i, t in enumerate(tensors)]

        def run(label: str) -> list[Tensor]:
            for tensor, owner in zip(tensors, chosen, strict=True):
                if self.size > 1:
                    flat = tensor.detach().view(-1)
                    self._runner.execute(tree.broadcast(self.size, owner), flat, Sum, label)
            return tensors

        device = tensors[0].device if tensors else _CPU
        return self._call("broadcast_from_owners", name, entries, run, device, False)

    def _owned(self, tensors: Sequence[Tensor], op: Reducer) -> Specs:
        """Check the arguments of a reduction onto single ranks."""
        specs = self._reduction(tensors, op, None, 1.0, 1.0)
        if op.uniform:
            raise ValueError(f"op {op} needs all ranks: use all_reduce")
        return specs

    def _reduce_onto(self, tensor: Tensor, dst: int, op: Reducer, label: str) -> None:
        flat = tensor.detach().view(-1)
        if self.size > 1:
            self._runner.execute(ring.reduce(self.size, dst), flat, op, label)
        if self.rank == dst:
            op.finish(flat, self.size)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: Reducer = Sum,
        *,
        name: str | None = None,
        async_op: bool = False,
    ) -> Tensor | Work:
        """Reduce over all ranks and return this rank's piece, 1-D; `tensor` is left as it is.

        The flattened tensor is cut in `size` pieces that differ by at most one element, the larger
        ones first; rank r gets piece r.
        """
        checks.tensor("tensor", tensor)
        specs = self._reduction([tensor], op, None, 1.0, 1.0)
        entries = [*_header("reduce_scatter", name, op, specs, 1.0, 1.0), _describe(tensor)]

        def run(label: str) -> Tensor:
            flat = tensor.detach().clone().view(-1)
            cuts = split_bounds(flat.numel(), self.size)
            if self.size > 1 and op.uniform:
                self._runner.all_reduce(flat, op, specs, None, 1.0, 1.0, label)
            elif self.size > 1:
                self._runner.execute(ring.reduce_scatter(self.size), flat, op, label)
            piece = flat[cuts[self.rank] : cuts[self.rank + 1]].clone()
            if not op.uniform:
                op.finish(piece, self.size)
            return piece

        return self._call("reduce_scatter", name, entries, run, tensor.device, async_op)

    def all_gather(
        self, tensor: Tensor, *, name: str | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """All ranks' tensors joined along dimension 0 in rank order.

        First dimensions may differ between ranks, the others may not; 0-d tensors are a ValueError.
        """
        checks.tensor("tensor", tensor)
        if tensor.dim() == 0:
            raise ValueError("tensor must have a first dimension to join along: use reshape(1)")
        self.transport.check_device(tensor.device)
        trailing = tuple(tensor.shape[1:])
        entries = [
            f"all_gather({name or ''})",
            f"trailing shape {trailing} {tensor.dtype} {tensor.device.type}",
        ]

        def run(label: str) -> Tensor:
            flat = tensor.detach().view(-1)
            if self.size == 1:
                return tensor.detach().clone()
            rows = torch.tensor([tensor.shape[0]])
            workspace = self._runner.workspace
            counts, _ = gather_pieces(rows, self.transport, label, self.timeout, workspace)
            whole, _ = gather_pieces(flat, self.transport, label, self.timeout, workspace)
            return whole.view(int(counts.sum()), *trailing)

        return self._call("all_gather", name, entries, run, tensor.device, async_op)

    def broadcast(
        self, tensor: Tensor, root: int = 0, *, name: str | None = None, async_op: bool = False
    ) -> Tensor | Work:
        """Copy `root`'s tensor to every rank, in place, and return it."""
        checks.tensor("tensor", tensor)
        checks.rank("root", root, self.size)
        self.transport.check_device(tensor.device)
        entries = [f"broadcast({name or ''})", f"root={root}", _describe(tensor)]

        def run(label: str) -> Tensor:
            if self.size > 1:
                flat = tensor.detach().view(-1)
                self._runner.execute(tree.broadcast(self.size, root), flat, Sum, label)
            return tensor

        return self._call("broadcast", name, entries, run, tensor.device, async_op)

    def all_gather_bytes(self, payload: bytes, *, name: str | None = None) -> list[bytes]:
        """Every rank's bytes, by rank; lengths may differ."""

        def run(label: str) -> list[bytes]:
            if self.size == 1:
                return [payload]
            workspace = self._runner.workspace
            return gather_bytes(payload, self.transport, label, self.timeout, workspace)

        entries = [f"all_gather_bytes({name or ''})"]
        return self._call("all_gather_bytes", name, entries, run, _CPU, False)

    def barrier(self, name: str | None = None) -> None:
        """Return when every rank has called it: the agreement alone does that."""
        self._call("barrier", name, [f"barrier({name or ''})"], lambda label: None, _CPU, False)

    def split(self, ranks: Sequence[int]) -> Group | None:
        """A group of some of the ranks, whose rank i is `ranks[i]` here; None on the others.

        Every rank of this group calls it, with the same ranks in the same order, which is the order
        that Adasum and all_gather take. The new group has messages of its own: both may be used at
        the same time, from different threads. It has this group's timeout, hosts and links, and
        ends with it, or with its own close().

        TypeError or ValueError for ranks that are not distinct ranks of this group.
        """
        members = checks.distinct_ranks("ranks", ranks, self.size)

        def run(label: str) -> Group | None:
            if self.rank not in members:
                return None
            place = place_of([self.hosts[rank] for rank in members], members.index(self.rank))
            part = Group(
                self.transport.split(members, self.timeout),
                timeout=self.timeout,
                local_rank=place.local_rank,
                local_size=place.local_size,
                topology=place.topology,
            )
            part.hosts = place.hosts
            part.use_links(self._runner.links)
            self._parts.append(part)
            return part

        entries = ["split()", f"ranks={members}"]
        part: Group | None = self._call("split", None, entries, run, _CPU, False)
        return part

    @property
    def closed(self) -> bool:
        """Whether close() was called."""
        return self._call.closed

    def close(self) -> None:
        """Let queued calls finish, then end the communication thread and close the transport.

        Groups that were split from this one are closed first.
        """
        if not self.closed:
            for part in self._parts:
                part.close()
            self._call.close()
            self.transport.close()

    def _reduction(
        self,
        tensors: Sequence[Tensor],
        op: Reducer,
        algorithm: str | None,
        prescale: float,
        postscale: float,
    ) -> Specs:
        """Check the arguments that all reductions share; return the algorithm's ranges."""
        checks.reducer("op", op)
        specs = checks.algorithm("algorithm", algorithm)
        checks.scale("prescale", prescale)
        checks.scale("postscale", postscale)
        for tensor in tensors:
            op.check(tensor.dtype)
            self.transport.check_device(tensor.device)
            if (prescale != 1.0 or postscale != 1.0) and not (
                tensor.dtype.is_floating_point or tensor.dtype.is_complex
            ):
                raise TypeError(f"prescale and postscale need a floating dtype, got {tensor.dtype}")
        self._runner.check(specs, op, tensors)
        return specs


def _header(
    kind: str, name: str | None, op: Reducer, specs: Specs, prescale: float, postscale: float
) -> list[str]:
    return [
        f"{kind}({name or ''})",
        f"op={op}",
        f"algorithm={format_all_reduce_spec(specs)}",
        f"prescale={prescale!r}",
        f"postscale={postscale!r}",
    ]


def _describe(tensor: Tensor) -> str:
    return f"shape {tuple(tensor.shape)} {tensor.dtype} {tensor.device.type}"
