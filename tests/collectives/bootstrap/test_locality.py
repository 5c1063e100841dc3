"""The place that ranks agree on at start-up, and the order of their rings where they use GPUs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch

from adasum import Adasum
from collectives import Group, Topology
from collectives.bootstrap import locality, nvlink
from collectives.transport import ThreadTransport, ThreadWorld
from tests.collectives.transport.neighbours import TIMEOUT, together
from tests.fakes.fake_cuda import FakeCuda
from tests.fakes.fake_nccl import FakeNccl
from tests.fakes.fake_nvml import DGX1, FakeNvml, uuid
from tests.fakes.nccl_machine import all_good, make_machine

T = TypeVar("T")

DGX1_RING = (0, 3, 2, 1, 5, 6, 7, 4)
NATURAL = tuple(range(8))


class Noting(ThreadTransport):
    """Notes the peers that it sends long messages to."""

    def __init__(self, world: ThreadWorld, rank: int) -> None:
        super().__init__(world, rank)
        self.peers: set[int] = set()

    def exchange(self, sends: Any, recvs: Any, step: str, timeout: float) -> None:
        self.peers |= {peer for peer, tensor in sends if tensor.dtype == torch.float64}
        super().exchange(sends, recvs, step, timeout)


class Machine:
    """Ranks as threads, eight on a host, whose GPU is that of their local rank unless changed.

    gpus: every rank's GPU, None for ranks without. told: how often each rank told all others
    something at start-up.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
        self.size = size
        self.gpus: list[str | None] = [uuid(rank % 8, rank // 8) for rank in range(size)]
        self.told = [0] * size
        monkeypatch.setattr(nvlink, "gpu_of", lambda transport: self.gpus[transport.rank])
        monkeypatch.setattr(locality, "gather_bytes", self._counted(locality.gather_bytes))

    def _counted(self, gather_bytes: Callable[..., list[bytes]]) -> Callable[..., list[bytes]]:
        def gather(data: bytes, transport: Any, *rest: Any) -> list[bytes]:
            self.told[transport.rank] += 1
            return gather_bytes(data, transport, *rest)

        return gather

    def run(self, job: Callable[[Group], T], topology: Topology | None = None) -> list[T]:
        world = ThreadWorld(self.size)

        def start(rank: int) -> T:
            transport = Noting(world, rank)
            # As init does it; with a topology by hand the hosts' names say the rest.
            local = (rank % 8, 8) if topology is None else (None, None)
            group = Group(
                transport,
                timeout=TIMEOUT,
                local_rank=local[0],
                local_size=local[1],
                topology=topology,
            )
            try:
                return job(group)
            finally:
                group.close()

        return together(*(lambda rank=rank: start(rank) for rank in range(self.size)))


def order_of(group: Group) -> tuple[int, ...]:
    return group.topology.local_order


@pytest.fixture
def dgx1(monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(DGX1))
    return Machine(monkeypatch, 8)


def test_rings_follow_the_links_of_the_gpus(dgx1: Machine) -> None:
    def job(group: Group) -> tuple[Topology, set[int], float]:
        value = torch.full((1000,), float(group.rank), dtype=torch.float64)
        group.all_reduce(value, algorithm="xring#2")
        assert torch.equal(value, torch.full_like(value, 28.0))
        assert isinstance(group.transport, Noting)
        return group.topology, group.transport.peers

    answers = dgx1.run(job)
    assert {topology for topology, _ in answers} == {Topology(8, 8, DGX1_RING)}
    after = dict(zip(DGX1_RING, DGX1_RING[1:] + DGX1_RING[:1], strict=True))
    assert [peers for _, peers in answers] == [{after[rank]} for rank in range(8)]
    assert dgx1.told == [2] * 8


def test_the_order_of_the_links_is_no_part_of_adasum(dgx1: Machine) -> None:
    """Linear Adasum over a ring goes by rank, as in every other order of the links."""
    vectors = torch.randn(8, 50, generator=torch.Generator().manual_seed(5), dtype=torch.float64)

    def job(group: Group) -> torch.Tensor:
        value = vectors[group.rank].clone()
        return group.all_reduce(value, Adasum, algorithm="xring#2")

    along = dgx1.run(job)
    natural = dgx1.run(job, Topology(8, 8))
    assert all(torch.equal(one, natural[0]) for one in along + natural)


def test_a_topology_by_hand_wins(dgx1: Machine) -> None:
    hand = Topology(8, 8, tuple(reversed(NATURAL)))
    assert dgx1.run(lambda group: group.topology, hand) == [hand] * 8
    assert dgx1.told == [1] * 8


def test_a_group_of_some_ranks_follows_their_links(dgx1: Machine) -> None:
    """Ranks 0 to 3 are joined by double links but for 0 1, 0 2 and 1 3, which are single."""

    def job(group: Group) -> tuple[int, ...] | None:
        part = group.split([1, 0, 2, 3])
        again = part and part.split([3, 2, 1, 0])
        assert part is None or (again is not None and order_of(again) == (0, 1, 3, 2))
        return part and order_of(part)

    # 1 0 3 2 in the ranks of the whole group: hops of 1, 2, 2 and 2 links.
    assert dgx1.run(job) == [(0, 1, 3, 2)] * 4 + [None] * 4


def test_gpus_need_not_be_in_the_order_of_the_ranks(dgx1: Machine) -> None:
    """As CUDA_VISIBLE_DEVICES can have it: the ranks' GPUs are the ring already."""
    dgx1.gpus = [uuid(gpu) for gpu in DGX1_RING]
    assert set(dgx1.run(order_of)) == {NATURAL}


def test_ranks_without_a_gpu_pay_nothing(dgx1: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message as ever, and NVML is not even imported; also where one rank alone has no GPU."""

    def never() -> None:
        raise AssertionError("NVML was looked for")

    monkeypatch.setattr(nvlink, "_nvml", never)
    dgx1.gpus[5] = None
    assert set(dgx1.run(order_of)) == {NATURAL}
    dgx1.gpus = [None] * 8
    assert set(dgx1.run(order_of)) == {NATURAL}
    assert dgx1.told == [2] * 8


def test_without_nvml_the_order_is_natural(dgx1: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert set(dgx1.run(order_of)) == {NATURAL}


# A DGX-1 whose first two GPUs have each other's ranks.
MIXED = [[DGX1[a ^ 1 if a < 2 else a][b ^ 1 if b < 2 else b] for b in range(8)] for a in range(8)]


@pytest.mark.parametrize(
    ("second", "order"), [(DGX1, DGX1_RING), (MIXED, NATURAL), (None, NATURAL)]
)
def test_two_nodes_must_have_one_order(
    monkeypatch: pytest.MonkeyPatch, second: list[list[int]] | None, order: tuple[int, ...]
) -> None:
    machine = Machine(monkeypatch, 16)
    tables = {uuid(0, 0): DGX1, uuid(0, 1): second}
    asked = []

    def speeds_between(gpus: list[str]) -> list[list[int]] | None:
        asked.append(gpus)
        return tables[gpus[0]]

    monkeypatch.setattr(nvlink, "speeds_between", speeds_between)
    assert machine.run(lambda group: group.topology) == [Topology(16, 8, order)] * 16
    assert sorted(asked) == [machine.gpus[:8], machine.gpus[8:]]


class _Started(FakeCuda):
    """CUDA with GPUs of which the second is the current one."""

    def __init__(self, started: bool) -> None:
        super().__init__()
        self._started = started

    def is_initialized(self) -> bool:
        return self._started

    def current_device(self) -> int:
        return 1

    def get_device_properties(self, device: int | torch.device) -> Any:
        index = device if isinstance(device, int) else device.index
        assert index is not None
        return SimpleNamespace(uuid=uuid(index))


@pytest.mark.parametrize(
    ("device", "started", "version", "gpu"),
    [
        (None, False, "13.0", None),
        (None, True, "13.0", uuid(1)),
        (torch.device("cuda", 3), True, "13.0", uuid(3)),
        (torch.device("cuda", 3), True, None, None),
    ],
)
def test_the_gpu_of_a_rank(
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device | None,
    started: bool,
    version: str | None,
    gpu: str | None,
) -> None:
    """The transport's; the current one of a process that uses CUDA; none of AMD's."""
    monkeypatch.setattr(nvlink, "cuda", _Started(started))
    monkeypatch.setattr(torch.version, "cuda", version)
    transport: Any = SimpleNamespace() if device is None else SimpleNamespace(device=device)
    assert nvlink.gpu_of(transport) == gpu


def test_a_rank_over_nccl_names_the_gpu_of_its_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wrapper's own device, over the stand-ins for CUDA and NCCL: GPU 0 for all ranks."""
    monkeypatch.setattr(nvlink, "cuda", _Started(started=False))
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(DGX1))
    machines = make_machine(monkeypatch, FakeNccl())

    def work(transport: Any) -> Any:
        found = locality.find_place(transport, TIMEOUT)
        return found.gpus, found.topology

    for machine in machines:
        assert all_good(machine.run(4, work)) == [((uuid(0),) * 4, Topology(4, 4))] * 4
