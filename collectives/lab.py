"""Schedules to look at: drawn, listed, priced and simulated before anything runs.

It stands above the cost model, which knows only the plain data of `schedules/schedule.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Literal

from collectives import validation
from collectives.cost import ASSUMED, Cost, LinkRates, check_op
from collectives.cost.simulation import chrome_trace
from collectives.cost.walker import walk
from collectives.schedules import drawing, levels
from collectives.schedules import schedule as plain
from collectives.schedules.auto import range_for
from collectives.schedules.registry import algorithm
from collectives.schedules.topology import topology_of


@dataclass(frozen=True)
class Schedule(plain.Schedule):
    """A collective over `size` ranks on a buffer of `chunks` nearly equal pieces.

    Attributes:
        name: How errors and traces call it.
        size: Number of ranks.
        chunks: Number of pieces.
        collective: What it computes.
        steps: Generates the steps of a rank, equally many for every rank.
        root: The rank that a broadcast comes from and a reduce goes to.
        whole_segments: Whether chunk boundaries must lie on segment boundaries, so that a rank that
            reduces a chunk holds whole segments.
        replicas: Each run of this many consecutive ranks starts with the same contribution (their
            node's).
        gathered: Whether the steps copy every rank's whole vector to every rank, which at the end
            reduces all of them in one n-way pass in rank order. The chunks are then those of all
            vectors, rank 0's first; each rank starts with its own.
        nodes: How many equal runs of consecutive ranks share a host, in pictures, prices and
            traces. A run does not ask.
        op: What prices and traces reduce with, "sum" or "adasum"; where steps have two phases,
            the first one sums. A run does not ask.

    Raises:
        TypeError: A field has another type.
        ValueError: A field has no meaning with the others.

    Examples:
        >>> collectives.schedule("rd", 4).table().splitlines()[0]
        'rd: ranks 4, steps 2, chunks 1'
    """

    nodes: int = 1
    op: Literal["sum", "adasum"] = "sum"

    def __post_init__(self) -> None:
        super().__post_init__()
        topology_of(self.size, self.nodes)
        check_op(self.op)

    def draw(self, axes: Any = None, *, title: str | None = None) -> Any:
        """Draw the messages: time from left to right, a line a rank, an arrow a message.

        Args:
            axes: Axes of matplotlib (the extra `plots`) to draw on. None makes an SVG,
                for which nothing has to be installed.
            title: What stands above; None for name, ranks and nodes.

        Returns:
            The axes, or the text of the SVG, which notebooks show as a picture.
        """
        if title is None:
            on = f" on {self.nodes} nodes" if self.nodes > 1 else ""
            title = f"{self.name}, {self.size} rank{'s' if self.size > 1 else ''}{on}"
        if axes is not None:
            if not hasattr(axes, "annotate"):
                raise TypeError(f"axes must be axes of matplotlib, got {type(axes).__name__}")
            return drawing.plot(self, axes, title)
        return drawing.svg(self, self.nodes, title)

    def table(self) -> str:
        """Return what each rank sends and receives in each step, as text, a line a step and rank.

        Steps and chunks are numbered from 0, as in errors.
        """
        return drawing.table(self)

    def cost(self, nbytes: float, rates: LinkRates = ASSUMED, segments: int = 1) -> Cost:
        """Return what the cost model says of a run.

        Args:
            nbytes: Length of each rank's buffer.
            rates: The machine; nodes of H100 GPUs by assumption, not by measurement.
            segments: How many tensors lie in the buffer, which Adasum projects on their own.
        """
        validation.nbytes(nbytes)
        validation.integer("segments", segments, 1)
        topology = topology_of(self.size, self.nodes)
        return walk(self, topology, self._reductions()).cost(nbytes, rates, segments)

    def trace(self, nbytes: float, rates: LinkRates = ASSUMED, segments: int = 1) -> str:
        """Return the run that the cost model has in mind, as JSON in Chrome's trace format.

        Perfetto (ui.perfetto.dev) and chrome://tracing open it: a process a node, a thread a rank,
        a slice a step with its messages. Its end is the time that `cost` says. Arguments as there.
        """
        validation.nbytes(nbytes)
        validation.integer("segments", segments, 1)
        topology = topology_of(self.size, self.nodes)
        return chrome_trace(self, topology, self._reductions(), nbytes, rates, segments)

    def _reductions(self) -> tuple[str, ...]:
        """Return what the phases of the steps reduce with."""
        ranks = range(self.size if self.op == "adasum" else 0)
        two = any(step.phase for rank in ranks for step in plain.steps_of(self, rank))
        return ("sum", self.op) if two else (self.op,)


def schedule(
    spec: str,
    size: int,
    nodes: int = 1,
    *,
    op: Literal["sum", "adasum"] = "sum",
    nbytes: float | None = None,
    device: str | None = None,
) -> Schedule:
    """Return the schedule that runs for a specification, to be drawn, priced, simulated or run.

    ::

        ring = collectives.schedule("xring#2", 8, nodes=2)
        ring.draw(), ring.table(), ring.cost(1e6).seconds, ring.trace(1e6)

    Args:
        spec: As for `algorithm` of `Group.all_reduce`; limits count elements of 4 bytes.
        size: Number of ranks.
        nodes: How many equal runs of consecutive ranks share a host.
        op: "sum", which stands for Average and others without an order, too; or "adasum", whose
            order is a part of the answer.
        nbytes: Length of each rank's buffer, where the specification goes by it.
        device: Of "auto": "cpu" or "cuda". What is returned are the messages; sums on GPUs leave
            most sizes to NCCL where it is there, and ranks that share memory reduce in it.

    Raises:
        TypeError: An argument has another type.
        ValueError: It is no specification, goes by what is not given, does not fit the ranks or the
            operator, or is a library's algorithm, whose steps are not known.

    Examples:
        >>> schedule = collectives.schedule("xring", 8, nodes=2)
        >>> schedule.cost(nbytes=1 << 20).steps
        14
        >>> schedule.draw().startswith("<svg")
        True
    """
    topology = topology_of(size, nodes)
    check_op(op)
    chosen = range_for(spec, topology, nbytes, device, one_tree=op == "adasum")
    if chosen.inner is not None and algorithm(chosen.inner).is_library:
        raise ValueError(f"{chosen.inner!r} is no schedule, so its steps are not known")
    found = levels.schedule_of(chosen, topology, one_tree=op == "adasum")
    made = {each.name: getattr(found, each.name) for each in fields(found)}
    # Two levels on one node reduce inside it alone, where Adasum's operands are averaged.
    inside = chosen.inner is not None and nodes == 1
    return Schedule(**made | {"name": str(chosen)}, nodes=nodes, op="sum" if inside else op)
