"""Read from `srun`'s environment variables which hosts a step has, and how many tasks on each."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

# In "a[08-10,12]x,b": the words "a[08-10,12]x" and "b", the bracket, the ranges "08-10" and "12".
_WORD = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\[\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
# "4" is a host with four tasks, "4(x2)" are two such hosts.
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand(hosts: str) -> Iterator[str]:
    """Yield the hosts of a list in Slurm's notation: "a[08-10,12]x,b" is a08x, a09x, a10x, a12x, b.

    Of several brackets in a word the last one varies fastest, like the last digit of a number.
    Anything else than such a list is a ValueError.
    """
    if not re.fullmatch(rf"{_WORD.pattern}(?:,{_WORD.pattern})*", hosts):
        raise ValueError(f"not a list of hosts: {hosts!r}")
    for word in _WORD.findall(hosts):
        yield from _hosts_of(word, hosts)


def _hosts_of(word: str, hosts: str) -> Iterator[str]:
    """Yield the hosts of one word of the list, which has commas only inside brackets."""
    bracket = _BRACKET.search(word)
    if bracket is None:
        yield word
        return
    for number in _numbers(bracket[1], hosts):
        for rest in _hosts_of(word[bracket.end() :], hosts):
            yield word[: bracket.start()] + number + rest


def _numbers(ranges: str, hosts: str) -> Iterator[str]:
    """Yield the numbers of one bracket, padded with zeros to the width of their range's first."""
    for each in ranges.split(","):
        found = _RANGE.fullmatch(each)
        # If this is not a range, 1 to 0 stands for it, which is the error below.
        first, last = (found[1], found[2] or found[1]) if found else ("1", "0")
        if int(first) > int(last):
            raise ValueError(f"not a range of hosts: {each!r} in {hosts!r}")
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def first_host() -> str:
    """Return the first host of this step, on which its first task runs; ValueError without one."""
    try:
        return next(expand(os.environ.get("SLURM_STEP_NODELIST", "")))
    except ValueError as error:
        raise ValueError(
            f"SLURM_STEP_NODELIST must name the step's hosts ({error}): set MASTER_ADDR to rank 0's"
        ) from None


def local_size() -> int | None:
    """Return how many tasks of this step are on this host; None if Slurm does not say."""
    counts: list[int] = []
    for each in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        if (found := _COUNT.fullmatch(each)) is None:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    # With one host its number is known, even if SLURM_NODEID is missing.
    node = os.environ.get("SLURM_NODEID", "0" if len(counts) == 1 else "")
    return counts[int(node)] if node.isdecimal() and int(node) < len(counts) else None


def step_number(spread: int) -> int:
    """Return job · spread + step, by Slurm's ids of the two; ValueError where one is missing."""
    ids = {name: os.environ.get(name, "") for name in ("SLURM_JOB_ID", "SLURM_STEP_ID")}
    for name, each in ids.items():
        if not each.isdecimal():
            raise ValueError(f"{name} must be a number, got {each!r}: set MASTER_PORT on all ranks")
    job, step = map(int, ids.values())
    return job * spread + step
