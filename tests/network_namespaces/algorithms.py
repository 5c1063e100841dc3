"""`auto` beside the algorithms that it chooses from, between hosts on links of 1 and 10 Gbit/s.

    python -m tests.network_namespaces.algorithms --hosts 2,4,8 --rates 1gbit,10gbit -o found.json

Hosts are network namespaces of this machine, one rank each, with a link each to a common switch; to
make them needs root's capabilities (tests/network_namespaces/network.py). Each pair of hosts and
rate is a run of bench.collectives.all_reduce, whose contenders take turns. Many ranks share few
processors: then those, not the links, set the pace. A burst of 256 KB passes a link unshaped.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.network_namespaces.network import Hosts

_ALGORITHMS = ("auto", "rd", "rechd", "xring", "bruck", "psgpu")
_PATIENCE = 1800.0


def measure(hosts_count: int, rate: str, options: Sequence[str]) -> dict[str, Any]:
    """Return what bench.collectives.all_reduce finds on such hosts."""
    names = ",".join([*_ALGORITHMS, f"psgpu#{hosts_count}"])
    with tempfile.TemporaryDirectory() as directory, Hosts(hosts_count, rate=rate) as hosts:
        out = Path(directory, "out.json")
        hosts.torchrun(
            "bench.collectives.all_reduce",
            *("-a", names, "-c", "0", "-J", str(out), *options),
            local_size=1,
            transport="gloo",
            logs=Path(directory),
        )
        hosts.wait_for([out], _PATIENCE)
        found: dict[str, Any] = json.loads(out.read_text())
    return {"hosts": hosts_count, "rate": rate, **found}


def table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return Markdown: median times, and how many times the best algorithm's `auto` takes."""
    names = [*_ALGORITHMS, "psgpu#n", "torch"]
    lines = [
        f"| hosts | link | bytes | {' | '.join(f'{name} ms' for name in names)} | auto / best |",
        f"| ---: | --- | ---: |{' ---: |' * (len(names) + 1)}",
    ]
    for run in found:
        sizes: dict[int, dict[str, float]] = {}
        for row in run["results"]:
            name = "psgpu#n" if "#" in row["algorithm"] else row["algorithm"]
            sizes.setdefault(row["size"], {})[name] = row["time"] / 1e3
        for size, times in sizes.items():
            ours = [times[name] for name in names if name not in ("auto", "torch")]
            cells = [str(run["hosts"]), run["rate"], str(size)]
            cells += [f"{times[name]:.3g}" for name in names]
            lines.append(f"| {' | '.join(cells)} | {times['auto'] / min(ours):.2f} |")
    return lines


def main() -> None:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", default="2,4,8")
    parser.add_argument("--rates", default="1gbit,10gbit", help="in tc's words")
    parser.add_argument("--seconds", type=float, default=20, help="of a size, at least (20)")
    parser.add_argument("-b", "--minbytes", default="4K")
    parser.add_argument("-e", "--maxbytes", default="64M")
    parser.add_argument("-o", "--output", type=Path, help="write all that was found as JSON")
    args = parser.parse_args()
    options = ["-b", args.minbytes, "-e", args.maxbytes, "-f", "4", "-n", "7", "-w", "1"]
    options += ["--seconds", str(args.seconds)]
    found = []
    for hosts in map(int, args.hosts.split(",")):
        for rate in args.rates.split(","):
            found.append(measure(hosts, rate, options))
            print(*table(found[-1:])[0 if len(found) == 1 else 2 :], sep="\n", flush=True)
            if args.output:
                args.output.write_text(json.dumps(found, indent=1) + "\n")
    print(f"\n{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
