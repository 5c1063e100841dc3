"""Every public name of `collectives` that needs no other rank, on awkward arguments."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import collectives
from collectives import Action, Average, Max, Packing, Schedule, Step, Sum, Topology, Transfer
from collectives.schedules.schedule import Collective
from collectives.schedules.symbolic_step import ScheduleError
from collectives.transport import ThreadWorld
from tests.fuzz.outcome import REJECTIONS, SETTINGS, Recipe, attempt
from tests.fuzz.values import ODD_VALUES, Arg, Look, constant, looks, sometimes, tensors, value

Strategy = st.SearchStrategy[Arg]

# Plain data, classes to derive from and exceptions: what is wrong in them is passed elsewhere.
DATA = {
    "Action",
    "AllReduceSpec",
    "Average",
    "BackendOptions",
    "Collective",
    "CollectiveError",
    "CollectiveMismatchError",
    "CollectiveTimeoutError",
    "Max",
    "Min",
    "Needs",
    "Operands",
    "Packing",
    "Piece",
    "Product",
    "Reducer",
    "Step",
    "Sum",
    "Transfer",
    "TransportError",
    "Request",
    "Work",
}
# Start-up and shut-down: tests/fuzz/test_start.py; what writes files: tests/collectives/flight.
START = {
    "default_group",
    "dump_flight_record",
    "from_process_group",
    "init",
    "is_initialized",
    "new_group",
    "run_threads",
    "shutdown",
}

numbers = st.integers(-2, 9) | st.sampled_from((2**31, 2**40, 2**63, 2**70))
counts = sometimes(
    st.sampled_from([constant(each) for each in ODD_VALUES]), numbers.map(constant), 6
)
lists = sometimes(
    st.sampled_from([constant(each) for each in ODD_VALUES]),
    st.lists(st.integers(0, 9), max_size=6, unique=True).map(sorted).map(constant)
    | st.lists(numbers | st.sampled_from(ODD_VALUES), max_size=4).map(constant),
    6,
)
short = sometimes(
    st.sampled_from([constant(each) for each in ODD_VALUES if type(each) is not int]),
    st.integers(-1, 8).map(constant),
    6,
)


def _group(transport: Any, **options: Any) -> None:
    collectives.Group(transport, **options).close()


def _schedules() -> Strategy:
    """Schedules of one or two steps on up to three ranks, nearly all of them wrong."""
    transfers = st.builds(
        Transfer,
        st.integers(-1, 3),
        st.integers(-1, 2),
        st.integers(0, 3),
        st.sampled_from(Action),
    )
    some = st.lists(transfers, max_size=2).map(tuple)
    steps = st.builds(
        Step, some, some, st.lists(st.integers(-1, 3), max_size=2).map(tuple), st.integers(0, 1)
    )
    programs = st.lists(st.lists(steps, max_size=2), min_size=3, max_size=3)
    return st.builds(
        lambda size, chunks, kind, program: constant(
            Schedule("fuzz", size, chunks, kind, lambda rank: program[rank])
        ),
        st.integers(1, 3),
        st.integers(1, 2),
        st.sampled_from(Collective),
        programs,
    )


@functools.lru_cache(maxsize=256)
def _signatures(look: Look) -> dict[str, tuple[list[Strategy], dict[str, Strategy]]]:
    """What each takes: positional arguments, and keywords that may be left out."""
    many = tensors(look)
    ranges = st.lists(st.tuples(numbers, numbers), max_size=2).map(tuple)
    shapes = st.lists(st.just(torch.Size(look.shape)), max_size=4).map(tuple)
    packings = sometimes(
        value(None),
        st.builds(Packing, ranges, shapes).map(constant)
        | st.just(constant(Packing(((0, 1),), (torch.Size(look.shape),) * 3))),
        4,
    )
    text = st.text(max_size=5).map(constant)
    transport = st.just(Arg("threads", lambda memory: ThreadWorld(1).transport(0)))
    topology = sometimes(value(None), st.just(constant(Topology(1, 1))), 3)
    return {
        "FusedBuffer": ([many], {"memory": sometimes(value(torch.zeros(64)), value(None), 3)}),
        "Group": (
            [transport],
            {
                "timeout": value(1.0, 5, 0, -1.0),
                "local_rank": short,
                "local_size": short,
                "topology": topology,
            },
        ),
        "Schedule": (
            [value("name"), counts, counts, value(Collective.REDUCE), value(len)],
            {"root": counts, "replicas": counts},
        ),
        "Topology": ([short, short], {"local_order": lists}),
        "buffer_of": ([many], {}),
        "extract_ranges": ([lists], {"range_size_limit": counts}),
        "group_devices": ([lists, short], {}),
        "pack_small_tensors": ([many], {"max_bytes": counts, "max_group": counts}),
        "parse_all_reduce_spec": ([sometimes(text, value("xring:2k:rd", "vhdd"), 2)], {}),
        "parse_general_int": ([sometimes(text, value("32k", "7"), 2)], {}),
        "plan_groups": ([many], {"memory_size": value(None, 1, 1e-6), "groups_size": counts}),
        "ring_permutations": ([short, short, lists], {}),
        "split_bounds": ([counts, short], {}),
        "split_by_size": ([many, counts], {}),
        "unpack_small_tensors": ([many, packings], {}),
        "schedule": (
            [sometimes(text, value("xring", "rd:2k:psgpu#2", "rechd/vhdd", "auto"), 4), short],
            {
                "nodes": short,
                "op": value("sum", "adasum"),
                "nbytes": sometimes(counts, value(1e6)),
                "device": value("cpu", "cuda", None),
            },
        ),
        "order_of": (
            [sometimes(text, value("xring", "rd", "rechd/rd", "psgpu#2", "auto"), 4), short],
            {"op": value(Sum, Average, Max), "order": value("tree", None), "nodes": short},
        ),
        "verify": (
            [sometimes(value(None), _schedules(), 8)],
            {"joins": value("said", "list", "tree", "")},
        ),
    }


NAMES = sorted(_signatures(Look((6,), torch.float32)))
REJECTS = {"verify": (ScheduleError, *REJECTIONS)}


@st.composite
def _recipes(draw: Any, name: str) -> Recipe:
    positional, keywords = _signatures(draw(looks))[name]
    args = tuple(draw(strategy) for strategy in positional)
    given_names = [key for key in keywords if draw(st.booleans()) or key == "timeout"]
    function = _group if name == "Group" else getattr(collectives, name)
    return Recipe(function, args, {key: draw(keywords[key]) for key in given_names})


def test_fuzz_covers_every_public_name() -> None:
    assert {*NAMES, *DATA, *START} == set(collectives.__all__)


def check(name: str, data: st.DataObject) -> None:
    """One call: an answer, or a rejection; tensors are only read."""
    attempt(data.draw(_recipes(name)), REJECTS.get(name, REJECTIONS), reads_only=True)


@pytest.mark.parametrize("name", NAMES)
@SETTINGS
@given(data=st.data())
def test_any_arguments_raise_only_documented_errors(name: str, data: st.DataObject) -> None:
    check(name, data)
