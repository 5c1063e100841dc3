"""What `auto` stands for, of sums, gathers and reductions to one rank."""

from __future__ import annotations

import pytest
import torch

from collectives import Group, run_threads
from collectives.schedules import binomial_tree, bruck, ring
from collectives.schedules.auto import (
    BRUCK_BYTES,
    TREE_BYTES,
    all_gather_schedule,
    reduce_schedule,
    sum_algorithm,
)
from collectives.schedules.levels import schedule_of
from collectives.schedules.topology import Topology

TOPOLOGIES = [
    Topology(size, local) for size in range(2, 18) for local in range(1, 9) if not size % local
]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_every_size_on_all_ranks_has_an_algorithm_that_runs_there(device: str) -> None:
    for topology in TOPOLOGIES:
        for power in range(0, 40, 3):
            spec = sum_algorithm(device, 1 << power, topology)
            assert spec.limit == -1
            assert schedule_of(spec, topology).size == topology.size


def test_ranks_of_uneven_nodes_reduce_on_one_level() -> None:
    topology = Topology(3, 1, uneven=((0, 1), (2,)))
    assert {sum_algorithm("cpu", 1 << power, topology).inner for power in range(40)} == {None}


def test_a_librarys_own_sum_has_the_callers_name() -> None:
    for topology in TOPOLOGIES:
        assert sum_algorithm("cuda", 1 << 25, topology, "collective").alg == "collective"
        assert "nccl" not in str(sum_algorithm("cuda", 1 << 25, topology))


@pytest.mark.parametrize("topology", [Topology(8, 8), Topology(6, 1), Topology(1, 1)])
def test_all_gather_on_links_that_are_alike_takes_log_n_steps_of_any_length(
    topology: Topology,
) -> None:
    for nbytes in (0, 1, 1 << 40):
        assert all_gather_schedule("cpu", nbytes, topology) is bruck.all_gather(topology.size)


def test_all_gather_of_many_bytes_on_two_levels_is_a_ring() -> None:
    topology, most = Topology(16, 4), BRUCK_BYTES["cpu"]
    assert all_gather_schedule("cpu", most, topology) is bruck.all_gather(16)
    assert all_gather_schedule("cpu", most + 1, topology) is ring.all_gather(16)
    assert all_gather_schedule("cuda", most + 1, topology) is bruck.all_gather(16)


def test_reduce_goes_by_a_tree_up_to_where_its_memory_counts() -> None:
    assert reduce_schedule(TREE_BYTES, 1, 4) is binomial_tree.reduce(4, 1)
    assert reduce_schedule(TREE_BYTES + 1, 1, 4) is ring.reduce(4, 1)


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
