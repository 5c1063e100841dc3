"""The NCCL transport when ranks are silent, NCCL fails, a part is missing or a process ends.

Over fakes that keep NCCL's rules (fake_nccl.py): no GPU needed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.bootstrap import transport_selection
from collectives.transport import Message, ThreadWorld, Transport
from collectives.transport.nccl import cupy_backend
from collectives.transport.nccl import transport as nccl
from collectives.transport.nccl.cupy_backend import CupyBackend
from tests.fakes.fake_cuda import FakeCuda, full
from tests.fakes.fake_nccl import FakeNccl
from tests.fakes.nccl_machine import (
    CLOSE_SECONDS,
    Machine,
    all_good,
    swap,
    told,
)

TIMEOUT = 0.3


def _stay_away(
    machine: Machine,
    break_it: Callable[[nccl.NcclTransport], object],
    timeout: float = TIMEOUT,
    connected: bool = True,
) -> tuple[Exception, float]:
    """Rank 0 exchanges, rank 1 does not: rank 0's error, and after how long it came."""
    done = threading.Event()

    def work(transport: nccl.NcclTransport) -> tuple[Exception, float] | None:
        if connected:
            got = full(3, 0.0)
            swap(transport, full(3, 1.0), got, "warm-up")
            machine.read(got)
        if transport.rank == 1:
            assert done.wait(20.0)
            return None
        break_it(transport)
        message = Message(1, full(3, 1.0))
        start = time.monotonic()
        try:
            try:
                transport.exchange(
                    [message], [message], "step 2 (xring) of all_reduce 'w'", timeout
                )
                error: Exception = told(transport.check_streams)
            except (CollectiveTimeoutError, TransportError) as raised:
                error = raised
            waited = time.monotonic() - start
            with pytest.raises(TransportError, match=r"step 3: .* since (.*step 2|no more)"):
                transport.exchange([message], [], "step 3", TIMEOUT)
        finally:
            done.set()
        return error, waited

    return all_good(machine.run(2, work))[0]


@pytest.mark.parametrize("connected", [True, False])
def test_timeout(machine: Machine, connected: bool) -> None:
    """The peer never posts: an abort that itself never returns does not keep the error back.

    NCCL blocks the host when it connects two ranks for the first time.
    """

    def block(transport: nccl.NcclTransport) -> None:
        if not connected:
            machine.nccl.silent_in_group_end.add(0)

    error, waited = _stay_away(machine, block, connected=connected)
    assert isinstance(error, CollectiveTimeoutError)
    assert "rank 0 got no answer from rank 1 in step 2 (xring) of all_reduce 'w'" in str(error)
    assert TIMEOUT <= waited < TIMEOUT + 5.0
    assert 0 in machine.nccl.aborted


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (2, "NCCL_ERROR_SYSTEM_ERROR: unhandled system error"),
        (6, "NCCL_ERROR_REMOTE_ERROR: remote process exited or there was a network error"),
        (7, "status 7, ncclInProgress"),
        (8, "status 8, ncclTimeout"),
        (9, "status 9, unknown to cupy"),
    ],
)
def test_errors_have_nccls_text(machine: Machine, status: int, text: str) -> None:
    """An error of a call: the group is ended all the same, and the communicator aborted."""
    error, _ = _stay_away(machine, lambda _: machine.nccl.fail_send.update({0: status}))
    assert isinstance(error, TransportError)
    assert f"NCCL failed in step 2 (xring) of all_reduce 'w': {text}" in str(error)
    assert 0 in machine.nccl.aborted


@pytest.mark.parametrize(("status", "text"), [(6, "remote process exited"), (8, "ncclTimeout")])
def test_asynchronous_errors(machine: Machine, status: int, text: str) -> None:
    def report(transport: nccl.NcclTransport) -> None:
        found = next(iter(machine.nccl.cliques.values()))
        threading.Timer(0.1, found.errors.update, [{0: status}]).start()

    error, waited = _stay_away(machine, report, timeout=10.0)
    assert isinstance(error, TransportError) and text in str(error)
    assert waited < 5.0
    assert 0 in machine.nccl.aborted


def test_interrupt_from_any_thread_ends_what_is_under_way(machine: Machine) -> None:
    """Its communicator is aborted, and whoever waits is told why."""

    def interrupt(transport: nccl.NcclTransport) -> None:
        threading.Timer(0.1, transport.interrupt, ["no more"]).start()

    error, waited = _stay_away(machine, interrupt, 20.0)
    assert isinstance(error, TransportError) and "no more" in str(error)
    assert waited < 10.0 and 0 in machine.nccl.aborted


@pytest.mark.parametrize("present", [0, 1])
def test_a_rank_that_never_starts(machine: Machine, present: int) -> None:
    """Rank 0 cannot hand over NCCL's id, or the others get none; both give up in time."""
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError) as caught:
        nccl.NcclTransport(ThreadWorld(2).transport(present), CupyBackend(), timeout=TIMEOUT)
    assert TIMEOUT <= time.monotonic() - start < TIMEOUT + 5.0
    assert f"rank {1 - present}" in str(caught.value) and "start-up" in str(caught.value)


def test_a_rank_that_starts_too_late(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The communicator that the first rank no longer waits for is aborted when it comes."""
    made, first = machine.nccl.NcclCommunicator, threading.Event()

    def make(size: int, name: bytes, rank: int) -> Any:
        if rank == 1:
            assert first.wait(20.0)
        return made(size, name, rank)

    monkeypatch.setattr(machine.nccl, "NcclCommunicator", make)
    world = ThreadWorld(2)

    def starts() -> nccl.NcclTransport:
        return nccl.NcclTransport(world.transport(1), CupyBackend(), timeout=10.0)

    with futures.ThreadPoolExecutor(1) as pool:
        started = pool.submit(starts)
        with pytest.raises(CollectiveTimeoutError, match="no answer from rank 1 in start-up"):
            nccl.NcclTransport(world.transport(0), CupyBackend(), timeout=0.2)
        first.set()
        late = started.result(20.0)
    late.exchange([Message(0, full(1, 1.0))], [], "step 1", 0.2)
    error = told(late.check_streams)
    assert isinstance(error, CollectiveTimeoutError) and "from rank 0 in step 1" in str(error)
    assert machine.nccl.aborted == {0, 1}


def test_close_is_bounded_where_a_rank_never_closes(machine: Machine) -> None:
    first = threading.Event()

    def work(transport: nccl.NcclTransport) -> float:
        if transport.rank == 1:
            assert first.wait(20.0)
            return 0.0
        start = time.monotonic()
        transport.close()
        waited = time.monotonic() - start
        first.set()
        with pytest.raises(TransportError, match="closed"):
            transport.exchange([Message(1, full(1, 1.0))], [], "a test", 1.0)
        return waited

    assert CLOSE_SECONDS <= all_good(machine.run(2, work))[0] < 5.0


def test_device_errors_name_the_fix(machine: Machine) -> None:
    def work(transport: nccl.NcclTransport) -> None:
        transport.check_device(torch.device("cuda", 0))
        with pytest.raises(
            ValueError, match=r"on cuda:1, .* on cuda:0: move it there, or .*set_device"
        ):
            transport.check_device(torch.device("cuda", 1))
        with pytest.raises(ValueError, match=r"on meta, .* carries tensors on cuda:0: move it"):
            transport.check_device(torch.device("meta"))

    all_good(machine.run(1, work))
    for wrong in ("cpu", "cuda"):
        with pytest.raises(ValueError, match=r'device must be .* "cuda:0", got'):
            CupyBackend(torch.device(wrong))


def test_ranks_with_the_same_gpu_are_told_so() -> None:
    """As where each has the first one: NCCL says no more than that its usage is invalid."""
    transport_selection._check_gpus([("", "a", False), ("", "b", False)])
    transport_selection._check_gpus([("", "a", True), ("", "a", True)])
    with pytest.raises(TransportError, match="rank 1: NCCL needs a GPU"):
        transport_selection._check_gpus([("", "a", False), ("NCCL needs a GPU", "", False)])
    with pytest.raises(TransportError, match=r"ranks 0 and 2 .* GPU, a: .*set_device\(.* init"):
        transport_selection._check_gpus([("", "a", False), ("", "b", False), ("", "a", False)])


def test_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_backend, "cuda", FakeCuda(available=False))
    with pytest.raises(RuntimeError, match="install a CUDA build of torch"):
        cupy_backend.load_nccl()
    monkeypatch.setattr(cupy_backend, "cuda", FakeCuda())
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    for name in ("cupy", "cupy.cuda"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as none:
        cupy_backend.load_nccl()
    assert str(none.value).endswith(': pip install "cupy-cuda12x>=14.2" nvidia-nccl-cu12')
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    package: Any = ModuleType("cupy")
    module: Any = ModuleType("cupy.cuda")
    monkeypatch.setitem(sys.modules, "cupy", package)
    monkeypatch.setitem(sys.modules, "cupy.cuda", module)
    for package.__version__, major, has in (
        ("14.1.0", 13, True),
        ("14.2.0rc1", 12, True),
        ("14.2.0", 13, False),
    ):
        module.nccl = SimpleNamespace(available=has)
        module.runtime = SimpleNamespace(runtimeGetVersion=lambda major=major: 1000 * major + 90)
        with pytest.raises(ImportError) as unfit:
            cupy_backend.load_nccl()
        assert str(unfit.value) == (
            "NCCL through cupy needs cupy for CUDA 13 only, and NCCL (found: "
            f"cupy-cuda{major}x {package.__version__}, {'an' if has else 'no'} NCCL): "
            'pip install "cupy-cuda13x>=14.2" nvidia-nccl-cu13'
        )
    module.nccl = FakeNccl()
    assert cupy_backend.load_nccl() is module.nccl
    # Each id costs a thread and a socket for good.
    assert module.nccl.get_unique_id()[0] == 0


def test_a_split_that_fails_leaves_nothing_open_on_the_host(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(transport: nccl.NcclTransport) -> list[str]:
        closed: list[str] = []
        split_host = transport._host.split

        def split(ranks: tuple[int, ...], timeout: float) -> Transport:
            host = split_host(ranks, timeout)
            monkeypatch.setattr(host, "close", lambda: closed.append("host"))
            return host

        def fail(host: Transport) -> CupyBackend:
            raise TransportError("NCCL failed")

        monkeypatch.setattr(transport._host, "split", split)
        monkeypatch.setattr(transport._backend, "split", fail)
        with pytest.raises(TransportError, match="NCCL failed"):
            transport.split([1, 0], 10.0)
        return closed

    assert all_good(machine.run(2, work)) == [["host"], ["host"]]
