"""What `auto` stands for, of sums, trees, gathers and reductions to one rank."""

from __future__ import annotations

import pytest
import torch

from adasum import Adasum
from collectives import Group, Sum, run_threads
from collectives.cost import ASSUMED, LinkRates, Rate, estimate
from collectives.execution.phases import auto_of, phases_of
from collectives.reducers import Needs
from collectives.schedules import copying, ring
from collectives.schedules.auto import (
    PAIRS_BYTES,
    STEP_BYTES,
    all_gather_schedule,
    reduce_schedule,
    sum_algorithm,
    tree_algorithm,
)
from collectives.schedules.levels import schedule_of
from collectives.schedules.topology import Topology
from collectives.tree_order import in_order

TOPOLOGIES = [
    Topology(size, local) for size in range(2, 18) for local in range(1, 9) if not size % local
]
# TCP between hosts at 1 Gbit/s, by bench.collectives.link_rates on two cores of an AMD EPYC.
TCP = LinkRates(
    Rate(2.1e-4, 4.8e-10, 512 * 1024, 1.7e-9),
    Rate(4.2e-4, 8.0e-9),
    *[Rate(2e-5, 3.2e-11)] * 2,
    nic=8.0e-9,
    call=8.4e-4,
)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_size_on_all_ranks_has_an_algorithm_that_runs_there(device: str) -> None:
    tree_sum = in_order(Sum, "tree")
    for topology in TOPOLOGIES:
        for power in range(0, 40, 3):
            spec = sum_algorithm(device, 1 << power, topology)
            assert spec.limit == -1
            assert schedule_of(spec, topology).size == topology.size
            for op in (Adasum, tree_sum):
                spec = auto_of(op, device, 1 << power, topology)
                assert phases_of(spec, op, topology).schedule is not None


@pytest.mark.parametrize(("device", "rates", "most"), [("cpu", TCP, 2.3), ("cuda", ASSUMED, 2.3)])
def test_auto_of_sums_is_near_the_best_schedule_by_the_cost_model(
    device: str, rates: LinkRates, most: float
) -> None:
    for topology in TOPOLOGIES:
        names = ["rd", "rechd", "xring"]
        if 1 not in (topology.num_nodes, topology.local_size):
            names += ["rechd/rd", "rechd/rechd", "xring/xring"]
        for power in range(10, 29, 2):
            chosen = str(sum_algorithm(device, 1 << power, topology))
            prices = {
                name: estimate(name, 1 << power, rates, topology).seconds
                for name in {*names, chosen}
            }
            assert prices[chosen] <= most * min(prices.values()), (topology, power, chosen)


def test_ranks_of_uneven_nodes_reduce_on_one_level() -> None:
    topology = Topology(3, 1, uneven=((0, 1), (2,)))
    assert {sum_algorithm("cpu", 1 << power, topology).inner for power in range(40)} == {None}


def test_a_librarys_own_sum_has_the_callers_name() -> None:
    for topology in TOPOLOGIES:
        assert sum_algorithm("cuda", 1 << 25, topology, "collective").alg == "collective"
        assert "nccl" not in str(sum_algorithm("cuda", 1 << 25, topology))


def test_trees_of_few_ranks_meet_at_once_at_any_size() -> None:
    for nbytes in (1, 1 << 30):
        for size in range(3, 17):
            assert {str(tree_algorithm(d, nbytes, size)) for d in STEP_BYTES} == {"direct"}
            assert (
                str(auto_of(Adasum, "cpu", nbytes, Topology(size, size)))
                == Adasum.algorithm(nbytes, size)
                == "direct"
            )
    for size in (2, 17):
        assert {str(tree_algorithm(d, 1 << 18, size)) for d in STEP_BYTES} == {"rd"}
        assert str(tree_algorithm("cpu", 1 << 30, size)) == "vhdd"


@pytest.mark.parametrize("topology", [Topology(8, 8), Topology(6, 1), Topology(1, 1)])
def test_all_gather_on_links_that_are_alike_takes_log_n_steps_of_any_length(
    topology: Topology,
) -> None:
    for nbytes in (0, 1, 1 << 40):
        assert all_gather_schedule("cpu", nbytes, topology) is copying.all_gather(topology.size)


def test_all_gather_of_many_bytes_on_two_levels_is_a_ring() -> None:
    topology, most = Topology(16, 4), STEP_BYTES["cpu"]
    assert all_gather_schedule("cpu", most, topology) is copying.all_gather(16)
    assert all_gather_schedule("cpu", most + 1, topology) is ring.all_gather(16)
    assert all_gather_schedule("cuda", 1 << 40, topology) is copying.all_gather(16)


def test_reduce_goes_in_pairs_up_to_where_its_memory_counts() -> None:
    def name(nbytes: int, needs: Needs) -> str:
        return reduce_schedule(nbytes, 1, 4, needs).name

    assert name(PAIRS_BYTES, Needs.ANY_ORDER) == "rechd reduce"
    assert name(PAIRS_BYTES + 1, Needs.ANY_ORDER) == "xring reduce"
    assert name(1 << 40, Needs.BALANCED_TREE) == "rechd reduce"
    assert name(0, Needs.BALANCED_TREE | Needs.ALL_OPERANDS) == "direct reduce"


def test_reduce_of_a_large_tensor_needs_one_nth_of_it_as_extra_memory() -> None:
    """And never more than the tensor: contract N + N/n."""

    def main(group: Group) -> list[int]:
        taken = []
        take = group._runner.workspace.take

        def noted(numel: int, like: torch.Tensor) -> torch.Tensor:
            taken.append(numel * like.element_size())
            return take(numel, like)

        group._runner.workspace.take = noted  # type: ignore[method-assign]
        peaks = []
        for numel in (1000, 4 * 1024 * 1024):
            taken.clear()
            group.reduce(torch.ones(numel), dst=2)
            peaks.append(max(taken, default=0))
        return peaks

    for small, large in run_threads(4, main):
        assert small <= 4 * 1000
        assert large <= 4 * 1024 * 1024
