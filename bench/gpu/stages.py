"""Runs stages, each a process with a record of how it ended.

What times the device runs alone, one after the other; what compiles and compares runs side by side.
FOLDER/stages/NAME.json is the record, FOLDER/stages/NAME/ has what the stage wrote, log.txt
included. A stage that ended by itself, well or not, is not run again on the same device while the
packages that it reads are the same; one that was ended, or not begun, is, and finds what it had
written. With an archive all of it is kept in one file as well, from which a machine that has
nothing goes on.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from bench.gpu.machine import PACKAGES
from bench.processes import ENDINGS, Running, end
from bench.provenance import write

OK, FAILED, OVERRUN, LEFT_OUT = "ok", "failed", "ended: took too long", "left out"
NO_TIME, RUNNING, NO_GPU = "not begun: no time", "interrupted", "no GPU"
# With which the commands here say that torch sees no GPU: theirs is no result.
_STATUS_NO_GPU = 2
# Seconds in which a stage that takes too long is ended, and those kept back for that and the page.
PATIENCE = sum(seconds for _, seconds in ENDINGS)
RESERVE = PATIENCE + 5.0


@dataclass(frozen=True)
class Stage:
    """One thing to run in the root of the repository; in its command "{out}" becomes its folder.

    Without `estimate` seconds it is not begun, after `limit` seconds it is ended. environment:
    variables beside those of this process; left_out: why it cannot run here, "" where it can;
    beside: whether it may run side by side with the stages next to it that may, too; reads: the
    packages whose change makes its result an old one.
    """

    name: str
    command: Sequence[str]
    estimate: float
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""
    beside: bool = False
    reads: tuple[str, ...] = PACKAGES


@dataclass(frozen=True)
class Record:
    """How a stage ended, on which device, and of which source (a digest of what it reads).

    status: OK, FAILED and so on; reason: why it failed or was left out; began: when, in UTC.
    """

    name: str
    status: str
    seconds: float
    reason: str
    device: str
    source: str
    command: Sequence[str]
    began: str


@dataclass
class _Started:
    """A stage whose process is under way."""

    stage: Stage
    record: Record
    running: Running
    log: Path
    begun: float
    limit: float


class Runner:
    """Runs stages within a time, in seconds from now on, None for no bound.

    source_of: what tells one state of packages from another; say: gets a line for each stage;
    archive: a tar file that has the state after each step, read first where it exists.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        source_of: Callable[[tuple[str, ...]], str],
        seconds: float | None,
        say: Callable[[str], None],
        archive: Path | None = None,
    ) -> None:
        self._folder, self._stages, self._archive = folder, folder / "stages", archive
        self._device, self._source_of, self._say = device, source_of, say
        self._deadline = None if seconds is None else time.monotonic() + seconds - RESERVE
        if archive is not None and archive.exists():
            with tarfile.open(archive) as kept:
                kept.extractall(folder, filter="data")

    def run(self, stages: Sequence[Stage]) -> list[Record]:
        """Run those that are not done, and return how each has ended, now or before."""
        self._stages.mkdir(parents=True, exist_ok=True)
        records: dict[str, Record] = {}
        steps: Iterable[tuple[object, Iterable[Stage]]] = itertools.groupby(
            stages, lambda stage: stage.beside or stage.name
        )
        for _, group in steps:
            names = [*group]
            found = {stage.name: self._earlier(stage) for stage in names}
            left = []
            for stage in names:
                earlier = found[stage.name]
                if earlier is not None and earlier.status in (OK, FAILED):
                    self._keep(records, earlier)
                else:
                    left.append((stage, earlier))
            self._run(left, records)
            self.save()
        return [records[stage.name] for stage in stages]

    def save(self) -> None:
        """Write the archive, if there is one."""
        if self._archive is not None:
            unfinished = self._archive.with_suffix(".unfinished")
            with tarfile.open(unfinished, "w:gz") as kept:
                kept.add(self._folder, ".")
            os.replace(unfinished, self._archive)

    def _keep(self, records: dict[str, Record], record: Record) -> None:
        status = f"{record.status:20} {record.seconds:7.1f} s  {record.reason}"
        self._say(f"{record.name:20} {status}")
        records[record.name] = record

    def _earlier(self, stage: Stage) -> Record | None:
        """Return the record of this source on this device, if there is one."""
        path = self._stages / f"{stage.name}.json"
        try:
            record = Record(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        same = (record.device, record.source) == (self._device, self._source_of(stage.reads))
        return record if same else None

    def _write(self, record: Record) -> Record:
        write(self._stages / f"{record.name}.json", asdict(record))
        return record

    def _run(
        self, given: Sequence[tuple[Stage, Record | None]], records: dict[str, Record]
    ) -> None:
        """Run stages side by side."""
        with ExitStack() as stack:
            under_way = []
            for stage, earlier in given:
                begun = self._begin(stage, earlier, stack)
                if isinstance(begun, Record):
                    self._keep(records, begun)
                else:
                    under_way.append(begun)
            while under_way:
                found = [
                    (one, one.running.process.poll(), time.monotonic() - one.begun)
                    for one in under_way
                ]
                over = [each for each in found if each[1] is not None or each[2] > each[0].limit]
                # Together: one that is deaf takes most of RESERVE.
                end([one.running for one, _, _ in over])
                for one, code, seconds in over:
                    self._keep(records, self._write(_ended(one, code, seconds)))
                    under_way.remove(one)
                time.sleep(0.1 if under_way else 0.0)

    def _begin(self, stage: Stage, earlier: Record | None, stack: ExitStack) -> Record | _Started:
        """Start a stage's process; or return its record, where it cannot run."""
        out = self._stages / stage.name
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        command = [part.replace("{out}", str(out)) for part in stage.command]
        source = self._source_of(stage.reads)
        record = Record(
            stage.name, LEFT_OUT, 0.0, stage.left_out, self._device, source, command, began
        )
        if stage.left_out:
            return self._write(record)
        left = float("inf") if self._deadline is None else self._deadline - time.monotonic()
        if left < stage.estimate:
            reason = f"{stage.estimate:.0f} s are needed, {max(left, 0.0):.0f} are left"
            found = replace(record, status=NO_TIME, reason=reason)
            # What an earlier call has measured stays its own.
            return found if earlier is not None else self._write(found)
        if earlier is None:
            shutil.rmtree(out, ignore_errors=True)
        out.mkdir(exist_ok=True)
        record = self._write(replace(record, status=RUNNING))
        log, begun = out / "log.txt", time.monotonic()
        try:
            running = stack.enter_context(Running(command, log, stage.environment))
        except OSError as error:
            return self._write(replace(record, status=FAILED, reason=str(error)))
        # Its end may take PATIENCE, which is not to delay the end of all.
        limit = left if stage.limit + PATIENCE > left else stage.limit
        return _Started(stage, record, running, log, begun, limit)


def _ended(one: _Started, code: int | None, seconds: float) -> Record:
    """Return the record of a stage that has ended; code: its status, None if it was ended."""
    status, reason = OK, ""
    if code is None:
        status, reason = OVERRUN, f"after {one.limit:.0f} s"
    elif code:
        reason = _last_line(one.log, code)
        status = NO_GPU if code == _STATUS_NO_GPU and NO_GPU in reason else FAILED
    return replace(one.record, status=status, seconds=seconds, reason=reason)


def _last_line(log: Path, status: int) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"status {status}: {lines[-1].strip()[:200] if lines else 'no output'}"
