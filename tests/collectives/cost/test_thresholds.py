"""The specifications that the model makes, and the table of `auto`, which it made."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from collectives.cost import ASSUMED, LinkRates, Rate, estimate, thresholds
from collectives.cost.__main__ import main
from collectives.cost.library import library_cost
from collectives.cost.thresholds import (
    RECORDED,
    best_specification,
    bruck_bytes,
    candidates,
    order_table,
    table,
    tree_bytes,
    tree_table,
)
from collectives.schedules import auto
from collectives.schedules.auto import BRUCK_BYTES, TREE_BYTES, sum_algorithm
from collectives.schedules.spec import parse_all_reduce_spec, spec_for
from collectives.schedules.topology import Topology

RATES = LinkRates(Rate(1e-4, 1e-9), Rate(1e-4, 1e-9), Rate(1e-5, 1e-10), Rate(1e-5, 3e-10))
SIZES = [1 << power for power in range(12, 28)]


def test_small_rows_of_the_table_are_what_the_model_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that 2 to 7 ranks have to themselves: the row of 4 is one of larger powers, too."""
    few = [each for each in thresholds._topologies() if each.size in (2, 3, 5, 6, 7)]
    monkeypatch.setattr(thresholds, "_topologies", lambda: iter(few))
    monkeypatch.setattr(thresholds, "_more_ranks", lambda: iter(()))
    rows = {auto.key_of(device, each) for each in few for device in ("cpu", "cuda", "nccl")}
    tables = (
        (table(), auto.TABLE),
        (tree_table(), auto.TREE_TABLE),
        (order_table(), auto.ORDER_TABLE),
    )
    for made, written in tables:
        assert made == {key: text for key, text in written.items() if key in rows}
        assert len(made) >= 10


@pytest.mark.slow
def test_the_table_of_auto_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    """And what the model makes of the rates that are recorded."""
    main(["--table"])
    written = Path(auto.__file__).read_text(encoding="utf-8")
    tables = re.findall(r"^(\w+) = (\{.*?^\}\n)", capsys.readouterr().out, re.MULTILINE | re.DOTALL)
    assert [name for name, _ in tables] == ["TABLE", "TREE_TABLE", "ORDER_TABLE"]
    for name, printed in tables:
        assert ast.literal_eval(printed) == getattr(auto, name)
        assert f"{name}: dict[Key, str] = {printed}" in written


@pytest.mark.parametrize("device", ["cuda", pytest.param("cpu", marks=pytest.mark.slow)])
def test_limits_of_gathers_and_reductions_are_what_the_model_makes(device: str) -> None:
    assert (tree_bytes(device), bruck_bytes(device)) == (TREE_BYTES, BRUCK_BYTES[device])


@pytest.mark.parametrize(
    ("hosts", "most"), [(2, 1.15), (3, 1.15), (4, 1.15), (8, 1.2), (5, 1.45), (6, 1.3), (7, 1.2)]
)
def test_auto_between_hosts_is_near_the_best_on_either_link(hosts: int, most: float) -> None:
    """On 5 to 8 hosts no algorithm is within 1.15 on both links at 256 KiB, for one."""
    topology = Topology(hosts, 1)
    for rates in RECORDED["cpu"]:
        for nbytes in SIZES:
            prices = {
                name: estimate(name, nbytes, rates, topology).seconds
                for name in candidates("sum", topology)
            }
            chosen = str(sum_algorithm("cpu", nbytes, topology))
            assert prices[chosen] <= most * min(prices.values()), (nbytes, chosen)


@pytest.mark.parametrize("size", [1 << power for power in range(1, 14)])
def test_a_bucket_goes_to_the_library_on_2_to_8192_ranks(size: int) -> None:
    for local in {1, min(size, 8)}:
        chosen = sum_algorithm("cuda", 25 << 20, Topology(size, local), "collective")
        assert str(chosen) == "collective"


def test_a_small_sum_of_two_gpus_is_one_exchange() -> None:
    topology = Topology(2, 2)
    assert str(sum_algorithm("cuda", 1 << 20, topology, "nccl")) == "rd"
    # The ring's second hop, 3.4 µs, is what the kernel that adds takes for 3.8 MB.
    one, other = (
        cost.seconds
        for cost in (
            estimate("rd", 1 << 20, ASSUMED, topology),
            library_cost(1 << 20, ASSUMED, topology),
        )
    )
    assert one < other


def test_candidates_have_one_mathematics() -> None:
    one, two = Topology(8, 8), Topology(8, 4)
    assert candidates("adasum", one) == candidates("adasum", two) == ("rd", "vhdd", "direct")
    assert candidates("adasum", one) == candidates("adasum", Topology(17, 1))
    assert candidates("adasum", Topology(2, 2)) == ("rd", "vhdd")
    assert candidates("sum", one) == candidates("sum", Topology(8, 1)) == ("rd", "rechd", "xring")
    assert {"rechd/rd", "xring/xring"} < {*candidates("sum", two)}


@pytest.mark.parametrize(
    "topology", [Topology(2, 2), Topology(7, 7), Topology(8, 1), Topology(12, 3)], ids=str
)
@pytest.mark.parametrize("op", ["sum", "adasum"])
@pytest.mark.parametrize("rates", [RATES, ASSUMED, RECORDED["cpu"][0]])
def test_best_specification_is_the_cheapest_at_every_size(
    op: str, rates: LinkRates, topology: Topology
) -> None:
    specs = parse_all_reduce_spec(best_specification(op, rates, topology, 1))
    names = candidates(op, topology)
    for nbytes in SIZES:
        prices = {name: estimate(name, nbytes, rates, topology, op).seconds for name in names}
        # Fewer ranges, or less memory, are worth a twentieth.
        assert prices[str(spec_for(specs, nbytes))] <= 1.05 * min(prices.values())


def _ranges(op: str, rates: LinkRates, topology: Topology, itemsize: int) -> Sequence[object]:
    return parse_all_reduce_spec(best_specification(op, rates, topology, itemsize))


def test_best_specification_counts_elements() -> None:
    topology = Topology(8, 8)
    by_byte, by_float = (_ranges("sum", RATES, topology, itemsize) for itemsize in (1, 4))
    assert by_byte[0] == ("rd", 1, 128 << 10) and by_float[0] == ("rd", 1, 32 << 10)
    assert best_specification("adasum", RATES, topology).startswith("rd:")
