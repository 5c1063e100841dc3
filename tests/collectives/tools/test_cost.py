"""The cost model against arithmetic."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from collectives.cost import LinkRates, Rate, estimate, one_launch
from collectives.schedules import copying, ring
from collectives.schedules.topology import Topology
from collectives.tools.commands import cost as main

RATES = LinkRates(Rate(3e-6, 2e-12), Rate(1.4e-5, 2e-11), Rate(2e-6, 1e-12), Rate(7e-6, 3e-12))
SHARED = replace(RATES, nic=1e-11, call=1e-4)


def _flat(text: str, size: int, nbytes: float, op: str = "sum", segments: int = 1) -> float:
    return estimate(text, nbytes, RATES, Topology(size, size), op, segments).seconds


@pytest.mark.parametrize("size", [2, 4, 8, 64, 128])
def test_one_level_costs_what_its_arithmetic_says(size: int) -> None:
    nbytes = float(1 << 20)
    (alpha, beta), (call, gamma) = RATES.intra[:2], RATES.sum[:2]
    levels = size.bit_length() - 1
    moved = nbytes * (size - 1) / size
    assert _flat("xring", size, nbytes) == pytest.approx(
        2 * (size - 1) * alpha + 2 * moved * beta + (size - 1) * call + moved * gamma
    )
    assert _flat("rechd", size, nbytes) == pytest.approx(
        2 * levels * alpha + 2 * moved * beta + levels * call + moved * gamma
    )
    assert _flat("rd", size, nbytes) == pytest.approx(
        levels * (alpha + call + nbytes * (beta + gamma))
    )
    others = size - 1
    assert _flat("psgpu", size, nbytes) == pytest.approx(
        2 * others * (alpha + nbytes * beta) + call + others * nbytes * gamma
    )


def test_adasum_costs_its_dot_products() -> None:
    nbytes, segments = float(1 << 20), 100
    (alpha, beta), (call, gamma) = RATES.intra[:2], RATES.adasum[:2]
    dots = alpha + RATES.sum.alpha + 24 * segments * (beta + RATES.sum.beta)
    for levels in (1, 2, 3, 6):
        size = 1 << levels
        moved = nbytes * (size - 1) / size
        # The level of distance d sums its dots over 2d ranks: one step, then two, three, ...
        assert _flat("vhdd", size, nbytes, "adasum", segments) == pytest.approx(
            2 * levels * alpha
            + 2 * moved * beta
            + levels * call
            + moved * gamma
            + dots * levels * (levels + 1) / 2
        )
        assert _flat("rd", size, nbytes, "adasum", segments) == pytest.approx(
            levels * (alpha + call + nbytes * (beta + gamma))
        )


def test_n_way_adasum_costs_its_pairs() -> None:
    nbytes, size = float(1 << 20), 8
    (alpha, beta), (call, gamma) = RATES.intra[:2], RATES.adasum[:2]
    others = size - 1
    assert _flat("psgpu", size, nbytes, "adasum") == pytest.approx(
        2 * others * (alpha + nbytes * beta) + others * (call + nbytes * gamma)
    )


def test_bytes_and_memory_are_what_the_algorithms_say() -> None:
    nbytes = 1 << 20
    topology = Topology(16, 4)
    ring_cost = estimate("xring", nbytes, RATES, topology)
    total = 2 * 15 * nbytes
    assert ring_cost.intra + ring_cost.inter == pytest.approx(total)
    assert ring_cost.inter == pytest.approx(total / 4)
    assert ring_cost.busiest_inter == pytest.approx(total / 16)
    assert ring_cost.memory == pytest.approx(nbytes / 16)
    halving = estimate("rechd", nbytes, RATES, topology)
    assert halving.intra + halving.inter == pytest.approx(total)
    # Distances 4 and 8 cross nodes: 1/8 and 1/16 of the buffer, twice, of all 16 ranks.
    assert halving.inter == pytest.approx(2 * 16 * nbytes * (1 / 8 + 1 / 16))
    assert halving.memory == pytest.approx(nbytes / 2)
    doubling = estimate("rd", nbytes, RATES, topology)
    assert doubling.busiest_inter == pytest.approx(2 * 4 * nbytes)
    assert doubling.memory == nbytes
    two = estimate("xring/xring", nbytes, RATES, topology)
    assert two.busiest_inter == pytest.approx(2 * 3 / 4 * nbytes)
    assert estimate("psgpu", nbytes, RATES, topology).memory == 15 * nbytes
    # One rank of each node is on the wire; two levels put all of them there, on 1/4 each.
    assert ring_cost.seconds > two.seconds


def test_ranks_of_a_node_share_its_adapter() -> None:
    nbytes = float(1 << 30)
    topology = Topology(8, 4)
    own = estimate("rd", nbytes, RATES, topology)
    shared = estimate("rd", nbytes, replace(RATES, nic=RATES.inter.beta), topology)
    # Of rd's three steps the last crosses nodes, with four ranks on each side.
    assert shared.seconds - own.seconds == pytest.approx(3 * nbytes * RATES.inter.beta)


@pytest.mark.parametrize("size", [2, 3, 8, 16])
def test_adasum_by_direct_costs_its_passes_and_an_exchange_of_tables(size: int) -> None:
    """A Gram matrix and a blend of n slices, and tables of n x n pairs of float64 a segment."""
    nbytes, segments, others = float(1 << 20), 100, size - 1
    (alpha, beta), (call, gamma) = RATES.intra[:2], RATES.adasum[:2]
    piece, table = nbytes / size, 16.0 * size * size * segments
    # Five units of traffic are those of a pair: both read twice, and one written.
    passes = call + (2 * size + 1) / 5 * piece * gamma
    tables = others * alpha + 2 * RATES.sum.alpha
    tables += others * table * (beta + RATES.sum.beta)
    seconds = 2 * others * (alpha + piece * beta) + passes + tables
    cost = estimate("direct", nbytes, RATES, Topology(size, size), "adasum", segments)
    assert cost.seconds == pytest.approx(seconds)
    assert (cost.steps, cost.memory) == (2, pytest.approx(others * piece))
    assert cost.busiest_intra == pytest.approx(others * (2 * piece + table))


def test_other_schedules_can_be_walked() -> None:
    topology = Topology(6, 3)
    for steps in (ring.reduce_scatter(6), ring.all_gather(6), copying.broadcast(6, 2)):
        assert estimate(steps, 600, RATES, topology).intra > 0
    with pytest.raises(ValueError, match="schedule is for 6 ranks, topology has 4"):
        estimate(ring.all_gather(6), 1, RATES, Topology(4, 2))


def test_algorithms_without_steps_are_refused() -> None:
    topology = Topology(4, 2)
    for text in ("nccl", "collective/xring"):
        with pytest.raises(ValueError, match="has no schedule"):
            estimate(text, 1, RATES, topology)
    with pytest.raises(ValueError, match='device must be "cpu" or "cuda", got None'):
        estimate("auto", 1, RATES, topology)
    with pytest.raises(ValueError, match="op must be 'sum' or 'adasum'"):
        estimate("rd", 1, RATES, topology, "max")
    with pytest.raises(ValueError, match="intra must be finite"):
        replace(RATES, intra=Rate(-1.0, 0.0))


def test_command_without_arguments_compares_algorithms_on_a_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    main([])
    said = capsys.readouterr().out
    assert "1 node of 8 ranks, 64 MiB a rank" in said
    assert len(re.findall(r"^\| sum \| \S+ \| [\d.]+ (?:µs|ms)", said, re.M)) >= 7


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["--nodes", "4", "--local", "8", "--bytes", "1M"]
    main(command)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "4 nodes of 8 ranks, 1 MiB a rank"
    assert lines[1].startswith("assumed rates: messages in a node 3.4e-06 s + 2.22e-12 s/byte, ")
    sums = [line for line in lines if line.startswith("| sum |")]
    assert len(sums) == 18
    assert any("| rechd/rechd |" in line for line in sums)
    # In levels, of 8 nodes and of 4.
    assert any("| direct |" in line for line in lines if line.startswith("| adasum |"))

    main([*command, "--alpha", "1e-6", "--beta", "0,0", "--algorithms", "rd"])
    out = capsys.readouterr().out
    # Five steps of 1 µs, a launch of 3 µs and the host's 60 µs each; to sum 1 MiB takes 0.94 µs.
    assert "given rates: " in out and "| sum | rd | 325 µs | 5 |" in out
    for wrong, text in (
        (["--bytes", "1x"], "'1x' is not a positive integer"),
        (["--alpha", "1,2,3"], "argument --alpha: invalid _pair value: '1,2,3'"),
        (["--nodes", "-2"], "--nodes must be at least 1"),
        (["--nodes", "0"], "--nodes must be at least 1"),
        (["--host", "-1"], "host must be finite seconds and not negative"),
        (["--algorithms", "bogus"], "bogus"),
    ):
        with pytest.raises(SystemExit):
            main([*command, *wrong])
        assert text in capsys.readouterr().err


@pytest.mark.parametrize("copied", [False, True])
def test_one_launch_costs_its_link_waits_and_copies(copied: bool) -> None:
    nbytes, size = float(1 << 20), 8
    (alpha, beta), gamma = RATES.intra[:2], RATES.adasum.beta
    received = nbytes * (size - 1) / size
    seconds = 3 * alpha + 2 * received * beta + RATES.sum.alpha + received * gamma * 17 / 35
    # In and out: two of a sum's three accesses, each.
    seconds += 2 * (RATES.sum.alpha + nbytes * RATES.sum.beta * 2 / 3) if copied else 0.0
    cost = one_launch(nbytes, RATES, Topology(size, size), "adasum", copied=copied)
    assert cost.seconds == pytest.approx(seconds)
    assert cost.busiest_intra == 2 * received
    slower = one_launch(nbytes, replace(RATES, launch=1e-3), Topology(size, size), "adasum")
    assert slower.seconds >= cost.seconds + 0.9e-3


@pytest.mark.parametrize("op", ["sum", "adasum"])
def test_launches_on_nodes_cost_two_and_the_messages_of_slices(op: str) -> None:
    nbytes, local = float(1 << 20), 8
    rates = replace(RATES, host=2e-4, launch=1e-4)
    alone = one_launch(nbytes, rates, Topology(local, local), op)
    cost = one_launch(nbytes, rates, Topology(2 * local, local), op, segments=50)
    (near, _), (far, beta) = RATES.intra[:2], RATES.inter[:2]
    start, gamma = getattr(RATES, op)[:2]
    # `rd` of one slice, a second launch, and for Adasum one that adds up dot products.
    seconds = rates.host + far + start + nbytes / local * (beta + gamma)
    seconds += rates.launch + RATES.sum.alpha + 2 * near
    seconds += rates.launch + RATES.sum.alpha + near if op == "adasum" else 0.0
    assert cost.seconds == pytest.approx(alone.seconds + seconds)
    assert (cost.steps, cost.inter) == (3, 2 * nbytes)
    assert cost.busiest_intra == alone.busiest_intra
    # The messages among 3 nodes are those of `auto`, of Adasum with tables between all ranks.
    assert one_launch(nbytes, rates, Topology(6, 2), op).steps == (4 if op == "adasum" else 5)


def test_table_of_gpus_has_rows_for_launches_and_names_the_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ADASUM_NODE_MEMORY", raising=False)
    for options, rows, default in (
        ([], 4, "sum by one launch, adasum by one launch"),
        (["--bytes", "256M"], 4, "sum by NCCL's own sum, adasum by direct"),
        (["--nodes", "2", "--local", "3"], 2, "sum by launches with messages in between, "),
        (["--nodes", "2"], 0, "sum by NCCL's own sum, adasum by vhdd"),
        (["--device", "cpu"], 0, "sum by the host's shared memory, "),
        (["--device", "cpu", "--nodes", "4", "--op", "sum"], 0, "sum by rechd."),
    ):
        main(options)
        out = capsys.readouterr().out
        assert out.count("in place |") + out.count("copied |") == rows
        assert f"By default: {default}" in out
