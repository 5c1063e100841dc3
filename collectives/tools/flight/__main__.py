"""Join the flight records of a job's ranks, and name the rank at fault.

python -m collectives.flight FILES, or the folder that they are in. The status is 0 if a rank is
named, 1 if nothing is wrong, and 2 if these are no job's flight records.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

from collectives.errors import compact
from collectives.tools.flight.analysis import Analysis
from collectives.tools.flight.reader import NO_RECORD, BadInput, Dump, read

# The report fits on a screen.
_CULPRITS, _WAITS, _STACK, _COLUMNS = 5, 8, 6, 160


def report(found: Analysis, dumps: Mapping[int, Dump]) -> Iterator[str]:
    """Yield the lines that say what the files say."""
    groups = [each for dump in dumps.values() for each in dump.groups.values()]
    world = {*dumps}.union(*(each.ranks for each in groups))
    written = sorted(dump.written for dump in dumps.values())
    first, last = (time.strftime("%H:%M:%S", time.localtime(written[at])) for at in (0, -1))
    yield f"{len(dumps)} of {len(world)} ranks' files, {first} to {last}"
    for rank, why, _ in found.culprits[:_CULPRITS]:
        dump = dumps.get(rank)
        yield f"CULPRIT: rank {rank}{f' on {dump.host}' if dump else ''} {why}"
        yield from (f"    {line.strip()}" for line in (dump.stack[:_STACK] if dump else ()))
    if len(found.culprits) > _CULPRITS:
        yield f"and {len(found.culprits) - _CULPRITS} more ranks"
    if found.circle:
        yield "ranks wait for each other: one skipped a call, or their calls have different orders"
    together: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for wait in found.waits:
        if wait.targets:
            together.setdefault((str(wait.call), wait.targets), []).append(wait.rank)
    for (call, targets), ranks in [*together.items()][:_WAITS]:
        yield f"rank {compact(sorted(ranks))} in {call}: waits for rank {compact(sorted(targets))}"
    if len(together) > _WAITS:
        yield f"and {len(together) - _WAITS} more"
    if not found.culprits:
        yield "nothing is wrong: no rank waits for long, and none has failed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m collectives.flight", description=__doc__)
    parser.add_argument("files", nargs="+", help="the ranks' files, or their folder")
    try:
        dumps = read(parser.parse_args(arguments).files)
        found = Analysis(dumps)
        lines = [*report(found, dumps)]
    except (BadInput, *NO_RECORD) as error:
        said = error if isinstance(error, BadInput) else f"these are no flight records: {error!r}"
        print(f"python -m collectives.flight: {said}", file=sys.stderr)
        return 2
    for line in lines:
        # A file may hold any text, such as a terminal's escape sequences.
        shown = "".join(each if each.isprintable() else " " for each in line)
        print(shown if len(shown) <= _COLUMNS else f"{shown[: _COLUMNS - 3]}...")
    return 0 if found.culprits else 1
