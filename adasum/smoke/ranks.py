"""Ranks of the smoke test over NCCL: torch's own, and cupy's.

One rank alone shows that the library loads, makes a communicator and runs a kernel. Several reduce
by Sum and Adasum, each on a GPU of its own, and are held against float64.
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
from collectives.transport import GlooTransport, Message, NcclTransport

TORCH, CUPY = "torch", "cupy"
# For all ranks, and for a step: a rank that waits for one that is gone says so within the first.
SECONDS, _STEP = 90.0, 40.0
_NUMEL = 300_001


class NotInstalledError(ImportError):
    """What carries the messages is not there."""


def start(kind: str, ranks: int) -> None:
    """Run a power of two of processes of this module, each in the caller's process group.

    Raises:
        AssertionError: One failed, with the last line it wrote.
        NotInstalledError: There is no cupy.
    """
    if kind == CUPY and importlib.util.find_spec("cupy") is None:
        raise NotInstalledError("cupy is not installed")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "adasum.smoke.ranks", kind]
    common = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    with ExitStack() as stack:
        errors = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(ranks)]
        processes = []
        for rank, file in enumerate(errors):
            own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file, env=own)
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


def alone(kind: str, device: torch.device) -> None:
    """Reduce, or send to itself, on one rank."""
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
        transport = NcclTransport(host, store, device, timeout=_STEP)
        transport.exchange([Message(0, numbers)], [Message(0, got)], "the smoke test", _STEP)
        transport.close()
    if not torch.equal(got, numbers):
        raise AssertionError(f"NCCL of {kind}: what arrived differs from what was sent")
    dist.destroy_process_group()


def together(kind: str, device: torch.device) -> None:
    """Reduce by Sum and Adasum on every rank."""
    group = collectives.init(timeout=_STEP, transport="nccl" if kind == CUPY else "auto")
    inputs = [
        torch.randn(_NUMEL, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
        for rank in range(group.size)
    ]
    for op in (collectives.Sum, Adasum):
        tensor = inputs[group.rank].float().to(device)
        group.all_reduce(tensor, op, algorithm="rd")
        want = _tree(inputs, op is Adasum)
        error = ((tensor.cpu().double() - want).norm() / want.norm()).item()
        # A handful of float32 roundings a level.
        if not error <= 10 * group.size * torch.finfo(torch.float32).eps:
            raise AssertionError(f"{op} over NCCL of {kind}: relative error {error:.2g}")
    collectives.shutdown()


def _tree(inputs: Sequence[Tensor], adasum: bool) -> Tensor:
    """Return the sum or the Adasum of a power of two of vectors: adjacent ones, then pairs."""
    level = [each.float().double() for each in inputs]
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [kernels.adasum_reference(a, b) if adasum else a + b for a, b in pairs]
    return level[0]


def main(kind: str) -> None:
    """Run this process's rank."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    (together if int(os.environ["WORLD_SIZE"]) > 1 else alone)(kind, device)


if __name__ == "__main__":
    main(sys.argv[1])
