"""Check the arguments of a Group's methods, before anything is sent, and return a Call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypedDict

import torch
from typing_extensions import Unpack

from collectives import validation
from collectives._own_packages import require_ours
from collectives.call import Call
from collectives.execution.all_reduce import AUTO, Runner
from collectives.reducers import NODE_RANKS, AnyReducer, Reducer, is_plain_sum
from collectives.schedules.schedule import Schedule, split_bounds
from collectives.schedules.spec import canonical_spec, parse_all_reduce_spec
from collectives.schedules.user_schedules import require_carries, verified
from collectives.transport.base import as_tensor
from collectives.tree_order import in_order

kernels = require_ours("kernels")
Tensor = torch.Tensor
_ONE = 1.0
_HALVES = (torch.float16, torch.bfloat16)
_WITH_ALGORITHM = ("all_reduce", "grouped_all_reduce")


class ScaleOptions(TypedDict, total=False):
    """Keyword arguments of every reduction, documented in `Group.all_reduce`."""

    name: str | None
    prescale: float
    postscale: float
    order: Literal["tree"] | None
    accumulate: torch.dtype | None


class ReductionOptions(ScaleOptions, total=False):
    """Keyword arguments of reductions with a choice of algorithm."""

    algorithm: str | None
    names: Sequence[str]


class Arguments:
    """The argument checks of one group.

    Each method checks the arguments of the Group's method of the same name, and returns the Call.
    It raises TypeError or ValueError with the argument and the fix.
    """

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._transport = runner.transport

    def all_reduce(
        self,
        tensor: Tensor,
        op: AnyReducer,
        segments: Sequence[int] | None = None,
        **options: Unpack[ReductionOptions],
    ) -> Call:
        """Check and describe an all_reduce."""
        validation.tensor("tensor", tensor)
        if segments is not None:
            segments = validation.segments(segments, tensor.numel())
        return self._reduction("all_reduce", [tensor], op, {"segments": segments}, **options)

    def grouped_all_reduce(
        self,
        tensors: Sequence[Tensor],
        op: AnyReducer,
        *,
        packed: bool = False,
        **options: Unpack[ReductionOptions],
    ) -> Call:
        """Check and describe a grouped_all_reduce."""
        tensors = validation.tensor_list("tensors", tensors)
        validation.instance("packed", packed, bool, "a bool")
        names = validation.names("names", options.pop("names", ()), len(tensors))
        call = self._reduction("grouped_all_reduce", tensors, op, {"packed": packed}, **options)
        call.names = names
        return call

    def run(
        self,
        schedule: Schedule,
        tensor: Tensor,
        op: AnyReducer,
        segments: Sequence[int] | None = None,
        **options: Unpack[ScaleOptions],
    ) -> Call:
        """Verify and describe a run of a user's own schedule."""
        validation.tensor("tensor", tensor)
        if segments is not None:
            segments = validation.segments(segments, tensor.numel())
        call = self._reduction("run", [tensor], op, {"segments": segments}, **options)
        known = verified(schedule, self._transport.size)
        require_carries(known, call.op, tensor.dtype)
        # Ranks compare a hash of the steps, since functions cannot be compared.
        call.options["schedule"] = f"{schedule.name} with steps {known.digest}"
        call.schedule = known.schedule
        return call

    def reduce(
        self, tensor: Tensor, dst: int, op: AnyReducer, **options: Unpack[ScaleOptions]
    ) -> Call:
        """Check and describe a reduce."""
        validation.tensor("tensor", tensor)
        validation.rank("dst", dst, self._transport.size)
        call = self._reduction("reduce", [tensor], op, {"dst": dst}, **options)
        _check_onto_one(call.op)
        return call

    def symmetric_empty(
        self, numel: int, dtype: torch.dtype, local_size: int, device: torch.device | None
    ) -> Call:
        """Check and describe a symmetric_empty."""
        validation.integer("numel", numel, 0)
        validation.instance("dtype", dtype, torch.dtype, "a torch.dtype")
        if dtype not in kernels.DTYPES:
            raise TypeError(
                f"dtype must be float16, bfloat16, float32 or float64, which kernels reduce, got "
                f"{dtype}"
            )
        if local_size > NODE_RANKS:
            raise ValueError(
                f"symmetric memory is for at most {NODE_RANKS} ranks per node, got {local_size}"
            )
        if local_size == 1 < self._transport.size:
            raise ValueError(
                "symmetric memory needs nodes with equal numbers, above one, of consecutive ranks: "
                "split the group by host"
            )
        if not self._transport.shares_gpu_memory(device or torch.device("cpu")):
            raise ValueError(
                "symmetric memory needs NCCL and a torch.distributed process group of just these "
                "ranks, one GPU each: call init on a machine with GPUs, or for some of the ranks "
                "collectives.from_process_group"
            )
        return Call("symmetric_empty", None, {"numel": numel, "dtype": str(dtype)})

    def reduce_to_owners(
        self,
        tensors: Sequence[Tensor],
        op: AnyReducer,
        owners: Sequence[int] | None = None,
        **options: Unpack[ScaleOptions],
    ) -> Call:
        """Check and describe a reduce_to_owners."""
        tensors = validation.tensor_list("tensors", tensors)
        call = self._reduction("reduce_to_owners", tensors, op, {}, **options)
        if not call.op.reads_tree:
            _check_onto_one(call.op)
        call.options["owners"] = self._owners(owners, len(tensors))
        return call

    def broadcast_from_owners(
        self, tensors: Sequence[Tensor], owners: Sequence[int] | None, name: str | None
    ) -> Call:
        """Check and describe a broadcast_from_owners."""
        tensors = validation.tensor_list("tensors", tensors)
        for tensor in tensors:
            self._transport.check_device(tensor.device)
        compared = {"owners": self._owners(owners, len(tensors))}
        return Call("broadcast_from_owners", name, compared, tensors)

    def reduce_scatter(
        self,
        tensor: Tensor,
        op: AnyReducer,
        by_rows: bool = False,
        out: Tensor | None = None,
        **options: Unpack[ScaleOptions],
    ) -> Call:
        """Check and describe a reduce_scatter."""
        validation.tensor("tensor", tensor, written=False)
        validation.instance("by_rows", by_rows, bool, "a bool")
        if by_rows:
            _check_rows(tensor)
        dtype = tensor.dtype
        if getattr(out, "dtype", None) == torch.float32 and dtype in _HALVES:
            if options.get("order") is None:
                raise TypeError(
                    f"out must be of {dtype} like tensor, got torch.float32: pass order='tree' "
                    "for sums in float32, which are written to it without being rounded"
                )
            options["accumulate"] = dtype = torch.float32
        call = self._reduction("reduce_scatter", [tensor], op, {"by_rows": by_rows}, **options)
        if out is not None:
            rank, length = self._transport.rank, tensor.shape[0] if by_rows else tensor.numel()
            low, high = split_bounds(length, self._transport.size)[rank : rank + 2]
            mine = high - low
            shape = (mine, *tensor.shape[1:]) if by_rows else (mine,)
            _check_out(out, tensor, shape, dtype)
            validation.apart("out", out, "tensor", tensor)
        call.out = out
        return call

    def all_gather(self, tensor: Tensor, name: str | None, out: Tensor | None) -> Call:
        """Check and describe an all_gather."""
        self._rows(tensor)
        if out is not None:
            # The number of all ranks' rows is unknown yet: only the other dimensions are checked.
            validation.tensor("out", out)
            _check_out(out, tensor, (*out.shape[:1], *tensor.shape[1:]), tensor.dtype)
        return Call("all_gather", name, tensors=[tensor], any_rows=True, out=out)

    def all_gather_bytes(self, payload: bytes, name: str | None) -> Call:
        """Check and describe an all_gather_bytes."""
        validation.instance("payload", payload, bytes | bytearray | memoryview, "bytes")
        validation.no_mode("payload")
        return Call("all_gather_bytes", name, tensors=[as_tensor(payload)], any_rows=True)

    def all_to_all(
        self, tensor: Tensor, splits: Sequence[int] | Tensor | None, name: str | None
    ) -> Call:
        """Check and describe an all_to_all; the call's second tensor is the rows for each rank."""
        self._rows(tensor)
        counts = validation.row_splits("splits", splits, tensor.shape[0], self._transport.size)
        return Call("all_to_all", name, tensors=[tensor, counts], any_rows=True)

    def broadcast(self, tensor: Tensor, root: int, name: str | None) -> Call:
        """Check and describe a broadcast."""
        validation.tensor("tensor", tensor)
        validation.rank("root", root, self._transport.size)
        self._transport.check_device(tensor.device)
        return Call("broadcast", name, {"root": root}, [tensor])

    def _rows(self, tensor: Tensor) -> None:
        validation.tensor("tensor", tensor, written=False)
        _check_rows(tensor)
        self._transport.check_device(tensor.device)

    def _owners(self, owners: Sequence[int] | None, count: int) -> list[int] | None:
        """Check that `owners` is None or has one rank for each of `count` tensors."""
        if owners is None:
            return None
        validation.instance("owners", owners, list | tuple, "a list of ranks, or None")
        if len(owners) != count:
            raise ValueError(f"owners must be one rank for each of {count} tensors, got {owners}")
        for i, owner in enumerate(owners):
            validation.rank(f"owners[{i}]", owner, self._transport.size)
        return list(owners)

    def _reduction(
        self,
        kind: str,
        tensors: Sequence[Tensor],
        op: AnyReducer,
        more: dict[str, Any],
        *,
        algorithm: str | None = None,
        name: str | None = None,
        names: Sequence[str] = (),
        prescale: float = _ONE,
        postscale: float = _ONE,
        order: Literal["tree"] | None = None,
        accumulate: torch.dtype | None = None,
        **unknown: object,
    ) -> Call:
        """Check the arguments of any reduction; `more`: other options that ranks must agree on."""
        # By hand: the options arrive as **kwargs, so Python does not reject unknown ones.
        if algorithm is not None and kind not in _WITH_ALGORITHM:
            unknown["algorithm"] = algorithm
        for argument in unknown:
            raise TypeError(f"{kind}() got an unexpected keyword argument {argument!r}")
        if names:
            raise ValueError("names are for grouped_all_reduce: pass name")
        op = validation.reducer("op", op)
        if order is not None or accumulate is not None:
            op = in_order(op, order, accumulate)
        if algorithm is None:
            algorithm = "auto"
        by_auto = algorithm == "auto" and is_plain_sum(op)
        try:
            specs = AUTO if by_auto else parse_all_reduce_spec(algorithm)
        except (TypeError, ValueError) as error:
            raise type(error)(f"algorithm: {error}") from None
        for tensor in tensors:
            op.check(tensor.dtype)
            self._transport.check_device(tensor.device)
        if not (prescale is _ONE and postscale is _ONE):
            prescale = validation.scale("prescale", prescale)
            postscale = validation.scale("postscale", postscale)
            scaled = tensors if prescale != 1.0 or postscale != 1.0 else ()
            for tensor in scaled:
                validation.scales_of(tensor.dtype, prescale=prescale, postscale=postscale)
        if not by_auto:
            self._runner.check(specs, op, tensors)
        options = {"op": str(op), **op.order_options}
        if kind in _WITH_ALGORITHM:
            # Ranks may write the same specification differently ("16k", "16384").
            options["algorithm"] = canonical_spec(algorithm)
        options |= {"prescale": prescale, "postscale": postscale, **more}
        return Call(kind, name, options, tensors, op)


def _check_onto_one(op: Reducer) -> None:
    """Raise ValueError for an operator that cannot reduce to one rank."""
    if not (op.associative or op.ordered):
        raise ValueError(f"op {op} needs all ranks: use all_reduce")


def _check_out(out: Tensor, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check `out`: its shape and dtype, and that it is on the device of the call's tensor."""
    validation.tensor("out", out)
    if out.dtype != dtype:
        raise TypeError(f"out must be of {tensor.dtype} like tensor, got {out.dtype}")
    if out.device != tensor.device:
        raise ValueError(f"out must be on {tensor.device} like tensor, got {out.device}")
    if tuple(out.shape) != shape:
        raise ValueError(f"out must have shape {shape}, got {tuple(out.shape)}")


def _check_rows(tensor: Tensor) -> None:
    if tensor.dim() == 0:
        raise ValueError("tensor must have a first dimension: use reshape(1)")
