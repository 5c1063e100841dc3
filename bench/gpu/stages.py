"""Runs stages one after the other, each a process with a record of how it ended.

FOLDER/stages/NAME.json is the record, FOLDER/stages/NAME/ has what the stage wrote, log.txt
included. A stage that ended by itself, well or not, is not run again on the same device with the
same source; one that was ended, or not begun, is, and finds what it had written.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OK, FAILED, OVERRUN, LEFT_OUT = "ok", "failed", "ended: took too long", "left out"
NO_TIME, RUNNING, NO_GPU = "not begun: no time", "interrupted", "no GPU"
# With which the commands here say that torch sees no GPU: theirs is no result.
_STATUS_NO_GPU = 2
# How a process is asked to end, and for how many seconds it may: pytest answers the first with a
# report of what it has run.
_ENDINGS = ((signal.SIGINT, 15.0), (signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
# Seconds kept back for that and for the page.
RESERVE = 30.0
# Every process below a stage has this variable, whatever session or group it is in.
VARIABLE = "ADASUM_BENCH_STAGE"


@dataclass(frozen=True)
class Stage:
    """One thing to run.

    Attributes:
        name: A file name, too.
        command: What runs it, in the root of the repository; "{out}" becomes its folder.
        estimate: Seconds without which it is not begun.
        limit: Seconds after which it is ended.
        environment: Variables beside those of this process.
        left_out: Why it cannot run here; "" where it can.
    """

    name: str
    command: Sequence[str]
    estimate: float
    limit: float
    environment: Mapping[str, str] = field(default_factory=dict)
    left_out: str = ""


@dataclass(frozen=True)
class Record:
    """How a stage ended.

    Attributes:
        name: The stage's.
        status: OK, FAILED and so on.
        seconds: How long it ran.
        reason: Why it failed or was left out.
        device: On which GPU.
        source: Of which source, `machine.source_of`.
        command: What was run.
        began: When, in UTC.
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
    """Runs stages within a time.

    Args:
        folder: Where results go.
        device: The GPU's name.
        source: What tells one state of the repository from another.
        seconds: From now on; None for no bound.
        say: Gets a line for each stage.
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
        path = self._stages / f"{record.name}.json"
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(asdict(record), indent=1) + "\n")
        unfinished.replace(path)
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
        limit = min(stage.limit, left)
        status, reason = _run(command, stage.environment, out / "log.txt", limit)
        return self._write(record(status, time.monotonic() - begin, reason))


def _run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit: float
) -> tuple[str, str]:
    """Run a command for at most `limit` seconds; return its status and why it failed."""
    value = uuid.uuid4().hex
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    variables = {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", VARIABLE: value, **environment}
    with log.open("w") as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return FAILED, str(error)
        late = False
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            late = True
        finally:
            _end(process, value)
    if late:
        return OVERRUN, f"after {limit:.0f} s"
    if not process.returncode:
        return OK, ""
    reason = _last_line(log, process.returncode)
    gone = process.returncode == _STATUS_NO_GPU and NO_GPU in reason
    return (NO_GPU if gone else FAILED), reason


def _end(process: subprocess.Popen[bytes], value: str) -> None:
    """End a process, its group, and whatever below it went its own way."""
    for number, seconds in _ENDINGS:
        if process.poll() is not None:
            break
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    needle = f"{VARIABLE}={value}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if needle in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def _last_line(log: Path, status: int) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return f"status {status}: {lines[-1].strip()[:200] if lines else 'no output'}"
