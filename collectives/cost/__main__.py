"""What every algorithm would cost on a machine, as a table, and the best specification for it.

    python -m collectives.cost --nodes 128 --local 8 --bytes 256M
    python -m collectives.cost --nodes 2 --alpha 3e-6,20e-6 --beta 2e-12,1e-10 --op adasum
    python -m collectives.cost --local 8 --host 0
    python -m collectives.cost --nodes 2 --local 4 --algorithms auto,rd:16k:rechd,xring#4
    python -m collectives.cost --table

Rates are seconds and seconds a byte; unless given they are assumptions about H100 nodes, which the
heading repeats; the ranks are 8 on one node. `nccl` is the price of NCCL's own sum. A two-level
algorithm with Adasum averages inside nodes: that computes something else than Adasum over all
ranks, so its time is no reason to prefer it. The specifications below the table, of up to 1,024
ranks and among schedules of the same mathematics, are what `algorithm=` takes where these rates are
yours: their limits count elements of 4 bytes.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from collectives import validation
from collectives.cost import ASSUMED, OPS, LinkRates, Rate, estimate
from collectives.cost.library import library_cost
from collectives.cost.thresholds import best_specification, order_table, table, tree_table
from collectives.schedules.spec import parse_general_int
from collectives.schedules.topology import Topology

_MOST_RANKS = 1024
# A rank of `direct` sends to all others, but for Adasum: of many that is dear, and takes long to
# price. So do its levels.
_MOST_DIRECT = {"sum": 64, "adasum": _MOST_RANKS}


def algorithms(op: str, topology: Topology) -> list[str]:
    """Return the algorithms that the table has rows for unless asked for others."""
    size, local, nodes = topology.size, topology.local_size, topology.num_nodes
    halving = "vhdd" if op == "adasum" else "rechd"
    names = ["xring", halving, "rd", "psgpu"]
    if size <= _MOST_DIRECT[op]:
        names.append("direct")
    if local > 1:
        names += [f"xring#{local}", f"psgpu#{local}"]
    elif size > 1:
        names.append(f"psgpu#{min(size, 8)}")
    if local > 1 and nodes > 1:
        inners = ("xring", "rechd", f"psgpu#{local}")
        names += [f"{inner}/{outer}" for inner in inners for outer in ("xring", halving, "rd")]
    return names


def costs(
    topology: Topology,
    rates: LinkRates,
    nbytes: int,
    ops: Sequence[str],
    names: Sequence[str] | None,
    segments: int,
    device: str = "cuda",
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
            (name, estimate(name, nbytes, rates, topology, op, segments, device))
            for name in names or algorithms(op, topology)
        ]
        if op == "sum" and not names:
            rows.append(("nccl", library_cost(nbytes, rates, topology)))
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
    # Their steps are priced at many sizes, which of so many ranks takes minutes.
    if not names and topology.size <= _MOST_RANKS:
        lines.append("")
        lines += [f'{op}: algorithm="{best_specification(op, rates, topology)}"' for op in ops]
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    """Parse the options and print the table."""
    parser = argparse.ArgumentParser(prog="python -m collectives.cost", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nodes", type=int, help="nodes (1)")
    parser.add_argument("--local", type=int, help="ranks a node (8, of several nodes 1)")
    parser.add_argument("--bytes", default="64M", help="of a rank's buffer, such as 256M (64M)")
    parser.add_argument("--op", default="all", choices=[*OPS, "all"])
    parser.add_argument(
        "--algorithms", metavar="SPEC,...", help='such as "auto,xring#2,rechd/vhdd"'
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="of auto (cuda)")
    parser.add_argument("--segments", type=int, default=1, help="tensors in the buffer (1)")
    for name, about in (("alpha", "seconds a message"), ("beta", "seconds a byte")):
        text = f"{about}: inside a node and between nodes, or one for both"
        parser.add_argument(f"--{name}", metavar="INTRA[,INTER]", help=text)
    parser.add_argument("--gamma", type=float, help="seconds a byte of a sum; Adasum's are 1.9")
    parser.add_argument("--host", type=float, metavar="SECONDS", help="of the host, a step")
    parser.add_argument("--table", action="store_true", help="print the table of `auto` instead")
    args = parser.parse_args(argv)
    if args.table:
        tables = ("TABLE", table()), ("TREE_TABLE", tree_table()), ("ORDER_TABLE", order_table())
        for name, made in tables:
            rows = (f"    {key}: {text!r},".replace("'", '"') for key, text in made.items())
            print(f"{name} = {{", *rows, "}", sep="\n")
        return
    try:
        topology, rates = _machine(args)
        ops = OPS if args.op == "all" else (args.op,)
        names = args.algorithms.split(",") if args.algorithms else None
        nbytes = parse_general_int(args.bytes)
        lines = costs(topology, rates, nbytes, ops, names, args.segments, args.device)
        print("\n".join(lines))
    except ValueError as error:
        parser.error(str(error))


def _machine(args: argparse.Namespace) -> tuple[Topology, LinkRates]:
    if args.local is None:
        args.local = 8 if args.nodes is None else 1
    args.nodes = 1 if args.nodes is None else args.nodes
    for option in ("nodes", "local", "segments"):
        validation.integer(f"--{option}", getattr(args, option), 1)
    intra, inter = ASSUMED.intra, ASSUMED.inter
    for part in ("alpha", "beta"):
        if text := getattr(args, part):
            inside, between = _one_or_two(f"--{part}", text)
            intra, inter = intra._replace(**{part: inside}), inter._replace(**{part: between})
    host = ASSUMED.host if args.host is None else args.host
    rates = replace(ASSUMED, intra=intra, inter=inter, host=host)
    if args.gamma is not None:
        plain, adasum = (factor * args.gamma for factor in (1.0, 1.9))
        rates = replace(
            rates, sum=rates.sum._replace(beta=plain), adasum=rates.adasum._replace(beta=adasum)
        )
    return Topology(args.nodes * args.local, args.local), rates


def _one_or_two(option: str, text: str) -> tuple[float, float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if len(values) not in (1, 2):
        raise ValueError(f"{option} must be one or two numbers, got {text!r}")
    return values[0], values[-1]


def _rates_line(rates: LinkRates) -> str:
    kind = "assumed" if rates == ASSUMED else "given"
    parts = []
    for name, value in vars(rates).items():
        if isinstance(value, Rate):
            parts.append(f"{name} {value.alpha * 1e6:.4g} µs + {_bandwidth(value.beta)}")
    return f"{kind}: {', '.join(parts)}, host {rates.host * 1e6:.4g} µs a step"


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
