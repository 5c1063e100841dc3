"""Checks of several ranks, each a process: over the CPU's transport, and over NCCL.

On the CPU two ranks reduce over what `collectives.init` chooses. Over NCCL, torch's own and cupy's,
one rank alone shows that the library loads, makes a communicator and runs a kernel; several reduce,
each on a GPU of its own.
"""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import collectives
import kernels
from adasum.reducer import Adasum
from collectives.bootstrap.settings import TransportName
from collectives.transport import GlooTransport, Message, NcclTransport
from collectives.transport.nccl.cupy_backend import CupyBackend

CPU, TORCH, CUPY = "the CPU", "torch", "cupy"
# For all ranks, and for a step: a rank that waits for one that is gone says so within the first.
SECONDS, _STEP = 90.0, 40.0
_NUMEL = 300_001


class NotInstalledError(ImportError):
    """What carries the messages is not there."""


def start(kind: str, ranks: int) -> str:
    """Run a power of two of processes of this module, each in the caller's process group.

    Returns what the first one found. AssertionError: one failed, with the last line it wrote.
    NotInstalledError: there is no cupy.
    """
    if not dist.is_available():
        raise AssertionError("torch.distributed is not in this build of torch")
    if kind == CUPY and importlib.util.find_spec("cupy") is None:
        raise NotInstalledError("cupy is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "adasum.check.ranks", kind]
    # In place of what a job has set in which this runs.
    common = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1"}
    common |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        found = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = []
        for rank in range(ranks):
            own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, stdout=found[rank], stderr=errors[rank], env=own)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        deadline = time.monotonic() + SECONDS
        for rank, (process, file) in enumerate(zip(processes, errors, strict=True)):
            try:
                status = process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} did not end within {SECONDS:g} s") from None
            if status:
                file.seek(0)
                said = [text.strip() for text in file if "Error: " in text]
                raise AssertionError(f"rank {rank}: {[f'status {status}', *said][-1]}")
        found[0].seek(0)
        # Libraries, too, write there, and before.
        return found[0].read().strip().rpartition("\n")[2]


def alone(kind: str, device: torch.device) -> str:
    """Reduce, or send to itself, on one rank; return nothing to say."""
    store, numbers = dist.HashStore(), torch.randn(_NUMEL, device=device)
    # Over cupy, gloo is what carries the rest.
    backend = "nccl" if kind == TORCH else "gloo"
    limit = timedelta(seconds=_STEP)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=limit)
    got = numbers.clone() if kind == TORCH else torch.full_like(numbers, torch.nan)
    if kind == TORCH:
        dist.all_reduce(got)
    else:
        assert dist.group.WORLD is not None
        host = GlooTransport(dist.group.WORLD)
        transport = NcclTransport(host, CupyBackend(device), timeout=_STEP)
        transport.exchange([Message(0, numbers)], [Message(0, got)], "the check", _STEP)
        transport.close()
    if not torch.equal(got, numbers):
        raise AssertionError(f"NCCL of {kind}: what arrived differs from what was sent")
    dist.destroy_process_group()
    return ""


def together(kind: str, device: torch.device) -> str:
    """Reduce by Sum and Adasum on every rank; return the times and the transport."""
    # None where the ranks are the CPU's: they use what ADASUM_TRANSPORT asks for.
    over: dict[str, TransportName] = {TORCH: "auto", CUPY: "nccl"}
    transport = over.get(kind)
    group = collectives.init(timeout=_STEP, transport=transport)
    timings = []
    inputs = [
        torch.randn(_NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(group.size)
    ]
    for op in (collectives.Sum, Adasum):
        tensor = inputs[group.rank].float().to(device)
        begin = time.perf_counter()
        group.all_reduce(tensor, op, algorithm="rd")
        found = tensor.cpu().double()
        milliseconds = (time.perf_counter() - begin) * 1e3
        want = expected(inputs, op is Adasum)
        error = ((found - want).norm() / want.norm()).item()
        # A handful of float32 roundings a level.
        if not error <= 10 * group.size * torch.finfo(torch.float32).eps:
            raise AssertionError(f"{op} over {group.transport}: relative error {error:.2g}")
        timings.append(f"{op} {tensor.nbytes / 2**20:.1f} MiB in {milliseconds:.1f} ms")
    collectives.shutdown()
    used = type(group.transport).__name__
    return f"{', '.join(timings)}, right to {error:.1g}, over {used}"


def expected(inputs: Sequence[Tensor], adasum: bool) -> Tensor:
    """Return the sum or the Adasum of a power of two of vectors: adjacent ones, then pairs."""
    level = [each.float().double() for each in inputs]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [kernels.adasum_reference(a, b) if adasum else a + b for a, b in pairs]
    return level[0]


def main(kind: str) -> None:
    """Run this process's rank."""
    device = torch.device("cpu")
    if kind != CPU:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    run = together if int(os.environ["WORLD_SIZE"]) > 1 else alone
    print(run(kind, device), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
