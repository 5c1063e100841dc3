"""Ranks for the cases: the only file here that knows how a group is put together.

Where `collectives` makes groups in another way this file follows, and the table stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import collectives
from collectives import Group, Topology
from tests.collectives.consistency.ranks import run_over
from tests.collectives.transport.thread_ranks import connect
from tests.frozen.calls import answer
from tests.frozen.cases import Case
from tests.frozen.errors import ENDS, ERRORS
from tests.frozen.values import digest
from tests.processes.harness import run_ranks

# No case waits for a rank that does not come: this is for a machine that has much else to do.
TIMEOUT = 120.0
# After these a group is as it was before the call.
_KEEPS = ("ValueError", "TypeError", "RuntimeError", "CollectiveMismatchError")
_IS_ERROR = re.compile(r"(\w+): ")
# What errors say that is another in each process.
_OF_THIS_RUN = (
    (re.compile(r"0x[0-9a-f]+"), "ADDRESS"),
    (re.compile(r"\d+\.\d+\.\d+\.\d+(:\d+)?"), "HOST"),
    (re.compile(r"\b(pid|process|port|descriptor) \d+"), r"\1 N"),
    (re.compile(r"thread '[^']*'"), "thread NAME"),
    (re.compile(r"(?<!\w)(/[\w.+-]+){2,}"), "PATH"),
    # Which call it is depends on the cases before it; which function refuses an argument that no
    # function takes, on how the arguments are handed on.
    (re.compile(r"\b(call|request) \d+"), r"\1 N"),
    (re.compile(r"[\w.]+\(\) got an unexpected"), "FUNCTION() got an unexpected"),
    # Of a group that was split from another.
    (re.compile(r"( in the group)? of ranks [\d, ]+(?=[:)])"), ""),
)


def said(error: BaseException) -> str:
    """An error's class and text, without what another process would say in another way."""
    text = str(error)
    for pattern, name in _OF_THIS_RUN:
        text = pattern.sub(name, text)
    return f"{type(error).__name__}: {text}"


def _outcome(group: Group, case: Case) -> str:
    """The hash of this rank's answer, or the error."""
    try:
        if case.kind == "error":
            return str(ERRORS[case.option](group))
        return digest(answer(group, case))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what is compared
        return said(error)


def outcomes(group: Group, cases: Sequence[Case]) -> list[str]:
    """This rank's outcomes, up to the first after which the group may be of no more use."""
    found = []
    for case in cases:
        found.append(_outcome(group, case))
        error = _IS_ERROR.match(found[-1])
        if case.option in ENDS or (error and error[1] not in _KEEPS):
            break
    return found


def _of_processes(rank: int, cases: Sequence[str]) -> list[str]:
    group = collectives.init(transport="gloo", timeout=TIMEOUT)
    try:
        return outcomes(group, [Case.parse(each) for each in cases])
    finally:
        collectives.shutdown()


def _of_threads(transport: str, size: int, local: int, job: Callable[[Group], list[str]]) -> list:
    """What `job` returns on ranks that are threads of this process."""
    if transport == "threads":
        return collectives.run_threads(size, job, timeout=TIMEOUT, local_size=local)
    return run_over(
        connect(size, transport), job, TIMEOUT, local_size=local, topology=Topology(size, local)
    )


def run(cases: Sequence[Case]) -> dict[Case, list[str]]:
    """The outcomes by rank of cases of one world."""
    found: dict[Case, list[str]] = {}
    while len(found) < len(cases):
        left = cases[len(found) :]
        ranks = _answers(left)
        # A rank ends at the first outcome after which the others' may mean nothing.
        whole = min(map(len, ranks))
        for case, *by_rank in zip(left[:whole], *(each[:whole] for each in ranks), strict=True):
            found[case] = by_rank
    return found


def _answers(cases: Sequence[Case]) -> list[list[str]]:
    """The outcomes by rank, of as many of the cases as one set of ranks can make."""
    transport, size, local = cases[0].world
    if transport == "gloo":
        texts = [str(case) for case in cases]
        return run_ranks(size, _of_processes, texts, timeout=600.0)
    return _of_threads(transport, size, local, lambda group: outcomes(group, cases))
