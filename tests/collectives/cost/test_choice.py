"""Which schedule a gather and a reduction to one rank take, and what they need."""

from __future__ import annotations

import pytest
import torch

from collectives import Group, run_threads
from collectives.cost import ASSUMED, LinkRates, Rate, walk
from collectives.cost.choice import TREE_BYTES, all_gather_schedule, reduce_schedule
from collectives.schedules import binomial_tree, bruck, ring
from collectives.schedules.topology import Topology

# The ranks of a node share its adapter, where Bruck's bytes queue.
RATE = Rate(1e-6, 1e-10)
FAR = LinkRates(RATE, RATE, RATE, RATE, nic=1e-10)


def seconds(schedule: object, nbytes: float, rates: LinkRates, topology: Topology) -> float:
    return walk(schedule, topology).cost(nbytes, rates).seconds  # type: ignore[arg-type]


@pytest.mark.parametrize("topology", [Topology(8, 8), Topology(6, 1), Topology(1, 1)])
def test_all_gather_on_links_that_are_alike_takes_log_n_steps_of_any_length(
    topology: Topology,
) -> None:
    for nbytes in (0, 1, 1 << 40):
        assert all_gather_schedule(nbytes, FAR, topology) is bruck.all_gather(topology.size)


def test_all_gather_on_two_levels_is_the_cheaper_one() -> None:
    topology = Topology(16, 4)
    both = bruck.all_gather(16), ring.all_gather(16)
    taken = set()
    for power in range(4, 34, 3):
        chosen = all_gather_schedule(2.0**power, FAR, topology)
        costs = [seconds(each, 2.0**power, FAR, topology) for each in both]
        assert seconds(chosen, 2.0**power, FAR, topology) == pytest.approx(min(costs))
        taken.add(chosen.name)
    assert len(taken) == 2
    # Without rates by the assumed ones, in which a step costs most.
    assert all_gather_schedule(1e3, None, topology) is both[0]


@pytest.mark.parametrize("topology", [Topology(8, 8), Topology(16, 4), Topology(2, 2)])
def test_reduce_is_the_cheaper_one_up_to_where_the_trees_memory_counts(topology: Topology) -> None:
    size = topology.size
    tree, line = binomial_tree.reduce(size, 1), ring.reduce(size, 1)
    for rates in (FAR, ASSUMED):
        for power in range(4, 31, 2):
            chosen = reduce_schedule(1 << power, 1, rates, topology)
            if 1 << power > TREE_BYTES:
                assert chosen is line
                continue
            costs = [seconds(each, 2.0**power, rates, topology) for each in (tree, line)]
            # The line's pipeline is priced as if it were always full, which is a little more.
            got = seconds(chosen, 2.0**power, rates, topology)
            assert got <= costs[0] and got <= costs[1] * 1.5
    assert reduce_schedule(1 << 16, 1, None, topology) is tree
    assert reduce_schedule((1 << 16) + 1, 1, None, topology) is line


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
