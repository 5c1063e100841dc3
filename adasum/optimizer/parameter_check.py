"""Whether all ranks start from the same parameters: one small message a rank, at the first step."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from adasum.optimizer.parameters import Named
from collectives import CollectiveMismatchError, Group

_logger = logging.getLogger(__name__)
_VARIABLE = "ADASUM_CHECK_PARAMETERS"
# What errors call the comparison: on ranks that do not agree on it, too.
_CALL = f"check of the parameters, by check_parameters or {_VARIABLE}"
# Words of a row. A prime: what two layers, rows or columns of a matrix have exchanged comes into
# other columns, since no usual width is a multiple of it.
_WIDTH = 509
# Rows that are summed at once: on the CPU those whose copies stay in its cache, and for which torch
# starts no other thread; on a GPU those whose copies take 16 MiB.
_CPU_ROWS, _GPU_ROWS = 64, 4096


def checks_parameters(asked: bool | None) -> bool:
    """Return whether ranks compare: as asked, else as ADASUM_CHECK_PARAMETERS says, 1 unless set.

    Args:
        asked: The argument check_parameters.

    Raises:
        ValueError: The variable is neither 0 nor 1, and nothing was asked.
    """
    if asked is not None:
        return asked
    text = os.environ.get(_VARIABLE) or "1"
    if text not in ("0", "1"):
        raise ValueError(
            f"{_VARIABLE} must be 1, for ranks to compare their parameters at the first step, or "
            f"0 for not, got {text!r}"
        )
    return text == "1"


def require_equal_parameters(
    group: Group, named: Sequence[Named], problem: str = "", fix: str = ""
) -> bool:
    """Raise on every rank where ranks have not the same parameters, bit for bit; collective.

    Ranks that have joined take no part.

    Args:
        group: The ranks.
        named: (name, parameter), in an order that is the same on all ranks.
        problem: What this rank has found by itself; all ranks raise it.
        fix: What the error says can be done where values differ.

    Returns:
        Whether all ranks took part.

    Raises:
        CollectiveMismatchError: Names the first parameter that differs.
        ValueError: A rank has a problem.
    """
    rows = [] if problem else _describe(named)
    whole = hashlib.blake2b(json.dumps(rows).encode(), digest_size=16).digest()
    mine = b"\1" + problem.encode() if problem else b"\0" + whole
    told = group.all_gather_bytes(mine, name=_CALL)
    for rank, each in enumerate(told):
        if each[:1] == b"\1":
            raise ValueError(f"rank {rank}: {each[1:].decode()}")
    if len({each for each in told if each}) == 1:
        return all(told)
    sent = group.all_gather_bytes(json.dumps(rows).encode(), name="parameters that differ")
    by_rank = {rank: json.loads(each) for rank, each in enumerate(sent) if each}
    raise CollectiveMismatchError(_difference(by_rank, fix))


def _difference(by_rank: dict[int, list[list[str]]], fix: str) -> str:
    """Return how the ranks' parameters differ, as `_describe` describes them."""
    first, *others = by_rank
    rows = by_rank[first]
    for rank in others:
        theirs = by_rank[rank]
        for i, (mine, other) in enumerate(zip(rows, theirs, strict=False)):
            if mine[:2] == other[:2]:
                continue
            again = sorted(row[:2] for row in rows) == sorted(row[:2] for row in theirs)
            how = "the same parameters in another order" if again else "other parameters"
            return (
                f"ranks {first} and {rank} have {how}: parameter {i} is {' '.join(mine[:2])} on "
                f"rank {first} and {' '.join(other[:2])} on rank {rank}; build the model and the "
                "optimizer in the same way on every rank"
            )
        if len(rows) != len(theirs):
            return (
                f"the optimizer has {len(rows)} parameters on rank {first} and {len(theirs)} on "
                f"rank {rank}: build the model and the optimizer in the same way on every rank"
            )
    differ = [i for i, row in enumerate(rows) if any(by_rank[rank][i] != row for rank in others)]
    ranks = [rank for rank in others if by_rank[rank][differ[0]] != rows[differ[0]]]
    return (
        f"the ranks' parameters differ before their first reduction: {rows[differ[0]][0]} on ranks "
        f"{ranks} is not what it is on rank {first} ({len(differ)} of {len(rows)} parameters "
        f"differ){fix}"
    )


@torch.no_grad()
def _describe(named: Sequence[Named]) -> list[list[str]]:
    """Return each parameter's name, its dtype and shape, and a checksum."""
    compared = [(name, each.detach()) for name, each in named if _has_bits(each)]
    digests: list[bytes] = [b""] * len(compared)
    devices: dict[torch.device, list[int]] = {}
    for i, (_, tensor) in enumerate(compared):
        devices.setdefault(tensor.device, []).append(i)
    for indices in devices.values():
        short = [_shorten(compared[i][1]) for i in indices]
        # One copy from each device.
        whole = torch.cat(short).cpu()
        parts = whole.split([each.numel() for each in short])
        for i, part in zip(indices, parts, strict=True):
            digests[i] = hashlib.blake2b(part.numpy(), digest_size=8).digest()
    return [
        [name, f"{str(tensor.dtype).removeprefix('torch.')}{tuple(tensor.shape)}", digest.hex()]
        for (name, tensor), digest in zip(compared, digests, strict=True)
    ]


def _has_bits(parameter: Tensor) -> bool:
    """Return whether it has memory of its own: no lazy, sparse or fake one, and no DTensor."""
    return type(parameter) in (Tensor, torch.nn.Parameter) and (
        parameter.layout is torch.strided and not parameter.is_meta
    )


def _shorten(tensor: Tensor) -> Tensor:
    """Return a few KiB that depend on every bit of a tensor, on its device: uint8 [n].

    The bytes as int64 words, in rows of `_WIDTH`: the columns' sums modulo 2**64, and those of the
    words' upper halves, as two changes of the top bit cancel out in the first. What is left behind
    the last row, so all of a small tensor, stays as it is. Integer sums do not depend on the
    device, the number of threads or the order.
    """
    tensor = tensor.resolve_conj().resolve_neg().contiguous()
    raw = tensor.view(-1).view(torch.uint8) if tensor.numel() else tensor.new_empty(0).byte()
    count = raw.numel() // (8 * _WIDTH)
    if not count:
        return raw
    head, tail = raw[: count * 8 * _WIDTH], raw[count * 8 * _WIDTH :]
    if head.data_ptr() % 8:
        # A view of words has to begin at one.
        head = head.clone()
    sums = torch.zeros(2, _WIDTH, dtype=torch.int64, device=raw.device)
    whole, upper = sums
    for rows in (
        head.view(torch.int64).view(count, _WIDTH).split(_CPU_ROWS if raw.is_cpu else _GPU_ROWS)
    ):
        whole += rows.sum(0)
        upper += (rows >> 32).sum(0)
    return torch.cat([sums.view(-1).view(torch.uint8), tail])


class ParameterCheck:
    """Compares an optimizer's parameters between the ranks, once each, before they are reduced.

    Args:
        group: The ranks that reduce together.
    """

    _FIX = (
        ": call hvd.broadcast_parameters(model.state_dict(), root_rank=0) on every rank before the "
        f"first step; check_parameters=False or {_VARIABLE}=0 leaves this check out"
    )

    def __init__(self, group: Group) -> None:
        self._group = group
        self._buckets: list[Sequence[Named]] = []
        self._kinds: dict[Tensor, tuple[torch.dtype, torch.device]] = {}
        self._new: list[Named] = []
        self._begun = False

    def add(self, named: Sequence[Named], buckets: Sequence[Sequence[Named]]) -> None:
        """Have parameters compared at the next reduction; buckets as they were divided into."""
        self._new += named
        self._buckets += buckets
        self._kinds.update((each, (each.dtype, each.device)) for _, each in named)

    def run(self, values: dict[Tensor, Tensor] | None = None) -> None:
        """Compare what is new; collective where anything is.

        Args:
            values: What to compare in the place of some parameters.

        Raises:
            CollectiveMismatchError: On every rank, where parameters differ.
            ValueError: On every rank, where a part of a bucket was moved since it was planned.
        """
        if not self._new or _is_capturing(self._new):
            return
        values = values or {}
        named = [(name, values.get(parameter, parameter)) for name, parameter in self._new]
        everywhere = require_equal_parameters(self._group, named, self._moved(), self._FIX)
        if not self._begun and self._group.rank == 0:
            _warn_of_ddp([parameter for _, parameter in self._new])
        self._begun = True
        # A rank that has joined compares at its own first step, for which it needs all others.
        if everywhere:
            self._new, self._buckets = [], []

    def warn_without_gradients(self) -> None:
        """Warn before the first step, where nothing has a gradient: the model may have changed."""
        if self._begun or any(parameter.grad is not None for _, parameter in self._new):
            return
        _logger.warning(
            "rank %d: no parameter of this optimizer has a gradient at its first step: backward "
            "was not called, or the model has other parameters than when the optimizer was made, "
            "as after load_state_dict(assign=True) or a move that replaces them; make the "
            "optimizer after that",
            self._group.rank,
        )

    def _moved(self) -> str:
        """Return what is wrong where parameters of one bucket are no longer of one kind."""
        for members in self._buckets:
            if len({(each.dtype, each.device) for _, each in members}) > 1:
                name, moved = next(
                    (name, each)
                    for name, each in members
                    if self._kinds[each] != (each.dtype, each.device)
                )
                dtype, device = self._kinds[moved]
                return (
                    f"{name} was {dtype} on {device} when DistributedOptimizer was made, and is "
                    f"{moved.dtype} on {moved.device} now, as others of its bucket are not: move "
                    "and convert the model before DistributedOptimizer is made"
                )
        return ""


def _is_capturing(named: Sequence[Named]) -> bool:
    """Return whether a CUDA graph is being captured, which can hold no copy to the host."""
    return any(each.is_cuda for _, each in named) and torch.cuda.is_current_stream_capturing()


def _warn_of_ddp(parameters: Sequence[Tensor]) -> None:
    """Warn where DistributedDataParallel reduces the gradients of these parameters, too."""
    if not (dist.is_available() and dist.is_initialized()):
        return
    from torch.nn.parallel import DistributedDataParallel

    mine, kinds = set(map(id, parameters)), {DistributedDataParallel}
    kinds.update(DistributedDataParallel.__subclasses__())
    # Neither torch nor a parameter knows which modules wrap it.
    for each in [each for each in gc.get_objects() if type(each) in kinds]:
        if any(id(parameter) in mine for parameter in each.parameters()):
            _logger.warning(
                "DistributedDataParallel and DistributedOptimizer both reduce the gradients of the "
                "same parameters, one after the other: pass DistributedOptimizer the plain model's "
                "parameters and do not wrap the model, or keep DistributedDataParallel with "
                "adasum.ddp_hook and the plain optimizer"
            )
            return
