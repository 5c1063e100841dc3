"""The arguments of `init`, and the choice among available transports."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.distributed as dist

import kernels
from collectives import validation
from collectives.call import Call
from collectives.errors import TransportError
from collectives.execution.all_reduce import staging_bytes
from collectives.negotiation import negotiate_by_messages
from collectives.schedules.auto import sum_algorithm
from collectives.schedules.topology import Topology
from collectives.transport import GlooTransport, NcclTransport, Transport, load_nccl
from collectives.transport.base import gather_objects
from collectives.transport.host import on_host
from collectives.transport.host_memory import host_place, share_memory
from collectives.transport.nccl.backend import TorchBackend
from collectives.transport.nccl.cupy_backend import CupyBackend, shared_stream
from collectives.transport.process_groups import has_nccl

# `BackendInfo.cpu_path` if the compiled C kernels are used.
_COMPILED = "compiled"
# The report names the algorithm that `auto` chooses for each of these sizes.
_SIZES = {"4 KiB": 2**12, "1 MiB": 2**20, "64 MiB": 2**26}
# Seconds. If one rank validates or saves for longer, the user must pass `timeout`.
TIMEOUT = 300.0
# The transports, described in `init`.
TransportName: TypeAlias = Literal["auto", "gloo", "shm", "nccl"]
_CHOICES = get_args(TransportName)


def transport_choice(transport: str | None) -> str:
    """Return the argument, or ADASUM_TRANSPORT, or "auto"; raise ValueError for others."""
    source, choice = "transport", transport
    if choice is None:
        source, choice = "ADASUM_TRANSPORT", os.environ.get("ADASUM_TRANSPORT") or "auto"
    if choice not in _CHOICES:
        raise ValueError(f"{source} must be one of {', '.join(_CHOICES)}, got {choice!r}")
    return choice


class Settings(NamedTuple):
    """The arguments of `init`; None for missing ones."""

    timeout: float | None = None
    process_group: dist.ProcessGroup | None = None
    transport: str | None = None

    def checked(self) -> Settings:
        """Return the arguments, checked, with defaults for missing ones."""
        timeout = TIMEOUT if self.timeout is None else self.timeout
        validation.timeout(timeout)
        if self.process_group is not None:
            check_process_group(self.process_group)
        return Settings(timeout, self.process_group, transport_choice(self.transport))

    def require_same(self, first: Settings) -> None:
        """Raise ValueError if an argument that is not None differs from the first call's."""
        for name, given, value, earlier in zip(
            self._fields, self, self.checked(), first, strict=True
        ):
            if given is not None and value != earlier:
                raise ValueError(
                    f"{name} is {value!r} in a second call of init, and was {earlier!r} in the "
                    "first: leave it out, or call shutdown() before"
                )


def check_process_group(process_group: object) -> None:
    """Raise TypeError unless this is a process group that this rank is in."""
    if not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        is_mesh = hasattr(process_group, "get_group")
        raise TypeError(
            "process_group must be a torch.distributed.ProcessGroup that this rank is in, got "
            f"{type(process_group).__name__}" + (": pass mesh.get_group(name)" if is_mesh else "")
        )


@functools.cache
def version() -> str:
    """Return the library's version and a hash of its sources, for ranks to compare."""
    packages = [Path(__file__).parents[1], Path(kernels.__file__).parent]
    files = (file for each in packages for file in sorted(each.rglob("*.py")))
    digest = hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=4)
    return f"{kernels.__version__} ({digest.hexdigest()})"


def connect(gloo: GlooTransport, timeout: float, start: Call) -> Transport:
    """Return the chosen transport: `gloo`, with shared memory and NCCL added to it.

    `start` is the call that starts the group; its option `transport` is a `transport_choice`.

    Raises:
        CollectiveMismatchError: The ranks' options differ. Raised on all ranks.
        TransportError: The choice is not available. Raised on all ranks.
    """
    if gloo.size == 1:
        check_alone(start.options["transport"])
        return _with_torchs_nccl(gloo, timeout)
    negotiate_by_messages(start, gloo, timeout)
    gather = partial(gather_objects, transport=gloo, timeout=timeout)
    choice: str = start.options["transport"]
    host: Transport = gloo
    if choice != "gloo":
        shared = share_memory(gloo.rank, gloo.size, host_place(), gather)
        if choice == "shm":
            _check_shared(shared.near)
        host = on_host(gloo, shared)
    with ExitStack() as failed:
        failed.callback(host.close)
        _require_alike(gather(kernels.backend_info().cpu_path))
        host = _with_torchs_nccl(host, timeout)
        if choice == "nccl":
            _check_gpus(gather(_gpu_report()))
            device = torch.device("cuda", torch.cuda.current_device())
            backend = CupyBackend(device, stream=shared_stream(device))
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
    """Raise TransportError if a single rank chooses NCCL but cannot use it."""
    if choice == "nccl":
        _check_gpus([_gpu_report()])


def _require_alike(paths: Sequence[str]) -> None:
    """Raise TransportError if only some ranks use compiled code for CPU tensors.

    Its results and torch's may differ in the last bit, and all ranks must have the same bits.
    paths: each rank's `BackendInfo.cpu_path`.
    """
    lacking = [rank for rank, path in enumerate(paths) if path != _COMPILED]
    if 0 < len(lacking) < len(paths):
        raise TransportError(
            f"ranks {lacking} cannot compute on CPU tensors in compiled code, as the other ranks "
            f"do: rank {lacking[0]} has {paths[lacking[0]]}; install the package there with a C "
            "compiler, or set ADASUM_CPU_KERNELS=torch on all ranks"
        )


def _check_shared(near: Sequence[Sequence[int]]) -> None:
    """Raise TransportError if any two ranks share no memory; `near` is as in `Shared`."""
    for rank, peers in enumerate(near):
        if unshared := sorted({*range(len(near))} - {*peers}):
            raise TransportError(
                f'transport="shm": rank {rank} shares no memory with ranks {unshared}: they are on '
                "different hosts, or of other users or pid namespaces, or the system refused it; "
                'transport="auto" uses gloo there'
            )


def _check_gpus(reports: Sequence[Sequence[Any]]) -> None:
    """Raise TransportError if any rank cannot use NCCL; `reports` are the ranks' `_gpu_report`s."""
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


def _gpu_report() -> list[Any]:
    """Return this rank's obstacle to NCCL or "", its GPU's UUID, and whether ranks may share it.

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


def report(transport: Transport, choice: str, hosts: Sequence[int], topology: Topology) -> str:
    """Return the line that a new group logs: its transports, algorithms and kernels.

    choice: from `transport_choice`; hosts: by rank, a number for its host.
    """
    where = f"rank {transport.rank} of {transport.size} on {len(set(hosts))} host(s)"
    said = [f"transport={choice!r}: {transport!r}"]
    if transport.size > 1:
        chosen = {name: sum_algorithm("cpu", nbytes, topology) for name, nbytes in _SIZES.items()}
        listed = ", ".join(f"{spec} at {name}" for name, spec in chosen.items())
        said.append(f"sums of CPU tensors by {listed}")
        if transport.shares_gpu_memory(torch.device("cuda")) and staging_bytes():
            most = staging_bytes() >> 20
            said.append(f"CUDA tensors up to {most} MiB in symmetric memory where GPUs allow it")
    if transport.sums_on_gpu:
        nccl = f"{load_nccl().get_version()} by cupy"
    elif dist.is_available() and dist.is_nccl_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version())) + " of torch"
    else:
        nccl = "none in this torch"
    said += [f"CPU kernels {kernels.backend_info().cpu_path}", f"NCCL {nccl}"]
    return f"{where}: {'; '.join(said)}"
