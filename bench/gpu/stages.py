"""Runs stages one after the other, each a process with a record of how it ended.

FOLDER/stages/NAME.json is the record, FOLDER/stages/NAME/ has what the stage wrote, log.txt
included. A stage that ended by itself, well or not, is not run again on the same device with the
same source; one that was ended, or not begun, is, and finds what it had written.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench import processes
from bench.provenance import write

OK, FAILED, OVERRUN, LEFT_OUT = "ok", "failed", "ended: took too long", "left out"
NO_TIME, RUNNING, NO_GPU = "not begun: no time", "interrupted", "no GPU"
# With which the commands here say that torch sees no GPU: theirs is no result.
_STATUS_NO_GPU = 2
# Seconds kept back for the end of a stage that takes too long, and for the page.
RESERVE = 30.0


@dataclass(frozen=True)
class Stage:
    """One thing to run in the root of the repository; in its command "{out}" becomes its folder.

    Without `estimate` seconds it is not begun, after `limit` seconds it is ended. environment:
    variables beside those of this process; left_out: why it cannot run here, "" where it can.
    """

    name: str
    command: Sequence[str]
    estimate: float
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""


@dataclass(frozen=True)
class Record:
    """How a stage ended, on which device, and of which source (`machine.source_of`).

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


class Runner:
    """Runs stages within a time, in seconds from now on, None for no bound.

    source: what tells one state of the repository from another; say: gets a line for each stage.
    """

    def __init__(
        self,
        folder: Path,
        device: str,
        source: str,
        seconds: float | None,
        say: Callable[[str], None],
    ) -> None:
        self._stages = folder / "stages"
        self._device, self._source, self._say = device, source, say
        self._deadline = None if seconds is None else time.monotonic() + seconds - RESERVE

    def run(self, stages: Sequence[Stage]) -> list[Record]:
        """Run those that are not done, and return how each has ended, now or before."""
        self._stages.mkdir(parents=True, exist_ok=True)
        records = []
        for stage in stages:
            earlier = self._earlier(stage)
            done = earlier is not None and earlier.status in (OK, FAILED)
            record = earlier if done else self._run(stage, earlier)
            status = f"{record.status:20} {record.seconds:7.1f} s  {record.reason}"
            self._say(f"{stage.name:20} {status}")
            records.append(record)
        return records

    def _earlier(self, stage: Stage) -> Record | None:
        """Return the record of this source on this device, if there is one."""
        path = self._stages / f"{stage.name}.json"
        try:
            record = Record(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None
        same = (record.device, record.source) == (self._device, self._source)
        return record if same else None

    def _write(self, record: Record) -> Record:
        write(self._stages / f"{record.name}.json", asdict(record))
        return record

    def _run(self, stage: Stage, earlier: Record | None) -> Record:
        out = self._stages / stage.name
        began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        command = [part.replace("{out}", str(out)) for part in stage.command]

        def record(status: str, seconds: float = 0.0, reason: str = "") -> Record:
            source, device = self._source, self._device
            return Record(stage.name, status, seconds, reason, device, source, command, began)

        if stage.left_out:
            return self._write(record(LEFT_OUT, reason=stage.left_out))
        left = float("inf") if self._deadline is None else self._deadline - time.monotonic()
        if left < stage.estimate:
            reason = f"{stage.estimate:.0f} s are needed, {max(left, 0.0):.0f} are left"
            found = record(NO_TIME, reason=reason)
            # What an earlier call has measured stays its own.
            return found if earlier is not None else self._write(found)
        if earlier is None:
            shutil.rmtree(out, ignore_errors=True)
        out.mkdir(exist_ok=True)
        self._write(record(RUNNING))
        begin = time.monotonic()
        limit, log = min(stage.limit, left), out / "log.txt"
        try:
            code = processes.run(command, log, limit, stage.environment)
        except OSError as error:
            return self._write(record(FAILED, reason=str(error)))
        status, reason = OK, ""
        if code is None:
            status, reason = OVERRUN, f"after {limit:.0f} s"
        elif code:
            reason = _last_line(log, code)
            status = NO_GPU if code == _STATUS_NO_GPU and NO_GPU in reason else FAILED
        return self._write(record(status, time.monotonic() - begin, reason))


def _last_line(log: Path, status: int) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"status {status}: {lines[-1].strip()[:200] if lines else 'no output'}"
