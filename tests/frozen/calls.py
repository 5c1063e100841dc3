"""What a case calls on one rank, by public names alone, and which tensors it answers with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache, partial
from typing import Any

import torch

import adasum
import collectives
from collectives import Action, Collective, Group, Schedule, Step, Transfer
from tests.frozen.cases import Case
from tests.frozen.values import values

Tensor = torch.Tensor

OPERATORS = {
    "Sum": collectives.Sum,
    "Average": collectives.Average,
    "Max": collectives.Max,
    "Min": collectives.Min,
    "Product": collectives.Product,
    "Adasum": adasum.Adasum,
    "Adasum(weighted=False)": adasum.AdasumReducer(weighted=False),
}


class Caller:
    """One rank's side of a case."""

    def __init__(self, group: Group, case: Case) -> None:
        self.group = group
        self.case = case
        self.op = OPERATORS.get(case.op, collectives.Sum)
        self.dtype = getattr(torch, case.dtype)
        self.turn = 0

    def tensor(self, numel: int, rank: int | None = None) -> Tensor:
        """This rank's next input, or that of `rank` on all ranks."""
        self.turn += 1
        rank = self.group.rank if rank is None else rank
        case = self.case
        key = f"{case.kind} {case.numel} {case.dtype} {case.values} {self.turn} {rank}"
        found = values(numel, self.dtype, key, case.values == "special")
        return found.zero_() if case.values == "zero" and rank == 0 else found

    def tensors(self) -> list[Tensor]:
        """Of several sizes, one of them of another dtype and with more dimensions."""
        n = self.case.numel
        other = self.tensor(6).to(torch.float64 if self.dtype.is_floating_point else self.dtype)
        sizes = (n // 2, 1, 0, n // 3, 5)
        return [*(self.tensor(size) for size in sizes), other.view(3, 1, 2)]

    def rows(self, rows: int) -> Tensor:
        return self.tensor(3 * rows).view(rows, 3)

    def scales(self) -> dict[str, Any]:
        return {"prescale": 0.5, "postscale": 3.0} if self.case.option == "scaled" else {}

    def options(self) -> dict[str, Any]:
        algorithm = self.case.algorithm
        return self.scales() | ({} if algorithm == "-" else {"algorithm": algorithm})

    def segments(self) -> dict[str, Any]:
        """Five segments, the second one empty."""
        n = self.case.numel
        cuts = (0, n // 3, n // 3, n // 2, n - n // 5, n)
        return {"segments": cuts} if self.case.option == "segments" else {}

    def done(self, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """What a method returns, called with or without `async_op`."""
        if self.case.option == "async":
            return call(*args, async_op=True, **options).wait()
        return call(*args, **options)

    def repeat(self, request: Any, tensors: list[Tensor], other: list[Tensor]) -> list[Any]:
        """Start a request twice with other values in its memory, then with other memory."""
        answers = [_copies(self.started(request))]
        for tensor in tensors:
            tensor.copy_(self.tensor(tensor.numel()).view_as(tensor).to(tensor.dtype))
        answers.append(_copies(self.started(request)))
        answers.append(_copies(self.started(request, other)))
        request.close()
        return answers

    def started(self, request: Any, other: list[Tensor] | None = None) -> Any:
        request.start(*([] if other is None else [other if len(other) > 1 else other[0]]))
        return request.wait()


def _copies(answer: Any) -> Any:
    return [each.clone() for each in _flat(answer)]


def _flat(answer: Any) -> Iterator[Tensor]:
    if isinstance(answer, Tensor):
        yield answer
    elif isinstance(answer, bytes):
        yield torch.tensor(list(answer), dtype=torch.uint8)
    elif isinstance(answer, int):
        yield torch.tensor(answer)
    else:
        for each in answer:
            yield from _flat(each)


def _all_reduce(me: Caller) -> Any:
    mine = me.tensor(me.case.numel)
    given = mine.view(1, -1, 1) if me.case.option == "other" else mine
    answer = me.done(me.group.all_reduce, given, me.op, **me.segments(), **me.options())
    assert answer is given
    return mine


def _grouped_all_reduce(me: Caller) -> Any:
    packed = me.case.option == "other"
    mine = me.tensors()
    me.done(me.group.grouped_all_reduce, mine, me.op, packed=packed, **me.options())
    return mine


def _reduce_scatter(me: Caller) -> Any:
    by_rows = me.case.option in ("other", "segments")
    mine = me.rows(me.case.numel // 3) if by_rows else me.tensor(me.case.numel)
    answer = me.done(me.group.reduce_scatter, mine, me.op, by_rows=by_rows, **me.scales())
    return [mine, answer]


def _all_gather(me: Caller) -> Any:
    """Other rows on each rank."""
    rows = me.case.numel // 3 // me.group.size
    return me.done(me.group.all_gather, me.rows(rows + me.group.rank % 3))


def _all_to_all(me: Caller) -> Any:
    size = me.group.size
    if me.case.option != "other":
        return me.done(me.group.all_to_all, me.rows(me.case.numel // 3 // size * size))
    splits = [(me.group.rank + 2 * peer) % 5 for peer in range(size)]
    return me.done(me.group.all_to_all, me.rows(sum(splits) + 1), splits)


def _broadcast(me: Caller) -> Any:
    root = me.case.numel % me.group.size
    return me.done(me.group.broadcast, me.tensor(me.case.numel), root)


def _reduce(me: Caller) -> Any:
    """The other ranks' tensors hold partial results."""
    dst = me.case.numel % me.group.size
    answer = me.done(me.group.reduce, me.tensor(me.case.numel), dst, me.op)
    return answer if me.group.rank == dst else []


def _owners(me: Caller, count: int) -> dict[str, Any]:
    given = me.case.option in ("other", "segments")
    return {"owners": [7 * i % me.group.size for i in range(count)]} if given else {}


def _owned(me: Caller, tensors: list[Tensor], owners: list[int]) -> list[Any]:
    mine = [t for t, owner in zip(tensors, owners, strict=True) if owner == me.group.rank]
    return [*owners, *mine]


def _reduce_to_owners(me: Caller) -> Any:
    mine = me.tensors()
    given = _owners(me, len(mine))
    owners = me.done(me.group.reduce_to_owners, mine, me.op, **given, **me.scales())
    return _owned(me, mine, owners)


def _broadcast_from_owners(me: Caller) -> Any:
    mine = me.tensors()
    return me.done(me.group.broadcast_from_owners, mine, **_owners(me, len(mine)))


def _all_gather_bytes(me: Caller) -> Any:
    return me.group.all_gather_bytes(bytes([me.group.rank] * (me.case.numel % 1000)))


def _line(size: int, rank: int) -> Iterator[Step]:
    for t in range(size - 1):
        if rank == t:
            yield Step(sends=(Transfer(t + 1, 0, 2),))
        elif rank == t + 1:
            yield Step(recvs=(Transfer(t, 0, 2, Action.REDUCE_LEFT),), group=(rank,))
        else:
            yield Step()
    if rank == size - 1:
        yield Step(sends=tuple(Transfer(peer, 0, 2) for peer in range(size - 1)))
    else:
        yield Step(recvs=(Transfer(size - 1, 0, 2),))


@lru_cache
def line(size: int) -> Schedule:
    """A user's all-reduce: the sum goes from rank to rank, and the last one sends it to all."""
    return Schedule("line", size, 2, Collective.ALL_REDUCE, partial(_line, size))


def _run(me: Caller) -> Any:
    mine = me.tensor(me.case.numel)
    return me.done(me.group.run, line(me.group.size), mine, me.op, **me.segments(), **me.scales())


def _all_reduce_init(me: Caller) -> Any:
    mine, other = me.tensor(me.case.numel), me.tensor(me.case.numel)
    negotiate = me.case.option != "other"
    options = me.segments() | me.options()
    request = me.group.all_reduce_init(mine, me.op, negotiate=negotiate, **options)
    return me.repeat(request, [mine], [other])


def _grouped_all_reduce_init(me: Caller) -> Any:
    mine, other = me.tensors(), me.tensors()
    negotiate, packed = me.case.option != "async", me.case.option == "other"
    options = {"negotiate": negotiate, "packed": packed}
    request = me.group.grouped_all_reduce_init(mine, me.op, **options, **me.options())
    return me.repeat(request, mine, other)


def _reduce_scatter_init(me: Caller) -> Any:
    mine, other = me.tensor(me.case.numel), me.tensor(me.case.numel)
    request = me.group.reduce_scatter_init(mine, me.op, **me.scales())
    return me.repeat(request, [mine], [other])


def _broadcast_init(me: Caller) -> Any:
    mine, other = me.tensor(me.case.numel), me.tensor(me.case.numel)
    return me.repeat(me.group.broadcast_init(mine, me.group.size - 1), [mine], [other])


def _run_init(me: Caller) -> Any:
    mine, other = me.tensor(me.case.numel), me.tensor(me.case.numel)
    options = me.segments() | me.scales()
    request = me.group.run_init(line(me.group.size), mine, me.op, **options)
    return me.repeat(request, [mine], [other])


def _reduce_to_owners_init(me: Caller) -> Any:
    mine = me.tensors()
    given = _owners(me, len(mine))
    request = me.group.reduce_to_owners_init(mine, me.op, **given, **me.scales())
    answers = []
    for _ in range(2):
        owners = me.started(request)
        answers.append(_copies(_owned(me, mine, owners)))
        for tensor in mine:
            tensor.copy_(me.tensor(tensor.numel()).view_as(tensor).to(tensor.dtype))
    request.close()
    return answers


CALLS: dict[str, Callable[[Caller], Any]] = {
    "all_reduce": _all_reduce,
    "grouped_all_reduce": _grouped_all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_gather": _all_gather,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "reduce": _reduce,
    "reduce_to_owners": _reduce_to_owners,
    "broadcast_from_owners": _broadcast_from_owners,
    "all_gather_bytes": _all_gather_bytes,
    "run": _run,
    "all_reduce_init": _all_reduce_init,
    "grouped_all_reduce_init": _grouped_all_reduce_init,
    "reduce_scatter_init": _reduce_scatter_init,
    "broadcast_init": _broadcast_init,
    "run_init": _run_init,
    "reduce_to_owners_init": _reduce_to_owners_init,
}


def answer(group: Group, case: Case) -> list[Tensor]:
    """Make a case's call on this rank; return the tensors that it answers with."""
    return list(_flat(CALLS[case.kind](Caller(group, case))))
