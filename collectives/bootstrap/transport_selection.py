"""Which transports a group gets: what its ranks ask for, and what can be had."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket

import torch
import torch.distributed as dist

import kernels
from collectives.consistency.description import Description
from collectives.consistency.messages import negotiate_by_messages
from collectives.errors import TransportError
from collectives.execution.executor import Workspace
from collectives.transport import (
    KINDS,
    ConnectionTransport,
    GlooTransport,
    HybridTransport,
    NcclTransport,
    Transport,
    load_nccl,
    open_connections,
    store_of,
)
from collectives.transport.byte_gathering import gather_bytes
from kernels.cpu.dispatch import use_torch

# What `BackendInfo.cpu_path` says where it is not torch.
_COMPILED = "compiled"
# Whether a group of several ranks was made that all computed so: this process has to go on.
_promised = False
_logger = logging.getLogger(__name__)
# The connections that a rank offers for each choice.
_KINDS = {
    "auto": KINDS,
    "gloo": (),
    "shm": ("shm",),
    "tcp": ("tcp",),
    "nccl": KINDS,
}


def transport_choice(transport: str | None) -> str:
    """Return the argument, else the environment variable ADASUM_TRANSPORT, else "auto".

    Raises:
        ValueError: Names the one that is wrong.
    """
    source, choice = "transport", transport
    if choice is None:
        source, choice = "ADASUM_TRANSPORT", os.environ.get("ADASUM_TRANSPORT") or "auto"
    if choice not in _KINDS:
        raise ValueError(f"{source} must be one of {', '.join(_KINDS)}, got {choice!r}")
    return choice


def check_start_options(gloo: GlooTransport, timeout: float, **options: bool) -> None:
    """Raise CollectiveMismatchError on all ranks where their options of `init` differ."""
    if gloo.size > 1:
        call = Description("init", options=options)
        negotiate_by_messages(call, gloo, "start-up", timeout, Workspace())


def connect(gloo: GlooTransport, timeout: float, choice: str) -> Transport:
    """Return `gloo` with the connections and the NCCL beside it that the ranks ask for.

    Raises:
        TransportError: On all ranks, where one demands what cannot be had.
    """
    if gloo.size == 1:
        return gloo

    def gather(data: bytes) -> list[bytes]:
        return gather_bytes(data, gloo, "start-up", timeout)

    store = store_of(gloo.process_group)
    toward = _host_of(store)
    kinds = _KINDS[choice]
    met = open_connections(gloo.rank, gloo.size, gather, timeout, kinds=kinds, toward=toward)
    host: Transport = gloo
    others = sorted(set(range(gloo.size)) - {gloo.rank})
    unlinked = [peer for peer in others if peer not in met.connections]
    near = {peer for peer, each in met.connections.items() if each.shares_memory}
    unshared = [peer for peer in others if peer not in near]
    said = json.dumps(
        [[choice, unlinked, unshared], [kernels.backend_info().cpu_path, _promised]]
    ).encode()
    told = [json.loads(data) for data in gather(said)]
    reports = [report for report, _ in told]
    with contextlib.ExitStack() as failed:
        if any(len(missing) < len(others) for _, missing, _ in reports):
            # Also on a rank without connections: splitting must be the same work on all.
            connections = ConnectionTransport(gloo.rank, gloo.size, *met)
            failed.callback(connections.close)
            host = HybridTransport(connections, gloo, kinds=kinds, toward=toward)
        _check_demands(reports)
        _compute_alike([computing for _, computing in told], gloo.rank)
        if any(demand == "nccl" for demand, _, _ in reports):
            said = json.dumps([_lacks_for_nccl(), _gpu(), _shares_gpus()]).encode()
            _check_gpus([json.loads(data) for data in gather(said)])
            host = NcclTransport(host, store, timeout=timeout)
        failed.pop_all()
    return host


def _compute_alike(ranks: list[tuple[str, bool]], rank: int) -> None:
    """ranks: what `BackendInfo.cpu_path` says there, and whether it has promised others "compiled".

    Compiled code and torch's functions differ in last bits, and all ranks are to have the same.
    """
    global _promised
    lacking = [i for i, (path, _) in enumerate(ranks) if path != _COMPILED]
    if not lacking:
        _promised = True
    if not lacking or len(lacking) == len(ranks):
        return
    why = f"rank {lacking[0]} has {ranks[lacking[0]][0]}"
    bound = [i for i, (path, promised) in enumerate(ranks) if path == _COMPILED and promised]
    if bound:
        raise TransportError(
            f"ranks {bound} compute on CPU tensors in compiled code, as other groups of theirs do, "
            f"and ranks {lacking} cannot: {why}; set ADASUM_CPU_KERNELS=torch on all ranks"
        )
    use_torch(why)
    if rank == lacking[0]:
        _logger.warning(
            "all ranks compute on CPU tensors by torch's functions, as ranks %s have to: %s",
            lacking,
            why,
        )


def _check_demands(reports: list[tuple[str, list[int], list[int]]]) -> None:
    """reports: every rank's choice, and the ranks it has no connection and no memory with."""
    for rank, (choice, unlinked, _) in enumerate(reports):
        if choice == "tcp" and unlinked:
            raise TransportError(
                f'transport="tcp": rank {rank} has no connection to ranks {unlinked}: one asked '
                "for gloo or shm, or the network refused it (GLOO_SOCKET_IFNAME names the "
                'interface to use); transport="auto" uses gloo there'
            )
    if any(choice == "shm" for choice, _, _ in reports):
        for rank, (_, _, unshared) in enumerate(reports):
            if unshared:
                raise TransportError(
                    f'transport="shm": rank {rank} shares no memory with ranks {unshared}: they '
                    "are on different hosts, or one asked for something else, or the system "
                    'refused it; transport="auto" uses TCP there'
                )


def _check_gpus(reports: list[tuple[str, str, bool]]) -> None:
    """reports: of every rank what it lacks for NCCL, its GPU, and whether NCCL may share that."""
    first: dict[str, int] = {}
    for rank, (lack, gpu, shares) in enumerate(reports):
        if lack:
            raise TransportError(f'transport="nccl": rank {rank}: {lack}')
        other = first.setdefault(gpu, rank)
        if other != rank and not shares:
            raise TransportError(
                f'transport="nccl": ranks {other} and {rank} have the same current GPU, {gpu}: '
                'call torch.cuda.set_device(int(os.environ["LOCAL_RANK"])) before init; with '
                "NCCL_MULTI_RANK_GPU_ENABLE=1 NCCL 2.30 and newer lets ranks share one"
            )


def _host_of(store: dist.Store) -> str:
    """Return the host that keeps the ranks' store, as far as it tells."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or socket.gethostname()


def _lacks_for_nccl() -> str:
    """Return what this rank needs before it can use NCCL; "" where it has all."""
    try:
        load_nccl()
    except (ImportError, RuntimeError) as error:
        return str(error)
    return ""


def _gpu() -> str:
    """Return the UUID of this rank's GPU; "" without one."""
    if not torch.cuda.is_available():
        return ""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)


def _shares_gpus() -> bool:
    return os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0"
