"""Schedules drawn, listed, priced and simulated: each agrees with the schedule's own steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from fractions import Fraction
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
from collectives.tools.drawing import Message, messages

RATES = LinkRates(
    *(Rate(3e-6, 2e-12), Rate(1.4e-5, 2e-11), Rate(2e-6, 1e-12), Rate(7e-6, 3e-12)),
    nic=1e-11,
    call=1e-4,
    host=5e-6,
)
SIZES = range(1, 10)
SVG = "{http://www.w3.org/2000/svg}"
TIP = re.compile(r"step (\d+): chunks? ([\d -]+) from rank (\d+) to rank (\d+), (\w+)")
CELL = re.compile(r"([\d-]+) (→|←|\+←) rank (\d+)")


def _lab(size: int, op: str) -> Iterator[Schedule]:
    """Every algorithm of a size, and two levels on one node and, where that can be, on two."""
    for name in ORDERED if op == "adasum" else SCHEDULES:
        yield collectives.schedule(name, size, 2 if name == "rechd" and size % 2 == 0 else 1, op=op)
    for nodes in (1, 2) if size % 2 == 0 else (1,):
        yield collectives.schedule("xring/rd", size, nodes, op=op)


def _chunks(text: str) -> tuple[tuple[int, int], ...]:
    ends = (each.split("-") for each in text.split())
    return tuple((int(each[0]), int(each[-1]) + 1) for each in ends)


def _drawn(picture: str) -> list[Message]:
    """The messages of a picture: by their tips, colours, and the ranks whose lines they join."""
    root = ElementTree.fromstring(picture)
    at = {each.text: float(each.get("y")) - 5 for each in root.iter(f"{SVG}text")}
    found = []
    for group in root.iter(f"{SVG}g"):
        if (tip := group.find(f"{SVG}title")) is None:
            continue
        step, chunks, source, target, kind = TIP.fullmatch(tip.text).groups()
        line, head = group.find(f"{SVG}line"), group.find(f"{SVG}polygon")
        tip_y = float(head.get("points").split()[0].split(",")[1])
        assert (float(line.get("y1")), tip_y) == (at[f"rank {source}"], at[f"rank {target}"])
        assert group.get("class") == kind
        reduces = kind == "reduced"
        ends = int(source), int(target), _chunks(chunks)
        found.append(Message(int(step), *ends, Fraction(0), reduces))
    return found


def _listed(table: str) -> dict[tuple[int, int], tuple[list[Any], list[Any]]]:
    """Sends and receives by step and rank, as a table has them."""
    found, step = {}, 0
    for line in table.splitlines()[3:]:
        first, rank, sends, recvs = (
            line[:4].strip(),
            line[4:10].strip(),
            *re.split(r"  +", line[12:].strip()),
        )
        step = int(first) if first else step
        found[step, int(rank)] = tuple(
            [(*_chunks(c)[0], way, int(peer)) for c, way, peer in CELL.findall(cell)]
            for cell in (sends, recvs)
        )
    return found


def _check_format(events: list[dict[str, Any]], size: int) -> None:
    """Have what the Trace Event Format asks of each kind; a thread is of one process, and named."""
    fields = {
        "M": {"name": str, "args": dict},
        "B": {"name": str, "cat": str, "ts": float},
        "E": {"cat": str, "ts": float},
    }
    for event in events:
        for field, kind in {**fields[event["ph"]], "pid": int, "tid": int}.items():
            assert type(event[field]) is kind, event
    threads = {(event["pid"], event["tid"]) for event in events}
    assert sorted(tid for _, tid in threads) == [*range(size)]
    for kind, of in (("process", 0), ("thread", 1)):
        numbers = {each[of] for each in threads}
        for what in ("name", "sort_index"):
            said = [each for each in events if each.get("name") == f"{kind}_{what}"]
            assert sorted(each["tid" if of else "pid"] for each in said) == sorted(numbers)


def _ends(trace: str, size: int) -> list[float]:
    """Where each rank's slices end, once they are nested and in order."""
    events = json.loads(trace, parse_constant=pytest.fail)["traceEvents"]
    _check_format(events, size)
    ends = [0.0] * size
    open_slices = [0] * size
    for event in events:
        if event["ph"] == "M":
            continue
        rank = event["tid"]
        assert event["ts"] >= ends[rank]
        ends[rank] = event["ts"]
        open_slices[rank] += 1 if event["ph"] == "B" else -1
        assert open_slices[rank] in (0, 1, 2)
    assert open_slices == [0] * size
    names = {event["args"]["name"] for event in events if event.get("name") == "thread_name"}
    assert names == {f"rank {rank}" for rank in range(size)}
    return ends


@pytest.mark.parametrize("op", ["sum", "adasum"])
@pytest.mark.parametrize("size", SIZES)
def test_every_algorithm_is_drawn_listed_priced_proved_and_traced(size: int, op: str) -> None:
    for each in _lab(size, op):
        topology = Topology(size, size // each.nodes)
        sent = list(messages(each))
        drawn = _drawn(picture := each.draw())
        assert drawn == [message._replace(share=Fraction(0)) for message in sent]
        assert all(f">rank {rank}</text>" in picture for rank in range(size))

        listed = _listed(each.table())
        for (step, rank), (sends, recvs) in listed.items():
            its = steps_of(each, rank)[step]
            assert sends == [(start, stop, "→", peer) for peer, start, stop, *_ in its.sends]
            ways = ["←" if recv.action is Action.COPY else "+←" for recv in its.recvs]
            pairs = zip(its.recvs, ways, strict=True)
            assert recvs == [(recv.start, recv.stop, way, recv.peer) for recv, way in pairs]
        assert len(listed) == sum(len(steps_of(each, rank)) for rank in range(size))

        # Of several tensors a shuffle has other steps.
        segments = 1 if "psgpu" in each.name or "pscpu" in each.name else 3
        cost = each.cost(1e6, RATES, segments)
        by_name = estimate(each.name, 1e6, RATES, topology, op, segments)
        # The same additions in another order.
        assert cost.seconds == pytest.approx(by_name.seconds, rel=1e-12)
        ends = _ends(trace := each.trace(1e6, RATES, segments), size)
        said = {
            (event["name"], text)
            for event in json.loads(trace)["traceEvents"]
            for text in event.get("args", {}).get("sends", [])
        }
        assert said == {(f"step {m.step}", f"{m}: {float(m.share) * 1e6:.0f} bytes") for m in sent}
        assert max(ends) == pytest.approx(cost.seconds * 1e6, rel=1e-12)
        proof = collectives.verify(each)
        assert proof.carries_adasum or each.op == "sum" or size == 1


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
    assert _drawn(mine.draw(title="a < b & c"))[0][:4] == (0, 1, 0, ((0, 1),))
    assert mine.table().splitlines()[3] == "   0     0  0 → rank 1          0 +← rank 1"
    assert mine.cost(1e6, RATES) == estimate("rd", 1e6, RATES, Topology(2, 1), "adasum")
    assert max(_ends(mine.trace(1e6), 2)) == pytest.approx(mine.cost(1e6).seconds * 1e6)


def test_schedule_that_is_not_right_yet_is_drawn_and_listed() -> None:
    """Rank 1 does not receive, and has a step less."""

    def steps(rank: int) -> Iterator[Step]:
        if rank == 0:
            yield from (Step((Transfer(1, 0, 1),)), Step((), (Transfer(1, 1, 2),)))
        else:
            yield Step()

    mine = Schedule("wrong", 2, 2, Collective.ALL_REDUCE, steps)
    assert [message[:3] for message in _drawn(mine.draw())] == [(1, 1, 0)]
    assert list(_listed(mine.table())) == [(0, 0), (0, 1), (1, 0), (1, 1)]
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


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (("auto", 4), {}, "goes by size: give nbytes"),
        (("rd:1:xring", 4), {"device": "cpu"}, "goes by size: give nbytes"),
        (("auto", 4), {"nbytes": 4}, 'device must be "cpu" or "cuda", got None'),
        (("rd", 4), {"nbytes": -1}, "nbytes must be finite and not negative"),
        (("nccl", 4), {}, "'nccl' is no schedule: use xring"),
        (("collective/rd", 4), {}, "'collective' is no schedule"),
        (("xring#5", 4), {}, "xring takes 1 to 4 shards"),
        (("rd", 4, 3), {}, "nodes must divide size 4, got 3"),
        (("rd", 0), {}, "size must be at least 1"),
        (("rd", 4), {"op": "max"}, "op must be one of sum, adasum, got 'max'"),
        (("rdd", 4), {}, "invalid algorithm 'rdd'"),
    ],
)
def test_what_is_no_schedule_is_an_error_that_names_it(
    arguments: Any, options: Any, text: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        collectives.schedule(*arguments, **options)


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
    assert "rechd on 3 ranks is proved: 4 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("paint rd 4", "argument command: invalid choice: 'paint'"),
        ("draw rd four", "argument SIZE: invalid int value: 'four'"),
        ("draw nccl 4", "draw nccl 4: 'nccl' is no schedule"),
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
