"""The NCCL transport over real NCCL: one process a rank, several of them on one GPU.

One rank alone sends to itself, which any NCCL does on any GPU.

bench/results/nvidia-h200/results.md has what an H200 made of them, and
tests/collectives/transport/test_cupy_backend.py what a stand-in for NCCL does.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist

import kernels
from adasum import Adasum
from collectives import (
    Average,
    CollectiveTimeoutError,
    Group,
    Reducer,
    Sum,
    TransportError,
    Work,
)
from collectives.execution.executor import CallContext, Workspace, execute
from collectives.execution.replay import CAPTURED
from collectives.schedules import halving, ring
from collectives.schedules.schedule import Schedule, split_bounds
from collectives.schedules.topology import Topology
from collectives.transport import GlooTransport, Message, Transport
from collectives.transport.nccl.cupy_backend import CupyBackend, load_nccl
from collectives.transport.nccl.transport import NcclTransport
from collectives.tree_order import in_order
from tests.adasum import definition
from tests.processes.harness import run_ranks

SIZES = [1, 2, 3]
TIMEOUT = 60.0
SHORT = 3.0
NUMEL = 100_003
# NCCL's kernels of all ranks on a GPU must fit on it together.
ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}

Check = Callable[[NcclTransport], None]
pytestmark = pytest.mark.gpu


@cache
def why_not(size: int = max(SIZES)) -> str:
    """What is missing to run so many ranks over NCCL here; empty where nothing is."""
    try:
        nccl = load_nccl()
    except (ImportError, RuntimeError) as error:
        return str(error)
    version, gpus = nccl.get_version(), torch.cuda.device_count()
    if gpus < size and version < 23000:
        return (
            f"{size} ranks on {gpus} GPU need NCCL 2.30 (code 23000) or newer, loaded is "
            f"{version}: install a newer nvidia-nccl package, and where torch brings its own set "
            "LD_PRELOAD to that package's libnccl.so.2"
        )
    return ""


def need_nccl(size: int) -> None:
    """Skip a test of so many ranks unless they can run here."""
    if reason := why_not(size):
        pytest.skip(reason)


def inputs(size: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Every rank's input, known to all, on the CPU."""
    return [
        torch.randn(NUMEL, generator=torch.Generator().manual_seed(r)).to(dtype)
        for r in range(size)
    ]


def all_reduce(
    transport: NcclTransport,
    buffer: torch.Tensor,
    make: Callable[[int], Schedule],
    op: Reducer,
    workspace: Workspace | None = None,
) -> None:
    call = CallContext(transport, "a test", TIMEOUT, workspace or Workspace())
    execute(make(transport.size), buffer, op, call)


def close_to_sum(answer: torch.Tensor, terms: list[torch.Tensor]) -> None:
    """n - 1 additions, each rounding to the dtype once."""
    stacked = torch.stack(terms).double()
    bound = (len(terms) - 1) * torch.finfo(answer.dtype).eps * stacked.abs().sum(0)
    assert ((answer.cpu().double() - stacked.sum(0)).abs() <= bound).all()


def check_every_pair_and_dtype(transport: NcclTransport) -> None:
    mine, device = transport.rank, transport.device
    others = [r for r in range(transport.size) if r != mine] or [mine]
    dtypes = [torch.float16, torch.bfloat16, torch.float64, torch.int16, torch.bool]
    cases = [(numel, dtype) for numel in (3, 0, 70_000) for dtype in dtypes]

    def value(source: int, target: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((numel,), (3 * source + target + numel) % 7).to(dtype)

    sends = [Message(p, value(mine, p, n, d).to(device)) for p in others for n, d in cases]
    recvs = [Message(p, torch.ones(n, dtype=d, device=device)) for p in others for n, d in cases]
    transport.exchange(sends, recvs, "a test", TIMEOUT)
    expected = [value(p, mine, n, d) for p in others for n, d in cases]
    for message, want in zip(recvs, expected, strict=True):
        assert torch.equal(message.tensor.cpu(), want)


def check_order_of_streams(transport: NcclTransport) -> None:
    """Behind slow work of the caller's stream, and before what it does next."""
    after, before = (transport.rank + 1) % transport.size, (transport.rank - 1) % transport.size
    mine = torch.zeros(NUMEL, device=transport.device)
    got = torch.zeros(NUMEL, device=transport.device)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    sums = []
    with torch.cuda.stream(stream):
        for turn in range(3):
            torch.cuda._sleep(20_000_000)
            mine.fill_(10.0 * turn + transport.rank)
            transport.exchange([Message(after, mine)], [Message(before, got)], "a test", TIMEOUT)
            sums.append(got.double().sum())
    stream.synchronize()
    assert [s.item() for s in sums] == [NUMEL * (10.0 * turn + before) for turn in range(3)]


def check_sum(transport: NcclTransport) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        terms = inputs(transport.size, dtype)
        for make in (ring.all_reduce, halving.all_reduce, halving.doubling):
            buffer = terms[transport.rank].to(transport.device)
            all_reduce(transport, buffer, make, Sum)
            close_to_sum(buffer, terms)


def check_adasum(transport: NcclTransport) -> None:
    terms = inputs(transport.size)
    for make in (halving.all_reduce, halving.doubling):
        buffer = terms[transport.rank].to(transport.device)
        all_reduce(transport, buffer, make, Adasum)
        error = definition.relative_error(buffer.cpu(), definition.tree(terms))
        assert error <= definition.tolerance(torch.float32)


def check_own_all_reduce(transport: NcclTransport) -> None:
    terms = inputs(transport.size)
    buffer = terms[transport.rank].to(transport.device)
    transport.all_reduce(buffer, None, "a test", TIMEOUT)
    close_to_sum(buffer, terms)
    last = transport.size - 1
    part = (last,) if transport.rank == last else tuple(range(last))
    for _ in range(2):
        buffer = terms[transport.rank].to(transport.device)
        transport.all_reduce(buffer, part, "a test", TIMEOUT)
        close_to_sum(buffer, [terms[r] for r in part])
    numbers = torch.arange(5, device=transport.device) + 1j * transport.rank
    transport.all_reduce(numbers, None, "a test", TIMEOUT)
    ranks = range(transport.size)
    assert torch.equal(numbers.cpu(), len(ranks) * torch.arange(5) + 1j * sum(ranks))


def check_calls_of_a_group(transport: NcclTransport) -> None:
    """By every algorithm, at once and later, from two streams, and what is left of it dropped."""
    rank, size, device = transport.rank, transport.size, transport.device
    topology = Topology(size, size)
    # Not closed, since that closes the transport.
    group = Group(transport, timeout=TIMEOUT, local_rank=rank, local_size=size, topology=topology)
    terms = inputs(size)
    algorithms = ("auto", "nccl", "xring", "rechd", "rd", "pscpu", "psgpu", "nccl/pscpu")
    for algorithm in algorithms:
        for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
            with torch.cuda.stream(stream):
                first, second = (terms[rank].to(device) for _ in range(2))
                work = group.all_reduce(first, algorithm=algorithm, async_op=True)
                assert isinstance(work, Work)
                group.all_reduce(second, algorithm=algorithm)
                work.wait()
                close_to_sum(first, terms)
                close_to_sum(second, terms)
    works = [group.all_gather(terms[rank].to(device) + i, async_op=True) for i in range(4)]
    for i, work in enumerate(works):
        assert isinstance(work, Work)
        assert torch.equal(work.wait().cpu(), torch.cat(terms) + i)
    both = [torch.ones(3), torch.ones(NUMEL, device=device)]
    both[1].add_(1.0)
    work = group.grouped_all_reduce(both, async_op=True)
    assert isinstance(work, Work)
    assert [each.sum().item() for each in work.wait()] == [3 * size, 2 * NUMEL * size]


def check_graph(transport: NcclTransport) -> None:
    """A whole all-reduce, captured once; replays reduce what the buffer then holds."""
    terms = inputs(transport.size)
    for make, op in (
        (halving.all_reduce, Sum),
        (halving.all_reduce, Adasum),
    ):
        buffer = terms[transport.rank].to(transport.device)
        workspace = Workspace()
        all_reduce(transport, buffer, make, op, workspace)
        wanted = buffer.clone()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            all_reduce(transport, buffer, make, op, workspace)
        for scale in (1.0, 2.0):
            buffer.copy_(terms[transport.rank].to(transport.device) * scale)
            graph.replay()
            # A factor of two changes no rounding.
            assert torch.equal(buffer, wanted * scale)


def check_requests(transport: NcclTransport) -> None:
    """From their third start on they are graphs, beside direct calls and the caller's own work.

    Bit for bit what the direct call makes of the same vectors; float64 goes by pairs.
    """
    part = transport.split(range(transport.size), TIMEOUT)
    rank, size, device = part.rank, part.size, part.device
    group = Group(part, timeout=TIMEOUT, local_rank=rank, local_size=size)
    cases: list[tuple[str, Reducer, torch.dtype]] = [
        ("rechd", Sum, torch.float32),
        ("xring", Average, torch.float16),
        ("vhdd", Adasum, torch.float32),
        ("direct", Adasum, torch.bfloat16),
        ("direct", Adasum, torch.float64),
        ("direct", in_order(Average, "tree"), torch.float32),
    ]
    segments = (0, 7, 7, 30_000, 30_001, NUMEL)
    buffers = [torch.zeros(NUMEL, dtype=dtype, device=device) for *_, dtype in cases]
    requests = [
        group.all_reduce_init(buffer, op, algorithm=algorithm, segments=segments, negotiate=False)
        for buffer, (algorithm, op, _) in zip(buffers, cases, strict=True)
    ]
    for turn in range(8):
        if turn == 4:
            # One rank alone has other memory: all go back to the host's way, and capture again.
            buffers[0] = torch.zeros_like(buffers[0]) if rank == 0 else buffers[0]
        wanted = []
        for buffer, request, (algorithm, op, dtype) in zip(buffers, requests, cases, strict=True):
            seed = torch.Generator().manual_seed(1000 * turn + rank)
            buffer.copy_(torch.randn(NUMEL, generator=seed).to(dtype))
            options = {"algorithm": algorithm, "segments": segments}
            wanted.append(group.all_reduce(buffer.clone(), op, **options))
            request.start(buffer if turn == 4 else None)
            # What training does meanwhile: random numbers, memory, other work.
            torch.randn(1000, device=device).add_(torch.empty(1000 << turn, device=device)[:1000])
        for request, want in zip(requests, wanted, strict=True):
            assert torch.equal(request.wait(), want), (turn, request)
        torch.cuda.synchronize()
    stages = [request._call.replay and request._call.replay.stage for request in requests]
    if size > 1:
        # By the number of the capture; the first one was captured again.
        captures = len(cases)
        assert stages == [CAPTURED + n for n in (captures + 1, *range(2, captures + 1))]
    # While the graphs are there.
    group.close()


def check_reduced_slices(transport: NcclTransport) -> None:
    """reduce_scatter and owners of Adasum are the slices of an all-reduce."""
    part = transport.split(range(transport.size), TIMEOUT)
    rank, size, device = transport.rank, transport.size, transport.device
    group = Group(part, timeout=TIMEOUT, local_rank=rank, local_size=size)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        mine = inputs(size, dtype)[rank].to(device)
        bounds = split_bounds(NUMEL, size)
        whole = group.all_reduce(mine.clone(), Adasum)
        piece = group.reduce_scatter(mine.clone(), Adasum)
        assert torch.equal(piece, whole[bounds[rank] : bounds[rank + 1]])
        ends = [0, 5, 5, 40_000, NUMEL]
        segments = [mine[low:high].clone() for low, high in pairwise(ends)]
        wanted = group.grouped_all_reduce([each.clone() for each in segments], Adasum, packed=True)
        for number, owner in enumerate(group.reduce_to_owners(segments, Adasum)):
            if owner == rank:
                assert torch.equal(segments[number], wanted[number])
    group.close()


def check_split(transport: NcclTransport) -> None:
    """The same ranks once more, on communicators of their own that are closed before the first."""
    part = transport.split(range(transport.size), TIMEOUT)
    check_order_of_streams(part)
    part.close()
    check_order_of_streams(transport)


CHECKS: dict[str, Check] = {
    name.removeprefix("check_"): value
    for name, value in list(globals().items())
    if name.startswith("check_")
}


def start(rank: int) -> NcclTransport:
    """This process's transport; ranks share GPUs where there are fewer of them."""
    size = int(os.environ["WORLD_SIZE"])
    if torch.cuda.device_count() < size:
        os.environ.update(ONE_GPU)
    torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group("gloo")
    group = dist.group.WORLD
    assert group is not None
    backend = CupyBackend()
    return NcclTransport(GlooTransport(group), backend, timeout=TIMEOUT)


def run_checks(rank: int) -> dict[str, str]:
    """Run all checks on this rank: name -> "" or the traceback."""
    transport = start(rank)
    results = dict.fromkeys(CHECKS, "not run: an earlier check failed")
    for name, check in CHECKS.items():
        try:
            check(transport)
            results[name] = ""
        except BaseException:  # noqa: BLE001 - handed to the test
            results[name] = traceback.format_exc()
            break
    transport.close()
    return results


@cache
def results_of(size: int) -> list[dict[str, str]]:
    return run_ranks(size, run_checks, timeout=150.0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("check", sorted(CHECKS))
def test_checks(size: int, check: str) -> None:
    need_nccl(size)
    failures = [f"rank {r}: {out[check]}" for r, out in enumerate(results_of(size)) if out[check]]
    assert not failures, "\n".join(failures)


def beside_another_all_reduce(rank: int) -> None:
    """Adasum by one communicator while NCCL's kernels of another wait for the other ranks.

    One rank's stream may run Adasum's kernels first and another's NCCL's: neither may keep the
    other from running. `run_ranks` ends what hangs.
    """
    transport = start(rank)
    other = transport.split(range(transport.size), TIMEOUT)
    terms, rounds = inputs(transport.size), 20
    stream = torch.cuda.Stream()

    def sums() -> None:
        torch.cuda.set_device(transport.device)
        with torch.cuda.stream(stream):
            for _ in range(rounds):
                buffer = terms[rank].to(transport.device)
                other.all_reduce(buffer, None, "a sum", TIMEOUT)
                close_to_sum(buffer, terms)

    with ThreadPoolExecutor(1) as pool:
        summed = pool.submit(sums)
        for _ in range(rounds):
            buffer = terms[rank].to(transport.device)
            all_reduce(transport, buffer, halving.all_reduce, Adasum)
            # The caller's own kernels too, which must not ask for the whole GPU here.
            alone = kernels.adasum(buffer, buffer, cooperative=False)
            error = definition.relative_error(alone.cpu(), definition.tree(terms))
            assert error <= definition.tolerance(torch.float32)
        summed.result()
    other.close()
    transport.close()


def test_adasum_beside_another_groups_all_reduce() -> None:
    need_nccl(2)
    run_ranks(2, beside_another_all_reduce, timeout=120.0)


def told_of_a_silent_peer(transport: Transport, device: torch.device) -> tuple[str, float]:
    """Rank 1 never posts: what rank 0 is told and after how long. No rank closes its transport."""
    message = Message(1 - transport.rank, torch.ones(NUMEL, device=device))
    got = Message(1 - transport.rank, torch.empty(NUMEL, device=device))
    transport.exchange([message], [got], "step 0", TIMEOUT)
    # The watcher asks no event before the first step under way is late, which for this one, that
    # makes the connection, would be in a minute.
    torch.cuda.synchronize()
    if transport.rank == 1:
        time.sleep(SHORT + 6.0)
        return "", 0.0
    begin = time.monotonic()
    transport.exchange([message], [got], "step 1", SHORT)
    # The host goes on, and CUDA blocks it until the step has been ended.
    torch.cuda.synchronize()
    with pytest.raises(CollectiveTimeoutError) as caught:
        transport.check_streams()
    return str(caught.value), time.monotonic() - begin


def check_told(told: tuple[str, float]) -> None:
    text, waited = told
    assert "rank 0 got no answer from rank 1 in step 1" in text
    assert SHORT <= waited <= SHORT + 5.0


def silent_peer(rank: int) -> tuple[str, float]:
    transport = start(rank)
    told = told_of_a_silent_peer(transport, transport.device)
    if rank == 0:
        with pytest.raises(TransportError, match="unusable since"):
            transport.exchange(
                [], [Message(1, torch.ones(1, device=transport.device))], "step 2", SHORT
            )
    return told


def test_a_silent_peer() -> None:
    need_nccl(2)
    check_told(run_ranks(2, silent_peer, timeout=120.0)[0])


def silent_launch(rank: int) -> tuple[str, float]:
    """As `silent_peer`, where rank 0 launches a graph."""
    transport = start(rank)
    buffer = torch.ones(NUMEL, device=transport.device)

    def work() -> None:
        all_reduce(transport, buffer, halving.all_reduce, Sum)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
        launch = transport.capture(work)
        launch("the first launch", TIMEOUT)
        stream.synchronize()
        if rank == 1:
            time.sleep(SHORT + 6.0)
            return "", 0.0
        begin = time.monotonic()
        launch("step 1", SHORT)
        stream.synchronize()
        with pytest.raises(CollectiveTimeoutError) as caught:
            transport.check_streams()
        waited = time.monotonic() - begin
        with pytest.raises(TransportError, match="unusable since"):
            launch("step 2", SHORT)
    return str(caught.value), waited


def test_a_silent_peer_of_a_launch() -> None:
    need_nccl(2)
    check_told(run_ranks(2, silent_launch, timeout=120.0)[0])


def no_sender(rank: int) -> tuple[str, float]:
    """A rank that waits for itself, which NCCL refuses: the error, and seconds until it came."""
    transport = start(rank)
    got = Message(rank, torch.empty(NUMEL, device=transport.device))
    begin = time.monotonic()
    with pytest.raises(TransportError) as caught:
        transport.exchange([], [got], "step 0", TIMEOUT)
    waited = time.monotonic() - begin
    with pytest.raises(TransportError, match="unusable since"):
        transport.exchange([got], [got], "step 1", TIMEOUT)
    transport.close()
    return str(caught.value), waited


def test_what_nccl_refuses_is_said_in_its_words() -> None:
    need_nccl(1)
    text, waited = run_ranks(1, no_sender, timeout=120.0)[0]
    assert "NCCL failed in step 0: NCCL_ERROR_INVALID_USAGE" in text
    assert waited <= TIMEOUT
