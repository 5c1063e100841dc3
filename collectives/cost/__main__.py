"""What every algorithm would cost on a machine, as a table and a plot.

    python -m collectives.cost --nodes 128 --local 8 --bytes 256M
    python -m collectives.cost --topology machine.toml --bytes 64M --op adasum --plot cost.png

Rates are seconds and seconds a byte; unless given they are assumptions about H100 nodes, which the
heading repeats. A two-level algorithm with Adasum averages inside nodes: that computes something
else than Adasum over all ranks, so its time is no reason to prefer it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from collectives.cost import (
    ASSUMED,
    OPS,
    Cost,
    LinkRates,
    Rate,
    estimate,
    read_topology,
    with_rates,
)
from collectives.schedules.spec import parse_general_int
from collectives.schedules.topology import Topology

__all__ = ["algorithms", "main", "plot", "table"]

_Row = tuple[str, str, Cost]


def algorithms(op: str, topology: Topology) -> list[str]:
    """Return the algorithms that the table has rows for unless told otherwise."""
    size, local, nodes = topology.size, topology.local_size, topology.num_nodes
    halving = "vhdd" if op == "adasum" else "rechd"
    names = ["xring", halving, "rd", "psgpu"]
    if local > 1:
        names += [f"xring#{local}", f"psgpu#{local}"]
    elif size > 1:
        names.append(f"psgpu#{min(size, 8)}")
    if local > 1 and nodes > 1:
        inners = ("xring", "rechd", f"psgpu#{local}")
        names += [f"{inner}/{outer}" for inner in inners for outer in ("xring", halving, "rd")]
    return names


def table(
    topology: Topology,
    rates: LinkRates,
    nbytes: int,
    ops: Sequence[str],
    names: Sequence[str] | None,
    segments: int,
) -> list[str]:
    """Return a Markdown table, by operator, the fastest first."""
    lines = [
        f"{topology.num_nodes} nodes of {topology.local_size} ranks, {_bytes(nbytes)} a rank",
        _rates_line(rates),
        "",
        "| op | algorithm | time | steps | between nodes | busiest node | peak memory |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for op in ops:
        rows = [
            (name, estimate(name, nbytes, rates, topology, op, segments))
            for name in names or algorithms(op, topology)
        ]
        for name, cost in sorted(rows, key=lambda row: row[1].seconds):
            cells = [
                op,
                name,
                _seconds(cost.seconds),
                str(cost.steps),
                _bytes(cost.inter),
                _bytes(cost.busiest_inter),
                _bytes(cost.memory),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def plot(
    path: str,
    topology: Topology,
    rates: LinkRates,
    nbytes: int,
    ops: Sequence[str],
    names: Sequence[str] | None,
    segments: int,
) -> None:
    """Write time over bytes, from 1 KiB to four times nbytes, one panel an operator."""
    from matplotlib.figure import Figure

    top = max(4 * nbytes, 1 << 12)
    sizes = [1 << k for k in range(10, top.bit_length())]
    figure = Figure(figsize=(7 * len(ops), 5), layout="constrained")
    for axis, op in zip(figure.subplots(1, len(ops), squeeze=False)[0], ops, strict=True):
        for name in names or algorithms(op, topology):
            costs = [estimate(name, size, rates, topology, op, segments) for size in sizes]
            axis.plot(sizes, [cost.seconds for cost in costs], label=name)
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("bytes")
        axis.set_ylabel("seconds")
        axis.set_title(f"{op} on {topology.num_nodes} x {topology.local_size} ranks (model)")
        axis.legend(fontsize=7)
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options, print the table, write the plot."""
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        topology, rates = _machine(args)
        ops = OPS if args.op == "all" else (args.op,)
        names = args.algorithms.split(",") if args.algorithms else None
        common = (topology, rates, parse_general_int(args.bytes), ops, names, args.segments)
        print("\n".join(table(*common)))
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if args.plot:
        try:
            plot(args.plot, *common)
        except ModuleNotFoundError:
            sys.exit("--plot needs matplotlib: pip install matplotlib")
        except (OSError, ValueError) as error:
            parser.error(f"--plot: {error}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m collectives.cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nodes", type=int, help="nodes (1)")
    parser.add_argument("--local", type=int, help="ranks a node (1)")
    parser.add_argument("--bytes", default="64M", help="of a rank's buffer, such as 256M (64M)")
    parser.add_argument("--op", default="all", choices=[*OPS, "all"])
    parser.add_argument("--algorithms", metavar="SPEC,...", help='such as "xring#2,rechd/vhdd"')
    parser.add_argument("--segments", type=int, default=1, help="tensors, for Adasum (1)")
    parser.add_argument("--topology", metavar="FILE", help=".json or .toml, see cost/link_rates.py")
    for name, about in (("alpha", "seconds a message"), ("beta", "seconds a byte")):
        text = f"{about}: inside a node and between nodes, or one for both"
        parser.add_argument(f"--{name}", metavar="INTRA[,INTER]", help=text)
    about = "seconds a byte of summing; Adasum takes 2.5 times that"
    parser.add_argument("--gamma", type=float, help=about)
    about = "seconds a byte of the network adapter that the ranks of a node share"
    parser.add_argument("--nic", type=float, help=about)
    parser.add_argument("--plot", metavar="FILE", help="time over bytes, as an image")
    return parser


def _machine(args: argparse.Namespace) -> tuple[Topology, LinkRates]:
    topology, rates = read_topology(args.topology) if args.topology else (Topology(1, 1), ASSUMED)
    nodes = topology.num_nodes if args.nodes is None else args.nodes
    local = topology.local_size if args.local is None else args.local
    if nodes < 1 or local < 1:
        raise ValueError(f"--nodes and --local must be at least 1, got {nodes} and {local}")
    if args.segments < 1:
        raise ValueError(f"--segments must be at least 1, got {args.segments}")
    kinds = {"intra": rates.intra, "inter": rates.inter}
    for part in ("alpha", "beta"):
        text = getattr(args, part)
        if text:
            for name, value in zip(kinds, _one_or_two(f"--{part}", text), strict=True):
                kinds[name] = kinds[name]._replace(**{part: value})
    given: dict[str, Rate | float] = dict(kinds)
    if args.gamma is not None:
        given["sum"] = rates.sum._replace(beta=args.gamma)
    if args.nic is not None:
        given["nic"] = args.nic
    return Topology(nodes * local, local), with_rates(rates, given)


def _one_or_two(option: str, text: str) -> tuple[float, float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{option} must be one or two numbers, got {text!r}") from None
    if len(values) > 2:
        raise ValueError(f"{option} must be one or two numbers, got {text!r}")
    return values[0], values[-1]


def _rates_line(rates: LinkRates) -> str:
    kind = "assumed" if rates == ASSUMED else "given"
    parts = []
    for name, value in vars(rates).items():
        if isinstance(value, Rate):
            parts.append(f"{name} {value.alpha * 1e6:.4g} µs + {_bandwidth(value.beta)}")
            if value.far:
                parts[-1] += f" ({_bandwidth(value.far)} beyond {_bytes(value.knee)})"
        elif value:
            parts.append(f"{name} {value:.4g} s")
    return f"{kind}: {', '.join(parts)}"


def _bandwidth(beta: float) -> str:
    return f"{1e-9 / beta:.4g} GB/s" if beta else "no time a byte"


def _seconds(value: float) -> str:
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def _bytes(value: float) -> str:
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if value >= 1 << (10 * power):
            return f"{value / (1 << (10 * power)):.4g} {unit}"
    return f"{value:.4g} B"


if __name__ == "__main__":
    main()
