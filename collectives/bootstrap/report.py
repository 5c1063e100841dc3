"""The line that a group logs when it starts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

import kernels
from collectives.schedules.auto import sum_algorithm
from collectives.schedules.topology import Topology
from collectives.transport import Transport, load_nccl

# The line names the algorithm that `auto` takes for each of these: small, medium and large.
_SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "64 MiB": 2**26}


def report(transport: Transport, choice: str, hosts: Sequence[int], topology: Topology) -> str:
    """Return the line: the transport and why, `auto`'s algorithms, the CPU path, NCCL's version.

    choice: As `transport_choice` returns it. hosts: By rank, a number for its host.
    """
    where = f"rank {transport.rank} of {transport.size} on {len(set(hosts))} host(s)"
    said = [f"transport={choice!r}: {_way(transport)}"]
    if transport.size > 1:
        said.append(f"sums of CPU tensors by {_algorithms(topology)}")
    said += [f"CPU kernels {kernels.backend_info().cpu_path}", f"NCCL {_nccl(transport)}"]
    return f"{where}: {'; '.join(said)}"


def _way(transport: Transport) -> str:
    """Return how messages travel and, if any go over gloo, why."""
    if transport.size == 1:
        return "this rank is alone"
    way = repr(transport)
    return f"{way}, gloo where nothing faster was asked for or to be had" if "loo" in way else way


def _algorithms(topology: Topology) -> str:
    """Return what `auto` takes for each of `_SIZES` where messages are used."""
    chosen = {name: sum_algorithm("cpu", nbytes, topology) for name, nbytes in _SIZES.items()}
    return ", ".join(f"{spec} at {name}" for name, spec in chosen.items())


def _nccl(transport: Transport) -> str:
    if transport.sums_on_gpu:
        return f"{load_nccl().get_version()} by cupy"
    if not (dist.is_available() and dist.is_nccl_available()):
        return "none in this torch"
    return ".".join(map(str, torch.cuda.nccl.version())) + " of torch"
