"""Join the flight records of a job's ranks, and name the rank at fault.

python -m collectives.flight FILES, or the folder that they are in. The status is 0 if a rank is
named, 1 if nothing is wrong, and 2 if these are no job's flight records.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from collectives.flight.analysis import Analysis, Culprit, slowest
from collectives.flight.files import BadInput, Dump, read
from collectives.flight.ranks import compact

# So that it all fits on a screen.
_CULPRITS, _WAITS, _STACK, _COLUMNS = 5, 8, 6, 160


def report(dumps: Mapping[int, Dump]) -> tuple[list[str], bool]:
    """Return what the files say, and whether a rank is at fault."""
    world = {
        rank for dump in dumps.values() for each in dump.groups.values() for rank in each.ranks
    }
    first, last = (moment(dump.written for dump in dumps.values()) for moment in (min, max))
    lines = [
        f"{len(dumps)} of {len(world | {*dumps})} ranks' files, "
        f"{time.strftime('%H:%M:%S', time.localtime(first))} to "
        f"{time.strftime('%H:%M:%S', time.localtime(last))}"
    ]
    found = Analysis(dumps)
    for culprit in found.culprits[:_CULPRITS]:
        lines += _culprit(culprit, dumps)
    if len(found.culprits) > _CULPRITS:
        lines.append(f"and {len(found.culprits) - _CULPRITS} more ranks")
    if found.circle:
        lines.append(
            "ranks wait for each other: somebody skipped a call, or they have other orders"
        )
    lines += _waits(found)
    if found.culprits:
        return lines, True
    slow = slowest(dumps)
    if slow is not None:
        lines.append(
            f"CULPRIT: rank {slow.rank}{_on(slow.rank, dumps)} is slow: of the last "
            f"{slow.of:.3g} s others waited {slow.seconds:.3g} s for it, which came last to "
            f"{slow.times} of {slow.calls} calls"
        )
        return lines, True
    lines.append("nothing is wrong: no rank waits for long, and none has failed")
    return lines, False


def _culprit(culprit: Culprit, dumps: Mapping[int, Dump]) -> Iterator[str]:
    yield f"CULPRIT: rank {culprit.rank}{_on(culprit.rank, dumps)} {culprit.why}"
    dump = dumps.get(culprit.rank)
    if dump is not None and dump.stack:
        yield from (f"    {line.strip()}" for line in dump.stack[:_STACK])


def _waits(found: Analysis) -> Iterator[str]:
    """Say who waited where for whom, equal ones together."""
    together: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for wait in found.waits:
        if wait.targets:
            together.setdefault((str(wait.call), wait.targets), []).append(wait.rank)
    rows = list(together.items())
    for (call, targets), ranks in rows[:_WAITS]:
        yield f"rank {compact(sorted(ranks))} in {call}: waits for rank {compact(sorted(targets))}"
    if len(rows) > _WAITS:
        yield f"and {len(rows) - _WAITS} more"


def _on(rank: int, dumps: Mapping[int, Dump]) -> str:
    """Return where a rank is, if its file says so."""
    return f" on {dumps[rank].host}" if rank in dumps else ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m collectives.flight", description=__doc__)
    parser.add_argument("files", nargs="+", help="the ranks' files, or their folder")
    try:
        dumps = read(parser.parse_args(arguments).files)
    except BadInput as error:
        print(f"python -m collectives.flight: {error}", file=sys.stderr)
        return 2
    lines, found = report(dumps)
    for line in lines:
        print(line if len(line) <= _COLUMNS else f"{line[: _COLUMNS - 3]}...")
    return 0 if found else 1


if __name__ == "__main__":
    sys.exit(main())
