"""Select the transports of a group: what its ranks ask for, as far as it is available."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist

import kernels
from collectives.consistency.negotiation import negotiate_by_messages
from collectives.errors import TransportError
from collectives.execution.call import Call
from collectives.transport import (
    ConnectionTransport,
    GlooTransport,
    NcclTransport,
    Transport,
    load_nccl,
)
from collectives.transport.byte_gathering import gather_objects
from collectives.transport.connections.connect import KINDS, descriptors_of, neighbours
from collectives.transport.descriptors import shortage
from collectives.transport.nccl.calling_thread import shared_thread
from collectives.transport.nccl.cupy_backend import CupyBackend
from collectives.transport.nccl.torch_backend import TorchBackend
from collectives.transport.process_groups import has_nccl, store_of
from kernels.cpu.dispatch import use_torch

# `BackendInfo.cpu_path` where the compiled C kernels are used.
_COMPILED = "compiled"
# torch.distributed needs a descriptor for each peer, and these for event loops, listeners and
# connections to the store. A process that keeps a store needs one for each rank, and these. Torch
# 2.13 uses 5 and 11 of them; the rest is a reserve for other versions.
_GLOO_BESIDE, _STORE_BESIDE = 8, 16
# Whether a group of this process relies on compiled code: to change to torch's functions later
# would change its bits on this rank alone.
_promised = False
_logger = logging.getLogger(__name__)
# By choice: the kinds of connections that ranks open.
_KINDS: dict[str, tuple[str, ...]] = {
    "auto": KINDS,
    "gloo": (),
    "shm": ("shm",),
    "tcp": ("tcp",),
    "nccl": KINDS,
}


def transport_choice(transport: str | None) -> str:
    """Return the argument, else ADASUM_TRANSPORT, else "auto"; ValueError if that is unknown."""
    source, choice = "transport", transport
    if choice is None:
        source, choice = "ADASUM_TRANSPORT", os.environ.get("ADASUM_TRANSPORT") or "auto"
    if choice not in _KINDS:
        raise ValueError(f"{source} must be one of {', '.join(_KINDS)}, got {choice!r}")
    return choice


def connect(gloo: GlooTransport, timeout: float, start: Call) -> Transport:
    """Return the transport that the ranks ask for: `gloo`, with connections and NCCL added to it.

    The option `transport` of `start`, the call that starts the group, is a `transport_choice`.

    Raises:
        CollectiveMismatchError: The ranks' options differ. Raised on all ranks.
        TransportError: What they ask for is not available. Raised on all ranks.
    """
    if gloo.size == 1:
        check_alone(start.options["transport"])
        return _with_torchs_nccl(gloo, timeout)
    negotiate_by_messages(start, gloo, timeout)

    choice, store = start.options["transport"], store_of(gloo.process_group)
    kinds = _KINDS[choice]
    names = gather_objects(os.uname().nodename, gloo, timeout)
    local_size, short = names.count(names[gloo.rank]), ""
    if kinds:
        # Raise the limit for all connections, as far as the system allows. Only those at start are
        # required: the others are opened by the algorithms that use them.
        shortage(_descriptors(kinds, gloo.size, local_size))
        short = shortage(_descriptors(kinds, gloo.size, local_size, at_start=True))
    if short:
        kinds = ()
        _logger.warning("rank %d: %s; its messages go over gloo meanwhile", gloo.rank, short)
    opened = ConnectionTransport(gloo, timeout, kinds=kinds, store_host=_host_of(store))
    with contextlib.ExitStack() as failed:
        failed.callback(opened.close)
        peers = {*range(gloo.size)} - {gloo.rank}
        lacking = [
            sorted(peers - opened.connected_peers),
            sorted(peers - opened.memory_peers),
            short,
        ]
        missing = gather_objects(lacking, gloo, timeout)
        _check_demand(choice, missing)
        computing = [kernels.backend_info().cpu_path, _promised]
        _compute_alike(gather_objects(computing, gloo, timeout), gloo.rank)
        # The same class on all ranks, even on one without connections: splitting is a collective,
        # and has to make the same steps on all of them.
        connected = any(len(ranks) < len(peers) for ranks, *_ in missing)
        host = _with_torchs_nccl(opened if connected else gloo, timeout)
        if choice == "nccl":
            _check_gpus(gather_objects(_gpu_report(), gloo, timeout))
            device = torch.device("cuda", torch.cuda.current_device())
            backend = CupyBackend(store, device, thread=shared_thread(device))
            host = NcclTransport(host, backend, timeout=timeout)
        failed.pop_all()
    return host


def _with_torchs_nccl(host: Transport, timeout: float) -> Transport:
    """Return a transport that also carries CUDA tensors, if the process group has torch's NCCL."""
    group = host.process_group
    if group is None or not has_nccl(group):
        return host
    return NcclTransport(host, TorchBackend(group), timeout=timeout)


def check_alone(choice: str) -> None:
    """Raise TransportError if a group of one rank asks for NCCL and its machine has none."""
    if choice == "nccl":
        _check_gpus([_gpu_report()])


def _compute_alike(ranks: Sequence[Sequence[Any]], rank: int) -> None:
    """Let all ranks use compiled code for CPU tensors, or all of them torch's functions.

    Results of the two may differ in the last bit, and all ranks are to have the same bits. A
    TransportError where a rank has no compiled code, and another's other groups rely on it.

    ranks: For each rank `BackendInfo.cpu_path`, and whether other groups of that process rely on
        compiled code.
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


def require_room(
    size: int, local_size: int | None, choice: str, *, gloo: bool, store: bool = False
) -> None:
    """Raise the limit of file descriptors to what a group needs, before any rank waits for others.

    Args:
        size: How many ranks there are.
        local_size: How many of them are on this host, if known.
        choice: As `transport_choice` returns it.
        gloo: Whether torch.distributed has yet to connect the ranks; a TransportError if it cannot.
        store: Whether this process has yet to open the store, to which all ranks connect.
    """
    mesh = (size + _GLOO_BESIDE if gloo else 0) + (size + _STORE_BESIDE if store else 0)
    # No error yet if the limit is too low for our connections: `connect` checks that again, when it
    # knows which ranks share a host.
    shortage(mesh + _descriptors(_KINDS[choice], size, local_size or size))
    short = shortage(mesh)
    if short:
        raise TransportError(f"{size} ranks cannot be connected: {short}")


def _descriptors(
    kinds: Collection[str], size: int, local_size: int, *, at_start: bool = False
) -> int:
    """Return how many descriptors connections of these kinds need: all of them, or at start."""
    near = min(local_size, size) - 1 if "shm" in kinds else 0
    far = size - 1 - near if "tcp" in kinds else 0
    if at_start:
        far = min(far, len(neighbours(0, size)))
    return descriptors_of(near, far) if kinds else 0


def _check_demand(choice: str, missing: Sequence[Sequence[Any]]) -> None:
    """Raise TransportError if a rank lacks a connection that `choice` demands.

    missing: For each rank, the ranks to which it has no connection, those with which it shares no
    memory, and the text of `shortage`.
    """
    for rank, (_, _, short) in enumerate(missing):
        if choice in ("tcp", "shm") and short:
            raise TransportError(f'transport="{choice}": rank {rank}: {short}')
    for rank, (unreached, unshared, _) in enumerate(missing):
        if choice == "tcp" and unreached:
            raise TransportError(
                f'transport="tcp": rank {rank} has no connection to ranks {unreached}: the network '
                "refused it (GLOO_SOCKET_IFNAME names the interface to use); "
                'transport="auto" uses gloo there'
            )
        if choice == "shm" and unshared:
            raise TransportError(
                f'transport="shm": rank {rank} shares no memory with ranks {unshared}: they are on '
                'different hosts, or the system refused it; transport="auto" uses TCP there'
            )


def _check_gpus(reports: Sequence[Sequence[Any]]) -> None:
    """Raise TransportError if a rank cannot use NCCL. reports: every rank's `_gpu_report`."""
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
    """Return the host that keeps the ranks' store, as far as that can be found out."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return getattr(store, "host", None) or os.environ.get("MASTER_ADDR") or socket.gethostname()


def _gpu_report() -> list[Any]:
    """Return what this rank lacks for NCCL ("" if nothing), its GPU's UUID, and whether it shares.

    NCCL_MULTI_RANK_GPU_ENABLE allows ranks to share a GPU.
    """
    lack, gpu = "", ""
    try:
        load_nccl()
    except (ImportError, RuntimeError) as error:
        lack = str(error)
    if torch.cuda.is_available():
        gpu = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    return [lack, gpu, os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE", "0") != "0"]
