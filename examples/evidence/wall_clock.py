"""Seconds of a step on a machine that is not here: measured computing, and modelled messages.

Simulated ranks cannot show a wall clock. A step of n ranks takes what one batch took on one core,
its median over all trainings on one rank, and what the library's cost model says of the reduction
(`collectives.cost`): one rank a node, on links of 20 microseconds and 10 Gbit/s. The first has the
optimizer's own step in it, of which a rank takes one under the delta method, too.
"""

from __future__ import annotations

from collections.abc import Sequence

from collectives.cost import LinkRates, Rate, estimate
from collectives.schedules.topology import Topology
from evidence.cells import Cell
from evidence.methods import METHODS

_LINK = Rate(alpha=20e-6, beta=8e-10)
# What is received is reduced at 10 GB/s, at half of that by Adasum, which reads everything twice.
MACHINE = LinkRates(intra=_LINK, inter=_LINK, sum=Rate(1e-6, 1e-10), adasum=Rate(1e-6, 2e-10))


def seconds_a_step(cell: Cell, batch_seconds: float, segments: Sequence[int]) -> float:
    """Return the modelled seconds of one of the cell's steps; `segments` are the layers' sizes."""
    if cell.ranks == 1:
        return batch_seconds
    op = "adasum" if METHODS[cell.method].op == "adasum" else "sum"
    spec = "vhdd" if op == "adasum" else "rechd"
    nbytes = 4 * sum(segments)
    topology = Topology(cell.ranks, 1)
    cost = estimate(spec, nbytes, MACHINE, topology, op, len(segments))
    return batch_seconds + cost.seconds / cell.local_steps
