"""Schedules drawn, listed, priced and simulated: each agrees with the schedule's own steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import collectives
from adasum import Adasum
from collectives import Action, Collective, Schedule, Step, Sum, Transfer
from collectives.cost import ASSUMED, LinkRates, Rate, estimate
from collectives.execution.phases import phases_of
from collectives.schedules.registry import ORDERED, SCHEDULES
from collectives.schedules.schedule import steps_of
from collectives.schedules.spec import parse_all_reduce_spec
from collectives.schedules.symbolic_step import ScheduleError
from collectives.schedules.topology import Topology
from collectives.tools.commands import schedules as main
from collectives.tools.drawing import messages

RATES = LinkRates(
    *(Rate(3e-6, 2e-12), Rate(1.4e-5, 2e-11), Rate(2e-6, 1e-12), Rate(7e-6, 3e-12)),
    nic=1e-11,
    call=1e-4,
    host=5e-6,
)
SIZES = range(1, 10)
SVG = "{http://www.w3.org/2000/svg}"


def _lab(size: int, op: str) -> Iterator[Schedule]:
    """Every algorithm of a size, and two levels on one node and, where that can be, on two."""
    for name in ORDERED if op == "adasum" else SCHEDULES:
        yield collectives.schedule(name, size, 2 if name == "rechd" and size % 2 == 0 else 1, op=op)
    for nodes in (1, 2) if size % 2 == 0 else (1,):
        yield collectives.schedule("xring/rd", size, nodes, op=op)


def _drawn(picture: str) -> list[tuple[str, str, str]]:
    """The messages of a picture: by their tips, and the ranks whose lines their arrows join."""
    root = ElementTree.fromstring(picture)
    ranks = {float(each.get("y")) - 5: each.text for each in root.iter(f"{SVG}text")}
    found = []
    for group in root.iter(f"{SVG}g"):
        if (tip := group.find(f"{SVG}title")) is not None:
            start, head = group.find(f"{SVG}line"), group.find(f"{SVG}polygon")
            end = head.get("points").split()[0].split(",")[1]
            found.append((tip.text, ranks[float(start.get("y1"))], ranks[float(end)]))
            assert tip.text.endswith(f", {group.get('class')}")
    return found


@pytest.mark.parametrize("op", ["sum", "adasum"])
@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_is_drawn_listed_priced_proved_and_traced(size: int, op: str) -> None:
    for each in _lab(size, op):
        sent = list(messages(each))
        ends = [(f"rank {m.source}", f"rank {m.target}") for m in sent]
        tips = [f"step {m.step}: {m}" for m in sent]
        assert _drawn(each.draw()) == [(tip, *two) for tip, two in zip(tips, ends, strict=True)]

        steps = [step for rank in range(size) for step in steps_of(each, rank)]
        recvs = [recv for step in steps for recv in step.recvs]
        table = each.table()
        assert len(table.splitlines()) == 3 + len(steps)
        assert table.count("→") == sum(len(step.sends) for step in steps)
        assert table.count("+←") == sum(recv.action is not Action.COPY for recv in recvs)
        assert table.count("←") == len(recvs)

        # Of several tensors a shuffle has other steps.
        segments = 1 if "psgpu" in each.name or "pscpu" in each.name else 3
        cost = each.cost(1e6, RATES, segments)
        topology = Topology(size, size // each.nodes)
        by_name = estimate(each.name, 1e6, RATES, topology, op, segments)
        # The same additions in another order.
        assert cost.seconds == pytest.approx(by_name.seconds, rel=1e-12)
        events = json.loads(each.trace(1e6, RATES, segments))["traceEvents"]
        said = [
            f"{event['name']}: {text}"
            for event in events
            for text in event.get("args", {}).get("sends", [])
        ]
        bytes_ = [f"{float(m.share) * 1e6:.0f} bytes" for m in sent]
        assert {*said} == {f"{tip}: {text}" for tip, text in zip(tips, bytes_, strict=True)}
        last = max((event["ts"] for event in events if "ts" in event), default=0.0)
        assert last == pytest.approx(cost.seconds * 1e6, rel=1e-12)
        proof = collectives.verify(each)
        assert proof.carries_adasum or each.op == "sum" or size == 1


def test_table_of_recursive_halving_is_this() -> None:
    table = collectives.schedule("rechd", 3).table()
    assert table.splitlines()[:8] == [
        "rechd: ranks 3, steps 4, chunks 2",
        "",
        "step  rank  sends these chunks  receives these (+ reduces them)",
        "   0     0  -                   0-1 +← rank 1",
        "         1  0-1 → rank 0        -",
        "         2  -                   -",
        "   1     0  1 → rank 2          0 +← rank 2",
        "         1  -                   -",
    ]


def test_trace_of_two_nodes_names_them_and_nests_what_each_step_does() -> None:
    """Of the Trace Event Format: ph, pid and tid, and ts or, for names, args."""
    trace = collectives.schedule("rd", 2, 2).trace(1e6, RATES)
    events = json.loads(trace, parse_constant=pytest.fail)["traceEvents"]
    named = [(e["pid"], e["tid"], e["name"], *e["args"].values()) for e in events if e["ph"] == "M"]
    assert named[:4] == [
        *((0, 0, "process_name", "node 0"), (0, 0, "process_sort_index", 0)),
        *((0, 0, "thread_name", "rank 0"), (0, 0, "thread_sort_index", 0)),
    ]
    assert named[4:] == [
        *((1, 1, "process_name", "node 1"), (1, 1, "process_sort_index", 1)),
        *((1, 1, "thread_name", "rank 1"), (1, 1, "thread_sort_index", 1)),
    ]
    mine = [e for e in events if e["ph"] != "M" and (e["pid"], e["tid"]) == (1, 1)]
    assert [(e["ph"], e.get("name"), round(e["ts"])) for e in mine] == [
        *(("B", "call", 0), ("E", None, 100)),
        *(("B", "step 0", 100), ("B", "host", 100), ("E", None, 105)),
        *(("B", "messages", 105), ("E", None, 139), ("B", "reduction", 139), ("E", None, 142)),
        ("E", None, 142),
    ]
    assert {e["cat"] for e in mine} == {"schedule"}


@pytest.mark.parametrize("op", [Sum, Adasum])
def test_schedule_is_what_runs(op: collectives.Reducer) -> None:
    topology = Topology(8, 4)
    for name in ("xring", "rechd#2", "rechd/vhdd", "direct", "psgpu#3"):
        (spec,) = parse_all_reduce_spec(name)
        runs = phases_of(spec, op, topology).schedule
        found = collectives.schedule(name, 8, 2, op="adasum" if op is Adasum else "sum")
        assert found.chunks == runs.chunks
        for rank in range(8):
            assert steps_of(found, rank) == steps_of(runs, rank)


def test_users_schedule_has_all_of_it() -> None:
    def steps(rank: int) -> Iterator[Step]:
        other = (Transfer(1 - rank, 0, 1),)
        action = Action.REDUCE_RIGHT if rank == 0 else Action.REDUCE_LEFT
        yield Step(other, (other[0]._replace(action=action),), (rank,))

    mine = Schedule("both", 2, 1, Collective.ALL_REDUCE, steps, nodes=2, op="adasum")
    assert _drawn(mine.draw(title="a < b & c"))[0][1:] == ("rank 1", "rank 0")
    assert mine.table().splitlines()[3] == "   0     0  0 → rank 1          0 +← rank 1"
    assert mine.cost(1e6, RATES) == estimate("rd", 1e6, RATES, Topology(2, 1), "adasum")


def test_schedule_that_is_not_right_yet_is_drawn_and_listed() -> None:
    """Rank 1 does not receive, and has a step less."""

    def steps(rank: int) -> Iterator[Step]:
        if rank == 0:
            yield from (Step((Transfer(1, 0, 1),)), Step((), (Transfer(1, 1, 2),)))
        else:
            yield Step()

    mine = Schedule("wrong", 2, 2, Collective.ALL_REDUCE, steps)
    assert [ends for _, *ends in _drawn(mine.draw())] == [["rank 1", "rank 0"]]
    assert [line[:10] for line in mine.table().splitlines()[3:]] == [
        *("   0     0", "         1", "   1     0", "         1"),
    ]
    with pytest.raises(ScheduleError, match="step 0: rank 0 sends to rank 1, which receives none"):
        collectives.verify(mine)


def test_sizes_and_devices_choose_the_schedule() -> None:
    def name(spec: str, **options: Any) -> str:
        return collectives.schedule(spec, 8, **options).name

    assert name("rd:1k:xring#2", nbytes=4096) == "rd"
    assert name("rd:1k:xring#2", nbytes=4100) == "xring#2"
    assert name("auto", nbytes=1 << 20, device="cpu") == "rechd"
    assert name("auto", nbytes=1 << 20, device="cuda") == "rd"
    assert name("auto", nbytes=1 << 30, device="cpu", op="adasum") == "direct"


def test_commands_write_what_the_methods_return(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedule = collectives.schedule("rechd/vhdd", 8, 2, op="adasum")
    options = ["rechd/vhdd", "8", "--nodes", "2", "--op", "adasum", "--bytes", "2M"]
    expected = {
        "draw": schedule.draw(),
        "table": schedule.table(),
        "trace": schedule.trace(2 << 20) + "\n",
    }
    for command, text in expected.items():
        main([command, *options])
        assert capsys.readouterr().out == text
        main([command, *options, "-o", str(tmp_path / command)])
        assert (tmp_path / command).read_text() == text and capsys.readouterr().out == ""
    main(["cost", "rechd/vhdd,rd:1k:xring", *options[1:]])
    said = capsys.readouterr().out
    micros = schedule.cost(2 << 20, ASSUMED).seconds * 1e6
    assert f"| adasum | rechd/vhdd | {micros:.3g} µs | 6 |" in said
    assert said.endswith("rd:1k:xring: xring\n")
    main(["verify", "rechd", "3"])
    said = capsys.readouterr().out
    assert "rechd on 3 ranks is proved: 4 steps" in said and "Adasum can run" in said


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("paint rd 4", "argument command: invalid choice: 'paint'"),
        ("draw rd four", "argument SIZE: invalid int value: 'four'"),
        ("draw nccl 4", "draw nccl 4: 'nccl' has no schedule"),
        ("cost rd,bogus 4", "invalid algorithm 'bogus'"),
        ("trace rd 4 --nodes 3", "nodes must divide size 4, got 3"),
        ("trace rd 4 --bytes 1q", "argument --bytes: '1q' is not a positive integer"),
        ("cost rd 4 --segments 0", "--segments must be at least 1"),
        ("table rd 4 -o {}/none/x", "argument -o: "),
        ("verify xring 9999", "are too many to be verified"),
    ],
)
def test_errors_of_commands_name_the_argument(
    arguments: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments.format(tmp_path).split())
    assert text in capsys.readouterr().err.splitlines()[-1]
