"""How ranks find each other in a store: all there, one missing, what was left by those before."""

from __future__ import annotations

import errno
import secrets
import socket
import sys
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives import CollectiveTimeoutError, TransportError
from collectives.bootstrap import launchers, rendezvous
from collectives.bootstrap.rendezvous import (
    agree_on_backend,
    bounded,
    open_store,
    wait_for_ranks,
)
from tests.collectives.transport.thread_ranks import together
from tests.processes.harness import free_port, listening

linux = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's table of sockets")


def store() -> Any:
    return dist.HashStore()


def meet_all(shared: Any, ranks: list[int], size: int) -> list[str]:
    """Each rank's part of the store, told by what rank 0 writes there."""

    def run(rank: int) -> str:
        part = wait_for_ranks(shared, rank, size, 10.0)
        if rank == 0:
            part.set("place", secrets.token_hex(8))
        part.wait(["place"], timedelta(seconds=10))
        return part.get("place").decode()

    return together(*(lambda rank=rank: run(rank) for rank in ranks))


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_meet_in_one_place(size: int) -> None:
    assert len({*meet_all(store(), [*range(size)], size)}) == 1


def test_each_start_has_a_place_of_its_own() -> None:
    shared = store()
    places = [meet_all(shared, [0, 1, 2], 3) for _ in range(4)]
    assert [len({*each}) for each in places] == [1] * 4
    assert len({each[0] for each in places}) == 4


def test_what_dead_ranks_wrote_is_not_taken_for_them() -> None:
    """A rank of the start before had come and ended, the others had not come."""
    shared = store()
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 could not start: rank 0, rank 2 did"):
        wait_for_ranks(shared, 1, 3, 0.1)
    with pytest.raises(CollectiveTimeoutError, match=r"rank 1 did not come within 0\.2 s"):
        together(
            lambda: wait_for_ranks(shared, 0, 3, 0.2), lambda: wait_for_ranks(shared, 2, 3, 0.2)
        )
    assert len({*meet_all(shared, [0, 1, 2], 3)}) == 1


def test_a_store_that_has_ended() -> None:
    class Ended:
        def set(self, key: str, value: str) -> None:
            raise dist.DistNetworkError("Connection reset by peer\nC++ stack")

    with pytest.raises(
        CollectiveTimeoutError, match=r"rank 3 could not start: the store.*reset by peer$"
    ):
        wait_for_ranks(Ended(), 3, 4, 1.0)  # type: ignore[arg-type]


def test_a_start_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(CollectiveTimeoutError, match=r"rank 2 could not start within 0\.1 s"):
        bounded(lambda: time.sleep(1.0), 2, 0.1)

    def fail() -> None:
        raise KeyError("its own")

    with pytest.raises(KeyError, match="its own"):
        bounded(fail, 2, 10.0)
    bounded(lambda: None, 2, 10.0)


def place_store(monkeypatch: pytest.MonkeyPatch, host: str, port: int) -> None:
    """Have rank 0 keep the store at an address."""
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)


def test_the_store_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    place_store(monkeypatch, "127.0.0.1", port)
    with pytest.raises(CollectiveTimeoutError, match=rf"rank 1 got no answer.*127.0.0.1:{port}"):
        open_store(1, 0.2)
    first = open_store(0, 5.0)
    first.set("key", "value")
    assert open_store(1, 5.0).get("key") == b"value"


def test_a_host_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 was told that something else listens there."""
    place_store(monkeypatch, "nowhere.invalid", free_port())
    for rank in range(2):
        with pytest.raises(
            CollectiveTimeoutError, match=rf"rank {rank} got no.*nowhere\.invalid.*Errno"
        ):
            open_store(rank, 0.5)


def test_a_port_that_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        place_store(monkeypatch, "127.0.0.1", other.getsockname()[1])
        with pytest.raises(TransportError, match=r"rank 0 cannot listen on .*MASTER_PORT"):
            open_store(0, 2.0)


def test_hosts_with_unequal_numbers_of_gpus_have_one_backend(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank with NCCL would wait for one that has none; a later start asks again."""
    able: dict[int, str | None] = {0: "", 1: None, 2: ""}
    monkeypatch.setattr(rendezvous, "gpu_for_nccl", lambda rank, size: able[rank])

    def backends() -> list[str]:
        return together(
            *(lambda rank=rank: agree_on_backend(shared, rank, 3, 10.0) for rank in able)
        )

    shared = store()
    assert backends() == ["gloo"] * 3
    able[1] = ""
    assert backends() == ["cpu:gloo,cuda:nccl"] * 3
    # As where a launcher shows each rank a GPU of its own, and where two ranks see the same one.
    able |= {0: "a", 1: "b", 2: ""}
    assert backends() == ["cpu:gloo,cuda:nccl"] * 3
    able[1] = "a"
    assert backends() == ["gloo"] * 3
    with pytest.raises(CollectiveTimeoutError, match=r"rank 0 could not start: rank 1, rank 2 did"):
        agree_on_backend(shared, 0, 3, 0.2)


def test_gpu_that_nccl_needs_for_a_rank_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def gpu(number: int) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"gpu-{number}")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpu)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    assert launchers.gpu_for_nccl(5, 9) == ""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert launchers.gpu_for_nccl(5, 9) == "gpu-1"
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert launchers.gpu_for_nccl(6, 9) == "gpu-0"
    monkeypatch.delenv("LOCAL_RANK")
    assert launchers.gpu_for_nccl(7, 9) == "gpu-1"
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    assert launchers.gpu_for_nccl(5, 9) == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert launchers.gpu_for_nccl(5, 9) is None


@linux
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_our_own_store_listens_at_the_masters_address_alone(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    place_store(monkeypatch, host, port)
    store = open_store(0, 5.0)
    assert listening(port) == {f"0100007F:{port:04X}"}
    open_store(1, 5.0).set("key", "value")
    # A second one, or torch's own, goes to the same.
    assert open_store(0, 5.0).get("key") == b"value"
    del store


@linux
@pytest.mark.parametrize("host", ["elsewhere", "a name"])
def test_master_that_is_a_name_or_no_address_of_the_host_listens_everywhere(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a Kubernetes Service, or a name that other hosts know by another address."""

    def elsewhere(*_: Any, **__: Any) -> socket.socket:
        raise OSError(errno.EADDRNOTAVAIL, "Cannot assign requested address")

    port = free_port()
    # The address works all the same here.
    place_store(monkeypatch, "127.0.0.1" if host == "elsewhere" else socket.gethostname(), port)
    if host == "elsewhere":
        monkeypatch.setattr(socket, "create_server", elsewhere)
    store = open_store(0, 5.0)
    assert listening(port) in ({f"{'0' * 32}:{port:04X}"}, {f"{'0' * 8}:{port:04X}"})
    del store
