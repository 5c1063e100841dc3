"""The messages of a schedule, as a picture in SVG and as a table.

Time runs from left to right. Ranks are lines, and messages are arrows between them: solid if they
are reduced, dashed if they are copied, and thicker if they carry more of the buffer. The colours
are Okabe and Ito's, which colour-blind readers can tell apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import zip_longest
from math import ceil, hypot
from typing import NamedTuple
from xml.sax.saxutils import escape

from collectives.schedules.schedule import IDLE, Action, Schedule, Step, Transfer, steps_of

# Scoped by a class, since a style inside a page's picture applies to the whole page. Pictures have
# their own background, since many pages are dark independently of the system's setting.
_STYLE = """
.schedule { font: 14px system-ui, 'DejaVu Sans', sans-serif; }
.schedule .ground { fill: #fff; } .schedule .node { fill: #f0f3f6; }
.schedule text { fill: #1f2328; } .schedule .small { font-size: 13px; fill: #59636e; }
.schedule .title { font-size: 15px; font-weight: 600; } .schedule .grid { stroke: #c8ced5; }
.schedule .reduced { stroke: #0072B2; fill: #0072B2; }
.schedule .copied { stroke: #D55E00; fill: #D55E00; }
.schedule .copied line { stroke-dasharray: 6 3; } .schedule polygon { stroke: none; }
@media (prefers-color-scheme: dark) {
.schedule .ground { fill: #15191f; } .schedule .node { fill: #232a33; }
.schedule text { fill: #e6edf3; } .schedule .small { fill: #a5adb8; }
.schedule .grid { stroke: #4a525d; }
.schedule .reduced { stroke: #56B4E9; fill: #56B4E9; }
.schedule .copied { stroke: #E69F00; fill: #E69F00; }
}"""
# In pixels. Phones show about 350 pixels across, and scale wider pictures down.
_TOP, _FOOT, _ROW, _CAPTION, _MARGIN = 40, 92, 32, 22, 12
_NARROWEST_PLOT, _PLOT, _NARROWEST_STEP, _WIDEST_STEP = 284, 384, 17, 72
_CHARACTER, _TITLE_CHARACTER = 8, 9.5


class Message(NamedTuple):
    """The chunks that one rank sends to another in one step, for the same action.

    Attributes:
        step: The number of the step, from 0.
        chunks: The ranges [start, stop) of chunks.
        share: Their part of the buffer.
        reduces: Whether the receiver reduces them.
    """

    step: int
    source: int
    target: int
    chunks: tuple[tuple[int, int], ...]
    share: Fraction
    reduces: bool

    def __str__(self) -> str:
        one = self.chunks[0][1] - self.chunks[0][0] == len(self.chunks) == 1
        ends = f"from rank {self.source} to rank {self.target}, {_kind(self)}"
        return f"chunk{'' if one else 's'} {' '.join(map(_text_of, self.chunks))} {ends}"


def _kind(message: Message) -> str:
    return "reduced" if message.reduces else "copied"


class Svg(str):
    """The text of a picture, which notebooks show."""

    def _repr_svg_(self) -> str:
        return self


def messages(schedule: Schedule) -> Iterator[Message]:
    """Yield all messages by step; transfers with equal ranks and action are joined."""
    for number, together in enumerate(_steps(schedule)):
        for rank, step in enumerate(together):
            ranges: dict[tuple[int, bool], list[tuple[int, int]]] = {}
            for peer, start, stop, action, _ in step.recvs:
                ranges.setdefault((peer, action is not Action.COPY), []).append((start, stop))
            for (peer, reduces), chunks in ranges.items():
                share = Fraction(sum(stop - start for start, stop in chunks), schedule.parts)
                yield Message(number, peer, rank, tuple(chunks), share, reduces)


def svg(schedule: Schedule, nodes: int, title: str) -> Svg:
    """Return the picture as SVG, for light and dark pages.

    nodes: the number of equal runs of ranks, drawn apart; title: the text at the top.
    """
    drawn, steps = list(messages(schedule)), len(_steps(schedule))
    at = _Layout(schedule.size, nodes, steps)
    wide = max(at.right + _MARGIN, 2 * _MARGIN + _TITLE_CHARACTER * len(title))
    size = f'width="{wide:g}" height="{at.bottom + _FOOT:g}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="schedule" role="img" {size} '
        f'viewBox="0 0 {wide:g} {at.bottom + _FOOT:g}">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style>",
        f'<rect class="ground" {size} rx="6"/>',
        _text(_MARGIN, 26, title, "title"),
        *_grid(at),
    ]
    seen = set()
    for message in drawn:
        # Shift a second arrow between the same ranks, which would hide the first.
        aside = 4 if message[:3] in seen else 0
        seen.add(message[:3])
        start = at.x(message.step + 0.06) + aside, at.row(message.source)
        end = at.x(message.step + 0.94) + aside, at.row(message.target)
        tip = f"<title>step {message.step}: {message}</title>"
        arrow = _arrow(start, end, float(message.share))
        parts.append(f'<g class="{_kind(message)}">{tip}{arrow}</g>')
    parts += _foot(at, drawn)
    return Svg("\n".join([*parts, "</svg>\n"]))


def table(schedule: Schedule) -> str:
    """Return a table as text, with each rank's sends and receives in each step on one line."""
    rows = [("step", "rank", "sends these chunks", "receives these (+ reduces them)")]
    for number, together in enumerate(_steps(schedule)):
        for rank, step in enumerate(together):
            sends = [f"{_text_of(each[1:3])} → rank {each.peer}" for each in step.sends]
            recvs = [_received(each) for each in step.recvs]
            first = str(number) if rank == 0 else ""
            rows.append((first, str(rank), ", ".join(sends) or "-", ", ".join(recvs) or "-"))
    widest = max(len(row[2]) for row in rows)
    lines = [f"{a:>4}  {b:>4}  {c:<{widest}}  {d}" for a, b, c, d in rows]
    counts = f"ranks {schedule.size}, steps {len(_steps(schedule))}, chunks {schedule.parts}"
    return "\n".join([f"{schedule.name}: {counts}", "", *lines]) + "\n"


def _steps(schedule: Schedule) -> list[tuple[Step, ...]]:
    """Return all ranks' steps by number, with idle ones if an unfinished schedule lacks some."""
    ranks = [steps_of(schedule, rank) for rank in range(schedule.size)]
    return list(zip_longest(*ranks, fillvalue=IDLE))


def _received(each: Transfer) -> str:
    return f"{_text_of(each[1:3])} {'←' if each.action is Action.COPY else '+←'} rank {each.peer}"


def _text_of(chunks: Sequence[int]) -> str:
    """Return a text for a range of chunks: its first and last."""
    start, stop = chunks
    return f"{start}" if stop - start == 1 else f"{start}-{stop - 1}"


class _Layout:
    """The positions of an SVG's parts, in pixels."""

    def __init__(self, size: int, nodes: int, steps: int) -> None:
        self.size, self.nodes, self.steps = size, nodes, max(1, steps)
        self.local, self.caption = size // nodes, _CAPTION if nodes > 1 else 0
        self.left = 2 + _MARGIN + _CHARACTER * len(f"rank {size - 1}")
        narrowest, usual = _NARROWEST_STEP * self.steps, min(_PLOT, _WIDEST_STEP * self.steps)
        self.right = self.left + max(_NARROWEST_PLOT, narrowest, usual)
        self.step = (self.right - self.left) / self.steps
        self.bottom = _TOP + nodes * self.caption + _ROW * size

    def x(self, step: float) -> float:
        return self.left + step * self.step

    def row(self, rank: int) -> float:
        return _TOP + (rank // self.local + 1) * self.caption + _ROW * (rank + 0.5)


def _grid(at: _Layout) -> Iterator[str]:
    """Yield the nodes, one line per rank, and lines between steps."""
    for node in range(at.nodes if at.nodes > 1 else 0):
        y, height = at.row(node * at.local) - _ROW / 2 - _CAPTION, at.local * _ROW + _CAPTION
        place = f'x="6" y="{y + 2:g}" width="{at.right:g}" height="{height - 4:g}"'
        caption = _text(_MARGIN, y + 18, f"node {node}", "small")
        yield f'<rect class="node" {place} rx="4"/>{caption}'
    first, last = at.row(0) - _MARGIN, at.row(at.size - 1) + _MARGIN
    for step in range(at.steps + 1):
        yield _line(at.x(step), first, at.x(step), last, 0.5, "grid")
    for rank in range(at.size):
        yield _line(at.left, at.row(rank), at.right, at.row(rank), 1, "grid")
        yield _text(_MARGIN, at.row(rank) + 5, f"rank {rank}")


def _foot(at: _Layout, drawn: Sequence[Message]) -> Iterator[str]:
    """Yield each step's number and share, as far as there is room, and the key."""
    for y, name in ((18, "step"), (36, "share")):
        yield _text(_MARGIN, at.bottom + y, name, "small")
    shares: list[set[Fraction]] = [set() for _ in range(at.steps)]
    for message in drawn:
        shares[message.step].add(message.share)
    texts = ["–".join(map(str, sorted({min(each), max(each)}))) if each else "" for each in shares]
    every = max([1, *(ceil(_CHARACTER * len(text) / at.step) for text in texts)])
    for step, share in list(enumerate(texts))[::every]:
        for y, text, kind in ((18, str(step), ""), (36, share, "small")):
            yield _text(at.x(step + 0.5), at.bottom + y, text, kind, "middle")
    for x, kind in ((at.left, "reduced"), (at.left + 130, "copied")):
        y = at.bottom + 67
        yield f'<g class="{kind}">{_arrow((x, y), (x + 36, y), 0.5)}</g>'
        yield _text(x + 44, y + 5, kind)


def _line(x: float, y: float, to_x: float, to_y: float, width: float, kind: str = "") -> str:
    ends = f'x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"'
    return f'<line{_class(kind)} {ends} stroke-width="{width:.2f}"/>'


def _arrow(start: tuple[float, float], end: tuple[float, float], share: float) -> str:
    width = 1 + 2 * min(share, 1.5)
    across, down = end[0] - start[0], end[1] - start[1]
    length = hypot(across, down)
    across, down = across / length, down / length
    long, half = 7 + width, 2.5 + 0.7 * width
    x, y = end[0] - long * across, end[1] - long * down
    corners = [end, (x - half * down, y + half * across), (x + half * down, y - half * across)]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return _line(*start, x, y, width) + f'<polygon points="{points}"/>'


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f"<text{_class(kind)} {place}>{escape(text)}</text>"


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
