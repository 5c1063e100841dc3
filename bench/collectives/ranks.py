"""What the benches of ranks share: their start, their operators, and timing in turns."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import collectives
from adasum import Adasum
from bench import provenance
from collectives.tools.bench import finish
from collectives.tree_order import in_order

OPS: dict[str, collectives.Reducer] = {
    "sum": collectives.Sum,
    "avg": collectives.Average,
    "adasum": Adasum,
    "tree": in_order(collectives.Sum, "tree"),
}


def make_parser(name: str, text: str, iters: int | None = None) -> argparse.ArgumentParser:
    """Return the parser of `python -m bench.collectives.NAME`, with -J and, by its default, -n."""
    parser = argparse.ArgumentParser(prog=f"python -m bench.collectives.{name}", description=text)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("-J", "--output_file", "--json", type=_output_file, help="write JSON, too")
    if iters is not None:
        parser.add_argument("-n", "--iters", type=int, default=iters, help=f"iterations ({iters})")
    return parser


def _output_file(text: str) -> Path:
    """Return the path if it can be written to, which should be known before a long run."""
    path = Path(text)
    try:
        provenance.unfinished(path).touch()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def write(path: Path | None, record: Any) -> None:
    """Write JSON, where a path was given."""
    if path is not None:
        provenance.write(path, record)


def in_turns(
    names: Iterable[str],
    prepare: Callable[[str], Callable[[], object]],
    iterations: int,
    wait: Callable[[], object] = lambda: None,
    calls: Mapping[str, int] | None = None,
    barrier: Callable[[], object] | None = None,
) -> dict[str, list[float]]:
    """Time each contender from a barrier on; return this rank's seconds of a call by name.

    Each takes the lead in turn, so that a machine that slows down slows all of them. prepare: from
    a name, makes ready, untimed, and returns what is timed; wait: for what was started and runs on,
    before the clock is read; calls: by name, how many calls a sample is, one where it is not given;
    barrier: of all ranks, torch's unless given.
    """
    names = [*names]
    samples = {name: list[float]() for name in names}
    for done in range(iterations):
        first = done % len(names)
        for name in names[first:] + names[:first]:
            run, times = prepare(name), (calls or {}).get(name, 1)
            wait()
            (barrier or dist.barrier)()
            begin = time.perf_counter()
            for _ in range(times):
                run()
            wait()
            samples[name].append((time.perf_counter() - begin) / times)
    return samples


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call."""
    begin = time.perf_counter()
    call()
    finish(device)
    return time.perf_counter() - begin


def wait_for(works: Iterable[Any]) -> None:
    """Start all of these works, then wait for each."""
    for work in [*works]:
        work.wait()


def slowest(samples: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Return the largest of all ranks' numbers, one by one."""
    found = {}
    for name, seconds in samples.items():
        worst = torch.tensor(seconds, dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        found[name] = worst.tolist()
    return found


def heading(facts: Mapping[str, Any]) -> str:
    """Return the first line of a table."""
    return f"# {', '.join(f'{key} {value}' for key, value in facts.items())}"


def environment(group: collectives.Group, device: torch.device) -> dict[str, Any]:
    """Return what a reader needs to know to compare the numbers."""
    cuda = device.type == "cuda"
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "processors": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0],
        "ranks": group.size,
        "local_ranks": group.topology.local_size,
        "nodes": group.topology.num_nodes,
        "transport": repr(group.transport),
        "backend": dist.get_backend_config(),
    }
