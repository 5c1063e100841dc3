"""Hosts made of network namespaces, each with one link to a common switch.

A host also has a host name, a /dev/shm, System V IPC and process numbers of its own, so that ranks
on two of them cannot take each other for neighbours. Linux only; making them needs root's
capabilities (CAP_NET_ADMIN, CAP_SYS_ADMIN) and the commands ip, tc, unshare, setpriv and mount.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).parents[2]
LINK = "eth0"
_PREFIX = "adasum-test-"
_PORT = 29400
# More than the largest packet that a sender hands over whole: a smaller burst makes tbf cut it into
# frames, which costs the hosts' processors as much as a training on them.
_BURST = "256kb"
# In a mount namespace of its own, so that neither mount is seen outside.
_START = 'hostname "$0" && mount -t tmpfs tmpfs /dev/shm && exec "$@"'


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


@cache
def why_not() -> str:
    """Why hosts cannot be made here, in words for a skip; empty where they can."""
    if sys.platform != "linux":
        return "hosts are network namespaces, which only Linux has"
    commands = ("ip", "tc", "unshare", "setpriv", "mount")
    missing = [name for name in commands if shutil.which(name) is None]
    if missing:
        return f"hosts need {', '.join(missing)} (Debian: iproute2, util-linux, mount)"
    try:
        with Hosts(1, rate="100mbit") as hosts:
            _run(*hosts.command(0, ["true"]))
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"hosts cannot be made here: {error}"
    return ""


class HostsFailed(AssertionError):
    """A host's processes failed or did not end in time; the text has the end of what they said."""


class Hosts:
    """`count` hosts, 10.77.0.1 upwards; a context manager that leaves nothing behind.

    rate: the speed of every link in both directions in tc's words ("100mbit"), unlimited unless
    given.
    """

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        self.count = count
        self._rate = rate
        self._names = [f"{_PREFIX}{os.getpid()}-{i}" for i in range(count)]
        self._switch = f"{_PREFIX}{os.getpid()}-switch"
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[Path] = []

    def __enter__(self) -> Hosts:
        _delete_orphans()
        with ExitStack() as undo:
            self._make(undo)
            self._undo = undo.pop_all()
        return self

    def _make(self, undo: ExitStack) -> None:
        switch = self._switch
        for name in (switch, *self._names):
            _run("ip", "netns", "add", name)
            undo.callback(_run, "ip", "netns", "delete", name)
        _run("ip", "-n", switch, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", switch, "link", "set", "bridge", "up")
        for i, name in enumerate(self._names):
            port = f"port{i}"
            _run(
                *("ip", "-n", name, "link", "add", LINK, "type", "veth"),
                *("peer", "name", port, "netns", switch),
            )
            _run("ip", "-n", switch, "link", "set", port, "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"10.77.0.{i + 1}/24", "dev", LINK)
            for device in ("lo", LINK):
                _run("ip", "-n", name, "link", "set", device, "up")
            if self._rate is not None:
                # The limit of each direction sits at the end that sends.
                for namespace, device in ((name, LINK), (switch, port)):
                    _run(
                        *("tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf"),
                        *("rate", self._rate, "burst", _BURST, "latency", "200ms"),
                    )

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """`command` as it must be started to run on `host`.

        It and all that it starts die with the process so started, and that one with its parent.
        """
        return [
            *("setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self._names[host]),
            *("unshare", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child"),
            *("--mount-proc", "sh", "-c", _START, f"host{host}", *command),
        ]

    def torchrun(
        self, module: str, *arguments: str, local_size: int, transport: str, logs: Path
    ) -> None:
        """Start torchrun on every host: `local_size` ranks each, gloo over the hosts' links.

        transport: how ranks of one host exchange, as collectives.init's.
        """
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": LINK,
            "ADASUM_TRANSPORT": transport,
        }
        for host in range(self.count):
            launch = [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", str(self.count), "--node-rank", str(host)),
                *("--nproc-per-node", str(local_size)),
                *("--master-addr", "10.77.0.1", "--master-port", str(_PORT)),
                *("--module", module, *arguments),
            ]
            self._logs.append(logs / f"host{host}.log")
            with self._logs[-1].open("wb") as log:
                process = subprocess.Popen(
                    self.command(host, launch),
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self._processes.append(process)
            self._undo.callback(_end, process)

    def wait_for(self, files: Sequence[Path], timeout: float) -> None:
        """Return when all files are there; HostsFailed when a host fails or time is up."""
        deadline = time.monotonic() + timeout
        while not all(path.exists() for path in files):
            for host, process in enumerate(self._processes):
                if process.poll() not in (None, 0):
                    raise HostsFailed(f"host {host} failed:\n{self._said(host)}")
            if time.monotonic() > deadline:
                said = "\n".join(self._said(host) for host in range(self.count))
                missing = [path.name for path in files if not path.exists()]
                raise HostsFailed(f"no {missing} after {timeout:g} s:\n{said}")
            time.sleep(0.02)

    def _said(self, host: int) -> str:
        return self._logs[host].read_text(errors="replace")[-6000:]

    def cut(self, host: int) -> None:
        """Take the host's link down: no more packets, and no word to either side about it."""
        _run("ip", "-n", self._switch, "link", "set", f"port{host}", "down")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._undo.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(10.0)


def _delete_orphans() -> None:
    """Namespaces of test processes that were killed before they could clean up."""
    for path in Path("/run/netns").glob(f"{_PREFIX}*"):
        owner = path.name.removeprefix(_PREFIX).split("-")[0]
        if not Path("/proc", owner).exists():
            _run("ip", "netns", "delete", path.name)
