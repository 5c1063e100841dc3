"""How GPUs are joined and the ring that follows, over a stand-in for NVML: no GPU needed.

Not shown here: that NVML on a machine with GPUs says what fake_nvml.py does. What groups make of
it: test_place.py.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest

from collectives.bootstrap import nvlink
from collectives.bootstrap.ring_order import MOST_RANKS, ring_order
from tests.fakes import fake_nvml
from tests.fakes.fake_nvml import DGX1, HOSTBRIDGE, NODE, SINGLE, SYSTEM, FakeNvml, NVMLError, uuid

Table = list[list[int]]

DGX1_RING = (0, 3, 2, 1, 5, 6, 7, 4)
# A square of links whose sides are 0 2 1 3.
SQUARE = [[0, 0, 1, 1], [0, 0, 1, 1], [1, 1, 0, 0], [1, 1, 0, 0]]


def unlinked(size: int) -> Table:
    return [[0] * size for _ in range(size)]


def two_numa_nodes(first: Sequence[int], size: int) -> Table:
    """NVML's levels between GPUs of which `first` are on the first NUMA node."""
    return [
        [NODE if (a in first) == (b in first) else SYSTEM for b in range(size)] for a in range(size)
    ]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], Any]:
    """Puts a stand-in in pynvml's place; None: there is no pynvml."""

    def put(nvml: Any) -> Any:
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        return nvml

    return put


def order_of(nvml: FakeNvml, gpus: Sequence[str] | None = None) -> tuple[int, ...]:
    speeds = nvlink.speeds_between(gpus or [uuid(i) for i in range(nvml.size)])
    assert speeds is not None
    assert nvml.opened == nvml.closed == 1
    assert speeds == [list(column) for column in zip(*speeds, strict=True)]
    return ring_order(speeds)


def test_dgx1(use: Callable[[Any], Any]) -> None:
    assert {sum(row) for row in DGX1} == {6}, "a V100 has six links"
    hops = zip(DGX1_RING, DGX1_RING[1:] + DGX1_RING[:1], strict=True)
    assert {DGX1[a][b] for a, b in hops} == {2}, "a ring of double links joins them all"
    nvml = use(FakeNvml(DGX1, two_numa_nodes(range(4), 8)))
    assert order_of(nvml) == DGX1_RING


@pytest.mark.parametrize("size", [4, 8, 16])
def test_behind_a_switch_all_are_equal(use: Callable[[Any], Any], size: int) -> None:
    """Whatever their ways over PCIe."""
    levels = two_numa_nodes(range(0, size, 2), size)
    assert order_of(use(FakeNvml(unlinked(size), levels, switched=18))) == tuple(range(size))


def test_over_pcie_alone_numa_nodes_stay_together(use: Callable[[Any], Any]) -> None:
    first = FakeNvml(unlinked(8), two_numa_nodes(range(4), 8))
    assert order_of(use(first)) == tuple(range(8))
    mixed = FakeNvml(unlinked(8), two_numa_nodes(range(0, 8, 2), 8))
    assert order_of(use(mixed)) == (0, 1, 3, 5, 7, 2, 4, 6)


def test_nearer_over_pcie_is_faster(use: Callable[[Any], Any]) -> None:
    """Pairs 0 2 and 1 3 share a PCIe switch, 0 1 a host bridge."""
    levels = [[SYSTEM] * 4 for _ in range(4)]
    for a, b, level in ((0, 2, SINGLE), (1, 3, SINGLE), (0, 1, HOSTBRIDGE)):
        levels[a][b] = levels[b][a] = level
    assert order_of(use(FakeNvml(unlinked(4), levels))) == (0, 1, 3, 2)


@pytest.mark.parametrize(
    ("missing", "order"),
    [
        ((0, 1), (0, 2, 1, 3)),
        ((1, 2), (0, 1, 3, 2)),
        ((0, 2), (0, 1, 2, 3)),
        ((1, 3), (0, 1, 2, 3)),
    ],
)
def test_four_gpus_and_a_missing_link(
    use: Callable[[Any], Any], missing: tuple[int, int], order: tuple[int, ...]
) -> None:
    links = [[int(a != b) for b in range(4)] for a in range(4)]
    a, b = missing
    links[a][b] = links[b][a] = 0
    assert order_of(use(FakeNvml(links))) == order


def test_a_link_outweighs_a_ring_over_pcie_and_a_gpu_all_links(use: Callable[[Any], Any]) -> None:
    use(FakeNvml([[0, 1, 34], [1, 0, 0], [34, 0, 0]], [[0] * 3] * 3))
    speeds = nvlink.speeds_between([uuid(0), uuid(1), uuid(2), uuid(0)])
    assert speeds is not None
    within, many, one, board = speeds[0][3], speeds[0][2], speeds[0][1], speeds[1][2]
    assert within > many == 34 * one and one > MOST_RANKS * board


def test_two_gpus_linked_or_not(use: Callable[[Any], Any]) -> None:
    for links in ([[0, 4], [4, 0]], unlinked(2)):
        assert order_of(use(FakeNvml(links))) == (0, 1)


def test_ranks_that_share_a_gpu_are_neighbours(use: Callable[[Any], Any]) -> None:
    nvml = use(FakeNvml([[0, 2], [2, 0]]))
    assert order_of(nvml, [uuid(0), uuid(1), uuid(0), uuid(1)]) == (0, 1, 3, 2)
    nvml = use(FakeNvml(SQUARE))
    assert order_of(nvml, [uuid(3)] * 5) == (0, 1, 2, 3, 4)


def test_mig_parts_have_no_links(use: Callable[[Any], Any]) -> None:
    """Two parts of each of two linked GPUs: parts of one GPU are nearest, links are not counted."""
    nvml = use(FakeNvml([[0, 4], [4, 0]], [[0, NODE], [NODE, 0]], parts=2))
    gpus = [uuid(0, 1), uuid(1, 1), uuid(0, 2), uuid(1, 2)]
    speeds = nvlink.speeds_between(gpus)
    assert speeds is not None
    assert speeds[0][2] > speeds[0][1] == speeds[0][3] == speeds[1][2] < 100
    assert ring_order(speeds) == (0, 1, 3, 2)
    assert nvml.opened == nvml.closed == 1


def test_links_to_gpus_of_others_do_not_count(use: Callable[[Any], Any]) -> None:
    """Four of the eight GPUs, named in another order."""
    nvml = use(FakeNvml(DGX1))
    assert order_of(nvml, [uuid(i) for i in (0, 2, 1, 3)]) == (0, 2, 1, 3)


def test_a_driver_that_cannot_tell_switches_from_gpus(use: Callable[[Any], Any]) -> None:
    name = "nvmlDeviceGetNvLinkRemoteDeviceType"
    failing = {name: fake_nvml.NVMLError_FunctionNotFound}
    assert order_of(use(FakeNvml(DGX1, failing=failing))) == DGX1_RING
    levels = two_numa_nodes((0, 2), 4)
    nvml = use(FakeNvml(unlinked(4), levels, switched=6, failing=failing))
    assert order_of(nvml) == (0, 1, 3, 2)


@pytest.mark.parametrize("name", nvlink._CALLS)
def test_errors_of_nvml_are_no_errors_of_ours(use: Callable[[Any], Any], name: str) -> None:
    parts = int("Mig" in name)
    nvml = use(FakeNvml(SQUARE, parts=parts, failing={name: fake_nvml.NVMLError_GpuIsLost}))
    assert nvlink.speeds_between([uuid(i, parts) for i in range(4)]) is None
    assert nvml.closed == nvml.opened - (name == "nvmlShutdown")


def test_other_errors_are_not_hidden(use: Callable[[Any], Any]) -> None:
    class Wrong(NVMLError):
        pass

    nvml = use(FakeNvml(SQUARE, failing={"nvmlDeviceGetPciInfo": Wrong}))
    nvml.NVMLError = fake_nvml.NVMLError_NotFound
    with pytest.raises(Wrong):
        nvlink.speeds_between([uuid(0), uuid(1)])


def test_gpus_that_nvml_does_not_know(use: Callable[[Any], Any]) -> None:
    use(FakeNvml(SQUARE))
    assert nvlink.speeds_between([uuid(0), uuid(9)]) is None


@pytest.mark.parametrize("module", [None, ModuleType("pynvml")])
def test_no_nvml_or_one_that_lacks_calls(use: Callable[[Any], Any], module: Any) -> None:
    use(module)
    assert nvlink.speeds_between([uuid(0), uuid(1)]) is None


@pytest.mark.skipif(
    importlib.util.find_spec("pynvml") is None,
    reason="nvidia-ml-py is not installed: pip install nvidia-ml-py",
)
def test_the_stand_in_has_the_modules_names_and_arguments() -> None:
    import pynvml

    for name in nvlink._CALLS:
        mine = inspect.signature(getattr(FakeNvml([[0]]), name))
        assert list(mine.parameters) == list(inspect.signature(getattr(pynvml, name)).parameters)
    for name in vars(FakeNvml):
        if name.startswith("NVML_") and name != "NVML_NVLINK_MAX_LINKS":
            assert getattr(pynvml, name) == getattr(FakeNvml, name), name
        if name.startswith("NVMLError"):
            assert issubclass(getattr(pynvml, name), pynvml.NVMLError)
    assert pynvml.NVML_NVLINK_MAX_LINKS >= 18
    levels = [getattr(pynvml, f"NVML_TOPOLOGY_{name}") for name in ("SINGLE", "HOSTBRIDGE", "NODE")]
    assert [*levels, pynvml.NVML_TOPOLOGY_SYSTEM] == [SINGLE, HOSTBRIDGE, NODE, SYSTEM]
    bus = pynvml.nvmlPciInfo_t(busId=b"00000000:0A:00.0").busId
    fake = FakeNvml([[0]])
    fake.nvmlInit()
    assert bus == fake.nvmlDeviceGetPciInfo(0).busId
