"""Measure link rates, which the cost model takes: what messages and reductions cost here.

    torchrun --nproc-per-node 4 -m bench.collectives.link_rates

All ranks measure at once, as in an all-reduce. Where every node has one rank, or where there is one
node, the rates within and between nodes are the same. The last line is the command that prices
algorithms by them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

import collectives
from bench.collectives.ranks import timed
from collectives.cost import LinkRates, Rate
from collectives.execution.executor import CallContext, Workspace, execute
from collectives.reducers import Sum, kernels
from collectives.schedules import ring

# What a message costs; what fits in the caches of a core; what does not.
_SIZES = (64, 512 << 10, 8 << 20)
# A size is measured for about so many seconds, but at the least and the most so often.
_BUDGET, _MIN_RUNS, _MAX_RUNS = 0.2, 3, 50
_NO_COST = Rate(0.0, 0.0)
Prepare = Callable[[int], Callable[[], object]]


def calibrate(group: collectives.Group, device: torch.device) -> LinkRates:
    """Measure the links and the device's reductions: rank 0's numbers, on every rank."""
    local, rank = group.topology.local_size, group.rank
    near = _message(group, range(rank - rank % local, rank - rank % local + local), device)
    far = _message(group, range(rank % local, group.size, local), device)
    rates = [_rate(group, prepare, device) for prepare in (near, far) if prepare]
    intra, inter = (rates or [_NO_COST])[0], (rates or [_NO_COST])[-1]
    reductions = (partial(_reduction, reduce, device) for reduce in (_sum, _adasum))
    return LinkRates(intra, inter, *(_rate(group, prepare, device) for prepare in reductions))


def _message(group: collectives.Group, ranks: range, device: torch.device) -> Prepare | None:
    """Return a step in which each of `ranks` sends to the next; None for a single rank."""
    if len(ranks) == 1:
        return None
    # A ring of two is as good as a longer one, and as fair to a switch.
    first = min(ranks.index(group.rank) // 2 * 2, len(ranks) - 2)
    pair = ranks[first : first + 2]
    call = CallContext(group.transport, "a measurement", group.timeout, Workspace())

    def prepare(nbytes: int) -> Callable[[], object]:
        buffer = torch.ones(2 * nbytes, dtype=torch.uint8, device=device)
        if group.rank not in pair:
            return lambda: None
        return lambda: execute(ring.all_gather(2), buffer, Sum, call, ranks=pair)

    return prepare


def _reduction(
    reduce: Callable[[Tensor, Tensor], object], device: torch.device, nbytes: int
) -> Callable[[], object]:
    return partial(reduce, *(torch.ones(nbytes // 4, device=device) for _ in range(2)))


def _sum(mine: Tensor, theirs: Tensor) -> object:
    return kernels.sum_n([mine, theirs], out=mine)


def _adasum(mine: Tensor, theirs: Tensor) -> object:
    whole = (0, mine.numel())
    dots = kernels.dot_and_norms(mine, theirs, whole)
    return kernels.combine(mine, theirs, dots, whole, out=mine)


def _rate(group: collectives.Group, prepare: Prepare, device: torch.device) -> Rate:
    """Measure prepare(bytes)'s calls, by medians: other programs use the processors, too."""
    seconds = []
    for nbytes in _SIZES:
        call = prepare(nbytes)
        call()
        once = _from_rank_0(group, timed(call, device))
        times = round(min(max(_BUDGET / max(once, 1e-9), _MIN_RUNS), _MAX_RUNS))
        median = statistics.median(timed(call, device) for _ in range(times))
        seconds.append(_from_rank_0(group, median))
    return fit(seconds)


def _from_rank_0(group: collectives.Group, number: float) -> float:
    return group.broadcast(torch.tensor([number], dtype=torch.float64)).item()


def fit(seconds: Sequence[float]) -> Rate:
    """Return the rate through the three times; what falls with the size counts as level."""
    (first, near, far), (small, knee, last) = seconds, _SIZES
    beta = max(0.0, (near - first) / (knee - small))
    beyond = max(0.0, (far - near) / (last - knee))
    return Rate(max(0.0, first - beta * small), beta, float(knee), beyond)


def main() -> None:
    """Run on every rank; rank 0 prints."""
    group = collectives.init()
    rates = calibrate(group, torch.device("cpu"))
    if group.rank == 0:
        nodes, local = group.topology.num_nodes, group.topology.local_size
        alpha, beta = (
            f"{getattr(rates.intra, part):.3g},{getattr(rates.inter, part):.3g}"
            for part in ("alpha", "beta")
        )
        print(rates)
        print(
            f"python -m collectives.cost --nodes {nodes} --local {local} --alpha {alpha} "
            f"--beta {beta} --gamma {rates.sum.beta:.3g} --host 0"
        )
    collectives.shutdown()


if __name__ == "__main__":
    main()
