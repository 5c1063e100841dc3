"""The torch.distributed backend "adasum": a Group carries out torch's own calls.

::

    import adasum                                   # or collectives: either registers the backend
    dist.init_process_group("adasum")               # under torchrun, as with gloo or NCCL
    dist.all_reduce(tensor)                         # and DDP, FSDP2, DTensor: no hook, no new API

    options = collectives.BackendOptions(order="tree", accumulate=torch.float32)
    dist.init_process_group("adasum", pg_options=options)

`collectives.from_process_group(pg)` returns the Group that carries out the calls of `pg`: errors,
timeouts and bits are the same as in every Group.

torch's gloo and NCCL carry out the rest: send, recv, gather, scatter, sparse tensors,
all_gather_coalesced, the bitwise operators, and devices with another backend, as in
"cpu:gloo,cuda:adasum". If ranks differ in these calls, they wait until the timeout.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import wraps
from types import SimpleNamespace
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from collectives.bootstrap.rendezvous import wait_for_ranks
from collectives.call import Call
from collectives.errors import CollectiveMismatchError, CollectiveTimeoutError, TransportError
from collectives.execution.phases import require_carrier
from collectives.group import Group
from collectives.initialize import from_process_group
from collectives.modes import outside_modes, untraced_methods
from collectives.reducers import TORCH_REDUCERS, Average, Max, Min, Reducer, Sum
from collectives.transport.process_groups import new_nccl
from collectives.tree_order import in_order
from collectives.validation import active_mode
from collectives.work import Work

Tensor = torch.Tensor
NAME = "adasum"
ORDER_VARIABLE = "ADASUM_BACKEND_ORDER"
_NO_TIMEOUT = timedelta(0)
# mypy confuses the enum's members with attributes of its instances.
_Op: Any = dist.ReduceOp.RedOpType
# As in NCCL: on bools the sum is a logical or, and the product a logical and.
_OF_BOOLS: dict[Any, Reducer] = {**TORCH_REDUCERS, _Op.SUM: Max, _Op.PRODUCT: Min}


class _NotOursError(Exception):
    """A Group cannot carry out this call."""


@dataclass(frozen=True)
class BackendOptions:
    """Options of the backend, for `pg_options` of init_process_group and new_group.

    They must be equal on all ranks; otherwise calls raise CollectiveMismatchError. A group that is
    made without options has the options of the default group.

    Attributes:
        order: "tree": sums and averages have one order, as in `Group.all_reduce`, including sums of
            DDP, FSDP2 and DTensor. None: the algorithm's own order. Default: the environment
            variable ADASUM_BACKEND_ORDER ("tree", or empty).
        accumulate: torch.float32: with order="tree", sums of float16 and bfloat16 are added in
            float32 and rounded once. None: in the tensors' own dtype.
        algorithm: The specification of all-reduces, as in `Group.all_reduce`.

    Examples:
        >>> collectives.BackendOptions(order="tree", accumulate=torch.float32).algorithm
        'auto'
    """

    order: Literal["tree"] | None = None
    accumulate: torch.dtype | None = None
    algorithm: str = "auto"

    def __post_init__(self) -> None:
        if self.order is None and (order := os.environ.get(ORDER_VARIABLE)):
            if order != "tree":
                raise ValueError(f"{ORDER_VARIABLE} must be 'tree' or empty, got {order!r}")
            object.__setattr__(self, "order", order)
        # Check the values.
        require_carrier(self.algorithm, in_order(Sum, self.order, self.accumulate))

    def order_of(self, op: Reducer, dtype: torch.dtype) -> dict[str, Any]:
        """Return a reduction's arguments for the order of tensors of this dtype."""
        if self.order is None or op not in (Sum, Average):
            return {}
        halves = dtype in (torch.float16, torch.bfloat16)
        return {"order": self.order, "accumulate": self.accumulate if halves else None}


class BackendWork(dist.Work):
    """The Works of a Group's asynchronous calls, and the tensors that they write."""

    def __init__(self, works: Sequence[Work[Any]], tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._works, self._tensors = works, list(tensors)

    def wait(self, timeout: timedelta = _NO_TIMEOUT) -> bool:
        """Wait for the calls; on CUDA, make the current stream wait for them.

        Raises the error of the first call that failed. With a timeout, raises
        CollectiveTimeoutError if the calls have not ended on the host by then: they continue.
        """
        if self._works and timeout > _NO_TIMEOUT:
            ended, last = threading.Event(), self._works[-1]
            last.add_done_callback(ended.set)
            if not ended.wait(timeout.total_seconds()):
                raise CollectiveTimeoutError(
                    f"{last.title} has not ended within {timeout.total_seconds():g} s of "
                    "wait(timeout), and is still under way: wait again, or abort the group"
                )
        for work in self._works:
            work.wait()
        return True

    synchronize = block_current_stream = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        """Whether `wait` would return or raise without waiting."""
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        """Whether the calls have ended without an error."""
        return self.is_completed() and self.exception() is None

    def exception(self) -> BaseException | None:
        """Return the error of the first call that failed, if any has."""
        return next((error for work in self._works if (error := work.error())), None)

    def result(self) -> list[Tensor]:
        """Return the tensors that the calls write."""
        return self._tensors

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Return a future of the tensors; its error has the same text as ours."""
        devices = {tensor.device for tensor in self._tensors if tensor.is_cuda}
        ended: torch.futures.Future[Any] = torch.futures.Future(devices=[*devices])

        def deliver(_: object) -> list[Tensor]:
            # Raised in a callback: DDP would take an error of `set_exception` for a result.
            if (error := self.exception()) is not None:
                raise error
            return self._tensors

        if self._works:
            # Only the last one: groups run their calls in order.
            self._works[-1].add_done_callback(lambda: ended.set_result(None))
        else:
            ended.set_result(None)
        return ended.then(deliver)


def _by_group(method: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Return a method that passes calls that a Group cannot do to the inner process group."""

    @wraps(method)
    def run(self: AdasumProcessGroup, *arguments: Any, **named: Any) -> dist.Work:
        tensor = arguments[0]
        while isinstance(tensor, (list, tuple)):
            tensor = tensor[0]
        if active_mode():
            with outside_modes():
                return run(self, *arguments, **named)
        try:
            self._check_ours(tensor)
            return method(self, *arguments, **named)
        except _NotOursError:
            method_of_torch = getattr(self._inner, method.__name__)
        return cast(dist.Work, method_of_torch(*arguments, **named))

    return run


@untraced_methods
class AdasumProcessGroup(dist.ProcessGroup):
    """A process group whose collectives a Group carries out: see the module.

    torch makes it (`init_process_group`, `new_group`). The first call makes its Group, and waits
    for all ranks to do so, even if it is asynchronous, like NCCL's first call. Methods have c10d's
    names and arguments: they start calls, or carry them out if the options say `asyncOp=False`.
    """

    def __init__(self, place: Any, options: BackendOptions) -> None:
        rank, size, timeout = place.group_rank, place.group_size, place.timeout
        # torch has a constructor with a store, but not for subclasses in Python.
        cast(Any, super().__init__)(rank, size)
        self.adasum_options, self._place = options, place
        self._lock = threading.Lock()
        self._made: Group | None = None
        self._kept: deque[BackendWork] = deque(maxlen=64)
        self._own_devices: frozenset[str] = frozenset()
        # torchrun keeps its store over restarts, with the addresses of gloo's and NCCL's earlier
        # ranks. Files and other simple stores do not outlive a job.
        shared = place.store
        if shared.has_extended_api():
            shared = wait_for_ranks(shared, rank, size, timeout.total_seconds())
        self._inner = dist.ProcessGroup(dist.PrefixStore("inner", shared), rank, size)
        kinds, store = dist.ProcessGroup.BackendType, dist.PrefixStore("gloo", shared)
        backends: dict[str, Any] = {"cpu": dist.ProcessGroupGloo(store, rank, size, timeout)}
        if torch.cuda.is_available() and dist.is_nccl_available():
            store = dist.PrefixStore("nccl", shared)
            members = place.global_ranks_in_group
            backends["cuda"] = new_nccl(store, rank, size, timeout, place.group_id, members)
        # Set on this group, too: torch asks it for its devices and its name, and runs methods that
        # are not overridden (send, recv, gather, scatter) on its backends.
        for group in (self, self._inner):
            for device, backend in backends.items():
                kind = kinds.GLOO if device == "cpu" else kinds.NCCL
                group._register_backend(torch.device(device), kind, backend)
                group._set_default_backend(kinds.GLOO)

    def getBackendName(self) -> str:
        """Return the backend's name."""
        return NAME

    @property
    def group(self) -> Group:
        """The Group that carries out the calls; the first use is a collective that makes it."""
        if self._made is not None and not self._made.closed:
            return self._made
        with self._lock:
            # Under the lock, so that two threads get the same Group.
            self._made = from_process_group(self, timeout=self._place.timeout.total_seconds())
            parts = [part.split(":") for part in dist.get_backend_config(self).split(",")]
            self._own_devices = frozenset(part[0] for part in parts if part[-1] == NAME)
            return self._made

    def _check_ours(self, tensor: Tensor) -> None:
        """Raise _NotOursError unless a Group can reduce tensors of this layout and device."""
        if tensor.layout is not torch.strided:
            if self.adasum_options.order is None:
                raise _NotOursError
            raise TypeError(
                f"tensor is sparse ({tensor.layout}), and sparse sums have no order: make the "
                "gradient dense (sparse=False), or a process group without order='tree'"
            )
        _ = self.group
        if tensor.device.type not in self._own_devices:
            raise _NotOursError

    def _reduction(self, opts: Any, tensor: Tensor) -> tuple[Reducer, dict[str, Any]]:
        """Return the reducer for tensors like this, and the call's options."""
        # Overloads pass the operator, or nothing, in place of options.
        op = getattr(opts, "reduceOp", opts) or _Op.SUM
        kind = getattr(op, "op", op)
        reducer = (_OF_BOOLS if tensor.dtype is torch.bool else TORCH_REDUCERS).get(kind)
        if reducer is not None:
            return reducer, self.adasum_options.order_of(reducer, tensor.dtype)
        if kind != _Op.PREMUL_SUM:
            raise _NotOursError
        options = self.adasum_options.order_of(Sum, tensor.dtype)
        return Sum, {**options, "prescale": float(op.__getstate__()[1])}

    def _run(self, opts: Any, calls: Sequence[Call], tensors: Sequence[Tensor]) -> BackendWork:
        """Carry out calls, or start them if they are asynchronous; `tensors` are their outputs."""
        own = self._made._calls  # type: ignore[union-attr]
        if not getattr(opts, "asyncOp", True):
            for call in calls:
                own.run(call)
            return BackendWork((), tensors)
        if own.queue.is_inside():
            raise TransportError(
                f"{calls[0]} in a callback of a call of the same process group, which would wait "
                "for itself, as in torch's PowerSGD hook: call it after wait()"
            )
        work = BackendWork([own.run(call, async_op=True) for call in calls], tensors)
        if len(tensors) == 1 and tensors[0].numel() == 1:
            # DDP's join only keeps the C++ part, and would wait forever if this object were freed.
            self._kept.append(work)
        return work

    @_by_group
    def allreduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce tensors of one dtype in place, in one call."""
        tensors, flat, copy_back = _contiguous(tensors)
        op, options = self._reduction(opts, flat[0])
        options["algorithm"] = self.adasum_options.algorithm
        if len(flat) == 1:
            call = self.group._arguments.all_reduce(flat[0], op, None, **options)
        else:
            call = self.group._arguments.grouped_all_reduce(flat, op, **options)
        call.then = copy_back
        return self._run(opts, [call], tensors)

    @_by_group
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Reduce tensors of one dtype in place, in one call."""
        return self.allreduce(tensors, opts)

    @_by_group
    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        """Reduce the tensor to the root; on other ranks it holds partial results afterwards."""
        tensors, (flat,), copy_back = _contiguous(tensors)
        op, options = self._reduction(opts, flat)
        if "prescale" in options:
            flat.mul_(options.pop("prescale"))
        call = self.group._arguments.reduce(flat, opts.rootRank, op, **options)
        call.then = copy_back
        return self._run(opts, [call], tensors)

    @_by_group
    def broadcast(self, tensors: Any, opts: Any) -> dist.Work:
        """Copy the root's tensor to all ranks, in place."""
        tensors, (flat,), copy_back = _contiguous(tensors)
        call = self.group._arguments.broadcast(flat, getattr(opts, "rootRank", opts), None)
        call.then = copy_back
        return self._run(opts, [call], tensors)

    @_by_group
    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into a list of tensors."""
        if isinstance(inputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        calls = [self._gather(tensor, outs) for tensor, outs in zip(inputs, outputs, strict=True)]
        return self._run(opts, calls, [out for outs in outputs for out in outs])

    def all_gather_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Gather every rank's tensor into `output`; `input` may be this rank's part of it."""
        return self.all_gather_single_coalesced([output], [input], opts)

    @_by_group
    def all_gather_single_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Gather several tensors, each into one tensor."""
        pairs = zip(inputs, outputs, strict=True)
        return self._run(opts, [self._gather(tensor, [out]) for tensor, out in pairs], outputs)

    def _gather(self, tensor: Tensor, outputs: Sequence[Tensor]) -> Call:
        """Return the call that writes every rank's tensor to the outputs."""
        _check_parts("output", outputs, self.size(), tensor)
        out = None
        if len(outputs) == 1 and outputs[0].is_contiguous():
            out = outputs[0].detach().view(self.size(), tensor.numel())
        row = tensor.detach().reshape(1, tensor.numel())
        call = self.group._arguments.all_gather(row, None, out)
        if out is None:
            call.then = _copy_to(outputs)
        return call

    @_by_group
    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Reduce a list of tensors, one for each rank, and return this rank's."""
        if isinstance(outputs, Tensor):
            outputs, inputs = [outputs], [inputs]
        calls = []
        for output, parts in zip(outputs, inputs, strict=True):
            # Copies, since the reduction overwrites them; sizes may differ.
            parts = [part.detach().clone(memory_format=torch.contiguous_format) for part in parts]
            op, options = self._reduction(opts, output)
            owners = list(range(self.size()))
            calls.append(self.group._arguments.reduce_to_owners(parts, op, owners, **options))
            copy, mine = _copy_to([output]), parts[self.rank()]
            calls[-1].then = lambda _, copy=copy, mine=mine: copy(mine)
        return self._run(opts, calls, outputs)

    def reduce_scatter_single(self, output: Any, input: Any, opts: Any = None) -> dist.Work:
        """Reduce `input` and return this rank's part; `output` may be a part of `input`."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    @_by_group
    def reduce_scatter_single_coalesced(
        self, outputs: Any, inputs: Any, opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors, and return this rank's part of each."""
        calls = []
        for output, tensor in zip(outputs, inputs, strict=True):
            _check_parts("input", [tensor], self.size(), output)
            op, options = self._reduction(opts, tensor)
            flat = tensor.detach().reshape(-1)
            calls.append(self.group._arguments.reduce_scatter(flat, op, **options))
            calls[-1].then = _copy_to([output])
        return self._run(opts, calls, outputs)

    @_by_group
    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        """Send one tensor to every rank, and receive one from each."""
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
        counts = [tensor.numel() for tensor in inputs]
        expected = [tensor.numel() for tensor in outputs]
        return self._run(opts, [self._exchange(flat, counts, outputs, expected)], outputs)

    @_by_group
    def all_to_all_single(
        self, output: Any, input: Any, output_splits: Any, input_splits: Any, opts: Any = None
    ) -> dist.Work:
        """Send rows of `input` to every rank; without splits, equal numbers of rows."""
        rows, size = input.detach().contiguous(), self.size()
        expected = output_splits or [output.shape[0] // size] * size
        return self._run(opts, [self._exchange(rows, input_splits, [output], expected)], [output])

    def _exchange(
        self, rows: Tensor, splits: Sequence[int], outputs: Any, expected: Sequence[int]
    ) -> Call:
        """Return the call that sends rows to all ranks and writes received rows to the outputs."""
        call = self.group._arguments.all_to_all(rows, splits or None, None)

        def copy(result: tuple[Tensor, Tensor]) -> None:
            received, counts = result
            if counts.tolist() != [*expected]:
                raise CollectiveMismatchError(
                    f"{call.label}: rank {self.rank()} expects {[*expected]} rows or elements from "
                    f"the ranks, by its output splits, and they sent {counts.tolist()}"
                )
            _copy_to(outputs)(received)

        call.then = copy
        return call

    @outside_modes()
    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until all ranks have called it, and their current CUDA streams are done."""
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        _ = self.group
        return self._run(opts, [Call("barrier")], [])

    # Their names in torch 2.10 to 2.12.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def split_group(  # type: ignore[override]
        self, new_ranks: list[int], timeout: Any = None, opts: Any = None, **named: Any
    ) -> Any:
        """Return a group of some ranks, given by their numbers here; None on other ranks."""
        if self.rank() not in new_ranks:
            return None
        name, names = named["group_name"], dist.get_process_group_ranks(self)
        place = SimpleNamespace()
        place.store, place.group_id = dist.PrefixStore(f"{name}/", self._place.store), name
        place.group_rank, place.group_size = new_ranks.index(self.rank()), len(new_ranks)
        place.timeout = timeout or self._place.timeout
        place.global_ranks_in_group = [names[rank] for rank in new_ranks]
        options = opts if isinstance(opts, BackendOptions) else self.adasum_options
        part = AdasumProcessGroup(place, options)
        part._set_group_name(name)
        part._set_group_desc(named.get("group_desc") or "undefined")
        return part

    def abort(self) -> None:
        """Make the group unusable immediately: calls under way raise on all ranks."""
        if self._made is not None:
            self._made.abort("abort() of its process group")
        self._inner.abort()

    def shutdown(self) -> None:
        """End the group after its queued calls; `destroy_process_group` calls this."""
        if self._made is not None:
            self._made.close()
        self._inner.shutdown()


def _contiguous(tensors: Any) -> tuple[list[Tensor], list[Tensor], Callable[[Any], None] | None]:
    """Return the tensors, contiguous versions of them, and a function that copies results back.

    The function is None if all tensors are contiguous: they are then used directly.
    """
    # c10d's overloads pass a single tensor.
    tensors = [tensors] if isinstance(tensors, Tensor) else tensors
    flat = [tensor.detach().contiguous() for tensor in tensors]
    moved = [pair for pair in zip(tensors, flat, strict=True) if not pair[0].is_contiguous()]
    if not moved:
        return tensors, flat, None
    for tensor, _ in moved:
        if 0 in tensor.stride():
            raise ValueError(
                f"tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has elements "
                "that share memory, as expand() makes them: pass tensor.contiguous()"
            )

    def copy_back(_: Any) -> None:
        for tensor, copy in moved:
            tensor.detach().copy_(copy)

    return tensors, flat, copy_back


def _copy_to(outputs: Sequence[Tensor]) -> Callable[[Tensor], None]:
    """Return a function that copies a result's elements to tensors, one after the other."""

    def copy(result: Tensor) -> None:
        parts = result.reshape(-1).split([output.numel() for output in outputs])
        for output, part in zip(outputs, parts, strict=True):
            output.detach().copy_(part.view_as(output))

    return copy


def _check_parts(argument: str, wholes: Sequence[Tensor], size: int, part: Tensor) -> None:
    """Raise ValueError unless the `wholes` together hold exactly one part per rank."""
    count = sum(whole.numel() for whole in wholes)
    if count != size * part.numel():
        raise ValueError(
            f"{argument} must have {size} times the {part.numel()} elements that each rank has, "
            f"got {count}"
        )


def create(opts: Any, options: Any) -> AdasumProcessGroup:
    """Return the process group for torch's options and `pg_options`."""
    if options is None:
        options = getattr(dist.group.WORLD, "adasum_options", None) or BackendOptions()
    if not isinstance(options, BackendOptions):
        raise TypeError(
            f"pg_options must be collectives.BackendOptions, got {type(options).__name__}"
        )
    return AdasumProcessGroup(opts, options)
