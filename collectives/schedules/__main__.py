"""Draw, list, price, prove and simulate the schedule that a specification stands for.

    python -m collectives.schedules draw xring#2 8 --nodes 2 -o ring.svg
    python -m collectives.schedules table rechd 4
    python -m collectives.schedules cost xring,rechd,auto 8 --bytes 64M
    python -m collectives.schedules verify rechd/vhdd 8 --nodes 2
    python -m collectives.schedules trace direct 4 --op adasum --bytes 16M -o run.json

draw: an SVG. table: each rank's messages by step. cost: time, steps, bytes and memory by the cost
model, of several specifications with commas. verify: a proof for all ranks. trace: the run that the
cost model has in mind; ui.perfetto.dev opens it. Rates are assumptions about H100 nodes:
`python -m collectives.cost` takes others.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from collectives import validation
from collectives.cost import ASSUMED, OPS
from collectives.cost.__main__ import costs
from collectives.lab import Schedule, schedule
from collectives.schedules.spec import parse_general_int
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.schedules.verify import verify

_Command = Callable[[argparse.Namespace], str]


def main(argv: Sequence[str] | None = None) -> None:
    """Carry out one command."""
    parser = argparse.ArgumentParser(prog="python -m collectives.schedules", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("spec", metavar="SPEC", help='such as xring#2, rechd/vhdd, "rd:16k:rechd"')
    parser.add_argument("size", metavar="SIZE", type=int, help="number of ranks")
    parser.add_argument("--nodes", type=int, default=1, help="hosts of equally many ranks (1)")
    parser.add_argument("--op", choices=OPS, default="sum", help="what is reduced (sum)")
    parser.add_argument("--bytes", default="1M", help="of a rank's buffer, such as 64M (1M)")
    parser.add_argument("--segments", type=int, default=1, help="tensors in the buffer (1)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda", help="of auto (cuda)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="write there, not here")
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
    if args.output is None:
        sys.stdout.write(text)
        return
    try:
        args.output.write_text(text, encoding="utf-8")
    except OSError as error:
        parser.error(f"argument -o: {error}")


def _schedule(args: argparse.Namespace) -> Schedule:
    size, nbytes, device = args.size, args.nbytes, args.device
    return schedule(args.spec, size, args.nodes, op=args.op, nbytes=nbytes, device=device)


def _cost(args: argparse.Namespace) -> str:
    names = args.spec.split(",")
    found = [_schedule(argparse.Namespace(**vars(args) | {"spec": name})) for name in names]
    topology = Topology(args.size, args.size // args.nodes)
    ops, device = (args.op,), args.device
    lines = costs(topology, ASSUMED, args.nbytes, ops, names, args.segments, device)
    pairs = zip(names, found, strict=True)
    said = [f"{name}: {each.name}" for name, each in pairs if name != each.name]
    return "\n".join([*lines, *([""] if said else []), *said]) + "\n"


def _verify(args: argparse.Namespace) -> str:
    proof = verify(_schedule(args))
    return (
        f"{args.spec} on {args.size} ranks is proved: {proof.steps} steps; every message is "
        "received, nothing can deadlock, and each rank ends with every contribution once.\n"
        f"It reduces in {proof.phases} phase{'' if proof.phases == 1 else 's'}; Adasum can"
        f"{'' if proof.carries_adasum else 'not'} run on these steps.\n"
    )


COMMANDS: dict[str, _Command] = {
    "draw": lambda args: _schedule(args).draw(),
    "table": lambda args: _schedule(args).table(),
    "cost": _cost,
    "verify": _verify,
    "trace": lambda args: _schedule(args).trace(args.nbytes, segments=args.segments) + "\n",
}


if __name__ == "__main__":
    main()
