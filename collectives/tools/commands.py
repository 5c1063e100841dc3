"""The commands `python -m collectives.schedules` and `python -m collectives.cost`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from collectives import validation
from collectives.schedules.spec import parse_general_int
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify
from collectives.tools.cost import (
    ASSUMED,
    OPS,
    LinkRates,
    default_of,
    estimate,
    one_launch,
    runs_in_launches,
)
from collectives.tools.lab import Schedule, schedule

_SCHEDULES = """Draw, list, price, prove and simulate the schedule of an algorithm's specification.

    python -m collectives.schedules draw xring#2 8 --nodes 2 -o ring.svg
    python -m collectives.schedules table rechd 4
    python -m collectives.schedules cost xring,rechd,auto 8 --bytes 64M
    python -m collectives.schedules verify rechd/vhdd 8 --nodes 2
    python -m collectives.schedules trace direct 4 --op adasum --bytes 16M -o run.json

draw: an SVG. table: each rank's messages by step. cost: the cost model's table, for one or several
specifications with commas in between, at the assumed rates of H100 nodes. verify: a proof for all
ranks. trace: the timeline by the cost model, for ui.perfetto.dev.
"""
_COST = """Print a table of the time of every algorithm on a machine, by the cost model.

    python -m collectives.cost --nodes 16 --local 8 --bytes 256M
    python -m collectives.cost --nodes 2 --alpha 3e-6,20e-6 --beta 2e-12,1e-10 --op adasum
    python -m collectives.cost --nodes 2 --local 4 --algorithms auto,rd:16k:rechd,xring#4

Rates are in seconds and seconds per byte; the defaults are assumptions about H100 nodes, with 8
ranks on one node. A two-level algorithm averages inside nodes before Adasum, so its result differs
from Adasum over all ranks. NCCL's own sum has no schedule here, so its cost is unknown. Launches
are by GPUs that share memory within their node; "copied" if the tensors lie elsewhere. --host 0 is
for a host that is ahead of its GPU.
"""
# With `psgpu` and `direct` every rank sends to all others, and rings have as many steps: with more
# ranks these rows take long to price.
_MOST_RANKS = 64


def schedules(argv: Sequence[str] | None = None) -> None:
    """Run `python -m collectives.schedules`."""
    parser = _parser("schedules", _SCHEDULES)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("spec", metavar="SPEC", help='such as xring#2, rechd/vhdd, "rd:16k:rechd"')
    parser.add_argument("size", metavar="SIZE", type=int, help="number of ranks")
    parser.add_argument("--nodes", type=int, default=1, help="hosts, with equally many ranks (1)")
    parser.add_argument("--op", choices=OPS, default="sum", help="operator (sum)")
    parser.add_argument("--bytes", default="1M", help="size of each rank's buffer (1M)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write to this file")
    args = parser.parse_args(argv)
    try:
        args.nbytes = parse_general_int(args.bytes)
    except ValueError as error:
        parser.error(f"argument --bytes: {error}")
    try:
        validation.integer("--segments", args.segments, 1)
        text = COMMANDS[args.command](args)
    except (ValueError, ScheduleError) as error:
        parser.error(f"{args.command} {args.spec} {args.size}: {error}")
    try:
        if args.output is None:
            sys.stdout.write(text)
        else:
            args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"argument -o: {error}")


def _schedule(args: argparse.Namespace, spec: str | None = None) -> Schedule:
    options = {"op": args.op, "nbytes": args.nbytes, "device": args.device}
    return schedule(spec or args.spec, args.size, args.nodes, **options)


def _priced(args: argparse.Namespace) -> str:
    names = args.spec.split(",")
    found = [_schedule(args, name) for name in names]
    topology = Topology(args.size, args.size // args.nodes)
    lines = costs(topology, ASSUMED, args.nbytes, (args.op,), names, args.segments, args.device)
    pairs = zip(names, found, strict=True)
    said = [f"{name}: {each.name}" for name, each in pairs if name != each.name]
    return "\n".join([*lines, *([""] if said else []), *said]) + "\n"


def _verify(args: argparse.Namespace) -> str:
    return f"{args.spec} on {args.size} ranks is {verify(_schedule(args))}\n"


COMMANDS: dict[str, Callable[[argparse.Namespace], str]] = {
    "draw": lambda args: _schedule(args).draw(),
    "table": lambda args: _schedule(args).table(),
    "cost": _priced,
    "verify": _verify,
    "trace": lambda args: _schedule(args).trace(args.nbytes, segments=args.segments) + "\n",
}


def cost(argv: Sequence[str] | None = None) -> None:
    """Run `python -m collectives.cost`."""
    parser = _parser("cost", _COST)
    parser.add_argument("--nodes", type=int, help="nodes (1)")
    parser.add_argument("--local", type=int, help="ranks per node (8, or 1 with --nodes)")
    parser.add_argument("--bytes", default="64M", help="size of each rank's buffer (64M)")
    parser.add_argument("--op", default="all", choices=[*OPS, "all"])
    parser.add_argument("--algorithms", metavar="SPEC,...", help='such as "auto,rechd/vhdd"')
    for name, about in (("alpha", "seconds per message"), ("beta", "seconds per byte")):
        text = f"{about}: inside a node and between nodes, or one for both"
        parser.add_argument(f"--{name}", type=_pair, metavar="INTRA[,INTER]", help=text)
    parser.add_argument(
        "--gamma", type=float, help="seconds per byte of a sum; 1.9 times for Adasum"
    )
    parser.add_argument("--host", type=float, metavar="SECONDS", help="host's time per step")
    args = parser.parse_args(argv)
    if args.local is None:
        args.local = 8 if args.nodes is None else 1
    args.nodes = 1 if args.nodes is None else args.nodes
    try:
        for option in ("nodes", "local", "segments"):
            validation.integer(f"--{option}", getattr(args, option), 1)
        topology = Topology(args.nodes * args.local, args.local)
        ops = OPS if args.op == "all" else (args.op,)
        names = args.algorithms.split(",") if args.algorithms else None
        nbytes, rates = parse_general_int(args.bytes), _rates(args)
        print(*costs(topology, rates, nbytes, ops, names, args.segments, args.device), sep="\n")
    except ValueError as error:
        parser.error(str(error))


def _pair(text: str) -> tuple[float, float]:
    first, *rest = map(float, text.split(","))
    (last,) = rest or [first]
    return first, last


def _rates(args: argparse.Namespace) -> LinkRates:
    rates = ASSUMED
    for part in ("alpha", "beta"):
        if pair := getattr(args, part):
            intra, inter = rates.intra._replace(**{part: pair[0]}), {part: pair[1]}
            rates = replace(rates, intra=intra, inter=rates.inter._replace(**inter))
    if args.gamma is not None:
        plain, adasum = rates.sum._replace(beta=args.gamma), 1.9 * args.gamma
        rates = replace(rates, sum=plain, adasum=rates.adasum._replace(beta=adasum))
    return rates if args.host is None else replace(rates, host=args.host, launch=args.host)


def costs(
    topology: Topology,
    rates: LinkRates,
    nbytes: int,
    ops: Sequence[str],
    names: Sequence[str] | None,
    segments: int,
    device: str,
) -> list[str]:
    """Return the lines of a Markdown table, by operator, with the fastest algorithm first."""
    lines = [
        f"{topology.num_nodes} node{'' if topology.num_nodes == 1 else 's'} of "
        f"{topology.local_size} ranks, {_bytes(nbytes)} a rank",
        f"{'assumed' if rates == ASSUMED else 'given'} rates: {_rates_text(rates)}",
        "",
        "| op | algorithm | time | steps | between nodes | busiest node | peak memory |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for op in ops:
        rows = [
            (name, estimate(name, nbytes, rates, topology, op, segments, device))
            for name in names or _algorithms(op, topology)
        ]
        if device == "cuda" and names is None and runs_in_launches(op, topology):
            launches = "one launch" if topology.num_nodes == 1 else "launches"
            for copied in (False, True):
                cost = one_launch(nbytes, rates, topology, op, segments, copied=copied)
                rows.append((f"{launches}, {'copied' if copied else 'in place'}", cost))
        for name, cost in sorted(rows, key=lambda row: row[1].seconds):
            sizes = map(_bytes, (cost.inter, cost.busiest_inter, cost.memory))
            cells = [op, name, _seconds(cost.seconds), str(cost.steps), *sizes]
            lines.append(f"| {' | '.join(cells)} |")
    chosen = [f"{op} by {default_of(op, nbytes, topology, device)}" for op in ops]
    return [*lines, "", f"By default: {', '.join(chosen)}."]


def _rates_text(rates: LinkRates) -> str:
    """Return alpha and beta of messages and reductions, and the host's time per step."""
    named = {
        "messages in a node": rates.intra,
        "between nodes": rates.inter,
        "sums": rates.sum,
        "Adasum": rates.adasum,
    }
    said = [f"{name} {each.alpha:.3g} s + {each.beta:.3g} s/byte" for name, each in named.items()]
    return f"{', '.join(said)}, host {rates.host:.3g} s a step"


def _algorithms(op: str, topology: Topology) -> list[str]:
    """Return the algorithms that the table has by default."""
    size, local = topology.size, topology.local_size
    halving = "vhdd" if op == "adasum" else "rechd"
    names = [halving, "rd"]
    if size <= _MOST_RANKS:
        names += ["xring", "psgpu", "direct"]
        names += [f"xring#{local}", f"psgpu#{local}"] if local > 1 else []
    if 1 not in (local, topology.num_nodes):
        inners = ("xring", "rechd", f"psgpu#{local}")
        names += [f"{inner}/{outer}" for inner in inners for outer in ("xring", halving, "rd")]
    return names


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m collectives.{name}", description=description)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--segments", type=int, default=1, help="tensors in the buffer (1)")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cuda", help="device for auto (cuda)"
    )
    return parser


def _seconds(value: float) -> str:
    factor, unit = next(
        (each for each in ((1.0, "s"), (1e3, "ms")) if value * each[0] >= 1), (1e6, "µs")
    )
    return f"{value * factor:.3g} {unit}"


def _bytes(value: float) -> str:
    power = min(4, max(0, int(value).bit_length() - 1) // 10)
    return f"{value / (1 << (10 * power)):.4g} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
