"""What a rank runs while a fault happens: a few good steps, the fault on one rank, and more steps.

A rank writes what happened, with times of time.monotonic(), to DIRECTORY/rank<r>.jsonl, and lets
errors go: they end it as they would end a user's script.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd
import collectives
from collectives import initialize

STEPS = 4
# The step in which it happens: one before it went well.
FAULTY = 1
# 8 MiB: an all-reduce takes some milliseconds, and the timer falls into one of many.
LARGE = 1 << 21
Strike = Callable[[], None]
_gpu = False


class OnPurpose(Exception):
    """What a rank raises in its own code."""


class Diary:
    """A file of what happened, one JSON object a line."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, what: str, **more: Any) -> None:
        line = json.dumps({"what": what, "when": time.monotonic(), **more})
        with self._path.open("a") as file:
            file.write(line + "\n")


def _strike(what: str, seconds: float, diary: Diary) -> None:
    diary("fault")
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what.startswith("stop"):
        os.kill(os.getpid(), signal.SIGSTOP)
        diary("goes on")
    elif what == "sys.exit":
        sys.exit(3)
    elif what == "os._exit":
        os._exit(0)
    elif what == "raise":
        raise OnPurpose("the rank's own error")
    elif what == "late":
        time.sleep(seconds)


def _strike_in_hook(strike: Strike, gradient: torch.Tensor) -> None:
    strike()


class Net(nn.Module):
    """Three layers; `in_backward`, where set, is called half-way through backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.in_backward: Strike | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            if i == 1 and self.in_backward is not None:
                x.register_hook(partial(_strike_in_hook, self.in_backward))
        return x


def _all_reduce(where: str, strike: Strike | None) -> None:
    """One all-reduce. "transfer": many large ones, and the fault from another thread."""
    group = hvd_group()
    if where == "transfer":
        if strike is not None:
            threading.Timer(0.1, strike).start()
        tensor = torch.ones(LARGE, device=device())
        for _ in range(500):
            group.all_reduce(tensor, hvd.Average, name="w")
        return
    if strike is not None:
        strike()
    group.all_reduce(torch.ones(100_000, device=device()), name="w")
    if device().type == "cuda":
        # Where the call is only queued, it is waited for, and fails, here.
        torch.cuda.synchronize()


def device() -> torch.device:
    """Where this rank's tensors are: on a GPU, which ranks may share, for NCCL alone."""
    if not _gpu:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["RANK"]) % torch.cuda.device_count())


def hvd_group() -> collectives.Group:
    return collectives.default_group()


def _request() -> Callable[[str, Strike | None], None]:
    """A request that is started and waited for once a step."""
    request = hvd_group().all_reduce_init(torch.ones(1000), name="w")

    def train(where: str, strike: Strike | None) -> None:
        request.start()
        if strike is not None:
            strike()
        request.wait()

    return train


def _trainer(use: str) -> Callable[[str, Strike | None], None]:
    """A function that trains one step."""
    if use == "all_reduce":
        return _all_reduce
    if use == "request":
        return _request()
    net = Net().to(device())
    model: nn.Module = net
    optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if use == "ddp":
        model = DistributedDataParallel(net, bucket_cap_mb=0.005)
        model.register_comm_hook(hvd.HookState(op=hvd.Adasum), hvd.ddp_hook)
    else:
        options: dict[str, dict[str, Any]] = {
            "average": {"op": hvd.Average},
            "gradient": {"op": hvd.Adasum, "method": "gradient"},
            "delta": {"op": hvd.Adasum},
            "in_backward": {"op": hvd.Adasum, "step_in_backward": True},
        }
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=net.named_parameters(), groups_size=2, **options[use]
        )

    def train(where: str, strike: Strike | None) -> None:
        optimizer.zero_grad()
        net.in_backward = strike if where == "backward" else None
        model(torch.randn(4, 32, device=device())).square().mean().backward()
        if where == "step" and strike is not None:
            strike()
        if where != "missing step" or strike is None:
            optimizer.step()

    return train


def _patch_init(strike: Strike) -> None:
    """The fault in the middle of init: before ranks connect."""
    whole = initialize.connect

    def patched(*args: Any, **options: Any) -> Any:
        strike()
        return whole(*args, **options)

    initialize.connect = patched


def _host_a_store(job: dict[str, Any]) -> None:
    """Hold the store, as torchrun's agent does, until killed."""
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=True)
    Path(job["directory"], "store").touch()
    time.sleep(600)
    del store


def main(job: dict[str, Any]) -> None:
    """job: the case's fields (tests.faults.cases), and "directory"."""
    torch.set_num_threads(1)
    if job["use"] == "store":
        _host_a_store(job)
        return
    rank = int(os.environ["RANK"])
    directory = Path(job["directory"])
    diary = Diary(directory / f"rank{rank}.jsonl")
    diary("start")
    try:
        _run(job, rank, directory, diary)
    except BaseException as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        diary("error", kinds=kinds, text=str(error))
        raise
    diary("end")


def _run(job: dict[str, Any], rank: int, directory: Path, diary: Diary) -> None:
    global _gpu
    _gpu = job["transport"] == "nccl"
    if _gpu:
        torch.cuda.set_device(device())
    where = job["where"]
    strike = partial(_strike, job["what"], job["late"], diary) if rank == job["victim"] else None
    if where == "before init" and strike:
        strike()
    if where == "connecting" and strike:
        _patch_init(strike)
    hvd.init(timeout=job["timeout"], transport=job["transport"])
    diary("in")
    if job["use"] == "split":
        _split_without_store(directory)
        return
    train = _trainer(job["use"])
    for step in range(STEPS):
        now = step >= FAULTY
        if now and where in ("shutdown", "unwaited"):
            break
        diary("step")
        train(where if now else "", strike if step == FAULTY else None)
    if where == "missing step":
        hvd_group().all_reduce(torch.ones(1), name="loss")
    if where in ("shutdown", "unwaited"):
        if strike:
            strike()
        if where == "unwaited":
            hvd_group().all_reduce(torch.ones(100_000), async_op=True)
            return
    hvd.shutdown()


def _await(path: Path) -> None:
    while not path.exists():
        time.sleep(0.02)


def _split_without_store(directory: Path) -> None:
    """The store's host is killed once rank 0 asks for it; collectives work, new groups cannot."""
    group = hvd_group()
    group.barrier()
    if group.rank == 0:
        (directory / "kill store").touch()
    _await(directory / "store is gone")
    tensor = torch.ones(3)
    group.all_reduce(tensor)
    assert tensor.tolist() == [group.size] * 3
    group.split(range(group.size))
