"""What every transport must carry: checks that each rank runs on its group.

Each check makes the same random inputs on all ranks from one seed, so every rank can compute the
float64 answer by itself.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import traceback
from collections.abc import Callable

import pytest
import torch

import collectives
from collectives import Average, CollectiveMismatchError, Group, Max, Min, Product, Sum
from collectives.bootstrap import transport_selection
from collectives.schedules.registry import SCHEDULES
from collectives.schedules.schedule import Action, Collective, Schedule, Step, Transfer
from collectives.transport import GlooTransport, HostTransport, Message

Check = Callable[[Group], None]

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (0,), (1,), (2,), (5, 3), (1021,)]


def inputs(
    group: Group, shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> list[torch.Tensor]:
    """Every rank's input, known to all."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(group.size)]


def close(actual: torch.Tensor, terms: list[torch.Tensor], scale: float = 1.0) -> None:
    """actual = scale * sum of terms; n - 1 additions and up to 2 scalings, each rounding once."""
    exact = torch.stack([t.double() for t in terms]).sum(0) * scale
    reach = torch.stack([t.double().abs() for t in terms]).sum(0) * abs(scale)
    eps = torch.finfo(actual.dtype).eps
    bound = (len(terms) + 1) * eps * reach + torch.finfo(actual.dtype).smallest_normal
    assert ((actual.double() - exact).abs() <= bound).all(), (actual, exact)


def same_on_all_ranks(group: Group, tensor: torch.Tensor) -> None:
    raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    assert len(set(group.all_gather_bytes(hashlib.sha256(raw).digest()))) == 1


def check_raw_exchange(group: Group) -> None:
    """Every pair at once; sizes differ by pair, order within a pair is kept, empty ones vanish."""
    transport = group.transport
    others = [r for r in range(group.size) if r != group.rank]
    sends = [
        Message(peer, torch.full((length,), float(100 * group.rank + peer + length)))
        for peer in others
        for length in (3, 0, 70000)
    ]
    recvs = [
        Message(peer, torch.full((length,), float("nan")))
        for peer in others
        for length in (3, 0, 70000)
    ]
    transport.exchange(sends, recvs, "a test", group.timeout)
    for peer, tensor in recvs:
        expected = torch.full_like(tensor, float(100 * peer + group.rank + tensor.numel()))
        assert torch.equal(tensor, expected)


def check_every_dtype_travels(group: Group) -> None:
    dtypes = [*FLOATS, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool]
    for dtype in [*dtypes, torch.complex64]:
        mine = torch.full((5,), group.rank % 2).to(dtype)
        group.broadcast(mine, group.size - 1)
        assert torch.equal(mine, torch.full((5,), (group.size - 1) % 2).to(dtype))


def check_all_reduce(group: Group) -> None:
    cases = [*zip(itertools.cycle(FLOATS), SHAPES, strict=False), *((d, (1021,)) for d in FLOATS)]
    for seed, (dtype, shape) in enumerate(cases):
        terms = inputs(group, shape, dtype, seed)
        for name in [None, *SCHEDULES]:
            mine = terms[group.rank].clone()
            assert group.all_reduce(mine, algorithm=name) is mine
            close(mine, terms)
            mine = terms[group.rank].clone()
            group.all_reduce(mine, Average, algorithm=name, prescale=0.5, postscale=3.0)
            close(mine, terms, 1.5 / group.size)


def check_float16_average(group: Group) -> None:
    """Of the largest exact sums, by a library too."""
    library = [] if group.transport.process_group is None else ["collective", "collective/rechd"]
    for name in [None, *SCHEDULES, *library]:
        mine = torch.full((1021,), 40000.0, dtype=torch.float16)
        group.all_reduce(mine, Average, algorithm=name)
        close(mine, [torch.full((1021,), 40000.0)] * group.size, 1 / group.size)


def check_large_all_reduce(group: Group) -> None:
    terms = inputs(group, (200_003,), torch.float32, 77)
    for name in [None, *SCHEDULES]:
        mine = terms[group.rank].clone()
        group.all_reduce(mine, algorithm=name)
        close(mine, terms)
        same_on_all_ranks(group, mine)


def star(size: int) -> Schedule:
    """Rank 0 reduces what all others send, and sends them the result."""

    def steps(rank: int) -> list[Step]:
        others = range(1, size) if rank == 0 else [0]
        there = tuple(Transfer(peer, 0, 1) for peer in others)
        if rank:
            return [Step(sends=there), Step(recvs=there)]
        recvs = tuple(Transfer(peer, 0, 1, Action.REDUCE_RIGHT) for peer in others)
        return [Step(recvs=recvs, group=(0,) if recvs else ()), Step(sends=there)]

    return Schedule("star", size, 1, Collective.ALL_REDUCE, steps)


def check_user_schedule(group: Group) -> None:
    schedule = star(group.size)
    for seed, dtype in enumerate(FLOATS):
        terms = inputs(group, (1021,), dtype, seed)
        mine = terms[group.rank].clone()
        assert group.run(schedule, mine) is mine
        close(mine, terms)
        mine = terms[group.rank].clone()
        group.run(schedule, mine, Average, prescale=0.5, postscale=3.0)
        close(mine, terms, 1.5 / group.size)
        same_on_all_ranks(group, mine)


def check_out(group: Group) -> None:
    """Gathers and pieces go where they are told to; other rows on one rank are all ranks' error."""
    size, rank = group.size, group.rank
    out = torch.full((3 * size, 2), float("nan"))
    assert group.all_gather(torch.full((3, 2), float(rank)), out=out) is out
    assert torch.equal(out, torch.arange(float(size)).repeat_interleave(6).view(-1, 2))
    piece = torch.full((2,), float("nan"))
    assert group.reduce_scatter(torch.arange(2.0 * size), out=piece) is piece
    assert torch.equal(piece, size * torch.arange(2.0 * rank, 2.0 * rank + 2))
    wrong = torch.zeros(3 * size + (rank == size - 1), 2)
    with pytest.raises(CollectiveMismatchError, match=rf"out of rank {size - 1} has"):
        group.all_gather(torch.ones(3, 2), out=wrong)
    assert wrong.eq(0).all()


def check_reduce(group: Group) -> None:
    """Small ones by a tree, with the bits of `rd`; large ones along a line."""
    for root in range(group.size):
        for length in (1021, 1_000_003):
            terms = inputs(group, (length,), torch.float32, length)
            mine, small = terms[group.rank].clone(), length < 2000
            group.reduce(mine, root)
            same = terms[group.rank].clone()
            group.all_reduce(same, algorithm="rd")
            if group.rank == root:
                close(mine, terms)
                assert not small or torch.equal(mine, same)


def check_integers(group: Group) -> None:
    mine = torch.arange(11) + group.rank
    group.all_reduce(mine)
    assert torch.equal(mine, group.size * torch.arange(11) + sum(range(group.size)))
    # Truncated towards zero, and exact beyond float64's 53 bits.
    mine = torch.tensor([2**58 + 1, -1 - group.rank, group.rank])
    group.all_reduce(mine, Average)
    mean = (group.size - 1) // 2
    assert mine.tolist() == [2**58 + 1, -((group.size + 1) // 2), mean]
    mine = torch.tensor([group.rank + 1, -1 - group.rank])
    last = group.size
    for op, want in ((Max, [last, -1]), (Min, [1, -last])):
        assert group.all_reduce(mine.clone(), op).tolist() == want
    mine = group.all_reduce(mine.clone(), Product)
    assert mine.tolist() == [math.factorial(last), (-1) ** last * math.factorial(last)]
    mine = torch.tensor([3, -3, 2**24 + 1]) * torch.ones(3, dtype=torch.int32)
    group.all_reduce(mine, prescale=0.5, postscale=1.5)
    assert mine.tolist() == [int(1.5 * last), -int(1.5 * last), int(1.5 * last * 2**23)]


def check_packed_equals_one_by_one(group: Group) -> None:
    """Bit for bit where every element has the same tree."""
    shapes = [(3, 5), (), (0,), (1,), (129,), (64, 7)]
    for name in ("rd", "rechd"):
        singles, packed = [], []
        for seed, shape in enumerate(shapes):
            for dtype in (torch.float32, torch.float16):
                terms = inputs(group, shape, dtype, seed)
                singles.append(terms[group.rank].clone())
                packed.append(terms[group.rank].clone())
        for tensor in singles:
            group.all_reduce(tensor, algorithm=name)
        group.grouped_all_reduce(packed, algorithm=name)
        for one, other in zip(singles, packed, strict=True):
            assert torch.equal(one, other)


def check_reduce_scatter(group: Group) -> None:
    for length in (0, 1, group.size - 1, group.size, 1023):
        terms = inputs(group, (length,), torch.float64, length)
        mine = terms[group.rank].clone()
        cuts = collectives.split_bounds(length, group.size)
        piece = slice(cuts[group.rank], cuts[group.rank + 1])
        for op, scale in ((Sum, 1.0), (Average, 1.0 / group.size)):
            result = group.reduce_scatter(mine, op)
            assert isinstance(result, torch.Tensor)
            close(result, [t[piece] for t in terms], scale)
        assert torch.equal(mine, terms[group.rank])


def check_all_gather(group: Group) -> None:
    mine = torch.full((group.rank, 3), float(group.rank))
    result = group.all_gather(mine)
    expected = torch.cat([torch.full((r, 3), float(r)) for r in range(group.size)])
    assert torch.equal(result, expected)
    with pytest.raises(ValueError, match=r"first dimension.*reshape\(1\)"):
        group.all_gather(torch.tensor(1.0))


def check_broadcast(group: Group) -> None:
    for root in range(group.size):
        mine = torch.full((2, 3), float(group.rank))
        group.broadcast(mine, root)
        assert torch.equal(mine, torch.full((2, 3), float(root)))


def check_async(group: Group) -> None:
    """Many under way at once, waited for in reverse, with a synchronous call in between."""
    tensors = [torch.full((100,), float(i + group.rank)) for i in range(20)]
    works = [group.all_reduce(t, name=f"t{i}", async_op=True) for i, t in enumerate(tensors)]
    extra = torch.ones(3)
    group.all_reduce(extra)
    assert extra[0] == group.size
    for i, work in reversed(list(enumerate(works))):
        assert isinstance(work, collectives.Work)
        assert work.wait() is tensors[i]
        assert work.is_completed()
        assert tensors[i][0] == sum(i + r for r in range(group.size))


def check_requests(group: Group) -> None:
    """Two requests in turn and at once; starting different ones is an error on all ranks."""
    tensors = [torch.empty(1000), torch.empty(1000)]
    requests = [group.all_reduce_init(tensor, name=f"r{i}") for i, tensor in enumerate(tensors)]
    for _ in range(3):
        for tensor, request in zip(tensors, requests, strict=True):
            tensor.fill_(group.rank + 1.0)
            request.start()
        for tensor, request in zip(tensors, requests, strict=True):
            assert request.wait() is tensor
            assert tensor[-1] == sum(rank + 1.0 for rank in range(group.size))
        if group.size > 1:
            tensors[1].fill_(2.0)
            mine = requests[group.rank == 0]
            mine.start(tensors[1])
            with pytest.raises(CollectiveMismatchError, match=r"of request \d+, rank 1 calls"):
                mine.wait()
            assert torch.equal(tensors[1], torch.full((1000,), 2.0))
            requests[0].start(tensors[0])
            requests[0].wait()
    for request in requests:
        request.close()


def check_mismatch(group: Group) -> None:
    """Every rank gets the same error, inputs are untouched, and the group goes on."""
    last = group.rank == group.size - 1

    def differ(call: Callable[[], object], *words: str) -> None:
        with pytest.raises(CollectiveMismatchError) as caught:
            call()
        for word in words:
            assert word in str(caught.value)
        texts = group.all_gather_bytes(str(caught.value).encode())
        assert len(set(texts)) == 1
        assert f"rank {group.size - 1}" in str(caught.value)

    if group.size == 1:
        return
    mine = torch.ones(4 if last else 3)
    differ(lambda: group.all_reduce(mine, name="w"), "(3,)", "(4,)", "all_reduce(w)")
    assert torch.equal(mine, torch.ones_like(mine))
    odd = torch.ones(3, dtype=torch.float16 if last else torch.float32)
    differ(lambda: group.all_reduce(odd), "float16", "float32")
    even = torch.ones(3)
    differ(lambda: group.all_reduce(even, Average if last else Sum), "op=Sum", "op=Average")
    differ(lambda: group.all_reduce(even, prescale=2.0 if last else 1.0), "prescale=2.0")
    differ(lambda: group.all_reduce(even, name="b" if last else "a"), "(a)", "(b)")
    differ(lambda: group.barrier() if last else group.all_reduce(even), "barrier", "all_reduce")
    differ(lambda: group.broadcast(even, group.size - 1 if last else 0), "root=")
    few = [torch.ones(2)] * 1 if last else [torch.ones(2), torch.ones(2)]
    differ(lambda: group.grouped_all_reduce(few), "among them tensor ")
    assert torch.equal(even, torch.ones(3))
    group.all_reduce(even)
    assert even[0] == group.size


def check_barrier(group: Group) -> None:
    group.barrier()
    assert group.local_size == group.size and group.local_rank == group.rank
    assert group.num_nodes == 1


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}


def run_checks(group: Group) -> dict[str, str]:
    """Run all checks on this rank: name -> "" or the traceback."""
    results = dict.fromkeys(CHECKS, "not run: an earlier check left the group unusable")
    for name, check in CHECKS.items():
        try:
            check(group)
            results[name] = ""
        except BaseException:  # noqa: BLE001 - handed to the test
            results[name] = traceback.format_exc()
            break
    return results


def run_checks_in_process(rank: int, transport: str) -> dict[str, str]:
    """The same, as one of several processes: over "gloo", "shm" or "hybrid"."""
    group = start_or_pretend(transport)
    assert (group.rank, group.size) == (rank, group.transport.size)
    results = run_checks(group)
    group.close()
    collectives.shutdown()
    assert not collectives.is_initialized()
    return results


def start(transport: str, timeout: float = 60.0) -> Group:
    """collectives.init, with a look at what it chose."""
    group = collectives.init(timeout=timeout, transport=transport)
    assert isinstance(group.transport, GlooTransport if transport == "gloo" else HostTransport)
    return group


def start_or_pretend(transport: str, timeout: float = 60.0) -> Group:
    """start, or two hosts where "hybrid" is asked for."""
    return pretend_two_hosts(timeout) if transport == "hybrid" else start(transport, timeout)


def pretend_two_hosts(timeout: float = 60.0) -> Group:
    """A group whose even ranks share memory, and whose odd ones do; gloo is between them."""
    rank = int(os.environ["RANK"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport_selection, "host_place", lambda: rank % 2)
        transport = start("auto", timeout).transport
    assert isinstance(transport, HostTransport)
    assert transport.near == tuple(range(rank % 2, transport.size, 2))
    assert transport.symmetric_memory is None
    return Group(transport, timeout=timeout, local_rank=rank, local_size=transport.size)
