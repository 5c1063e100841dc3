"""GPU memory that all GPUs of one node can access, allocated by torch's symmetric memory."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import CollectiveTimeoutError, TransportError
from kernels.gpu.node_kernels import MULTIPROCESSORS, Node, pad_bytes

# The memory behind the pads starts at a whole line, so that vectors of all dtypes are aligned.
_LINE = 256
# CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the CUDA driver.
_NATIVE_ATOMICS = 3


class NodeMemory:
    """One allocation on each rank's GPU, which kernels of all ranks of its node read and write.

    Making one is a collective of all ranks; the ranks of each node share memory. If one rank cannot
    allocate its memory, all ranks raise TransportError with the reason.

    Args:
        nbytes: Bytes of memory per GPU.
        process_group: The process group of the node's ranks.
        device: This rank's GPU.
        timeout: Seconds that each wait for a peer in a launch may take.
        gather: Returns the arguments of all ranks of all nodes, by rank.
        node_ranks: The ranks of this rank's node, which have consecutive numbers.
        names: Their names in errors.

    Attributes:
        tensor: This rank's memory, as bytes, uninitialised.
        node: Launches the kernels.
        node_ranks: As given.
        peers: The node's other ranks.
    """

    def __init__(
        self,
        nbytes: int,
        process_group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        gather: Callable[[Any], list[Any]],
        node_ranks: Sequence[int],
        names: Sequence[int],
    ) -> None:
        self.node_ranks, self._names = node_ranks, names
        pads = -(-pad_bytes(process_group.size()) // _LINE) * _LINE
        whole, addresses = allocate(pads + nbytes, pads, process_group, device, gather, node_ranks)
        self.tensor = whole[pads:]
        buffers = [address + pads for address in addresses]
        self.node = Node(process_group.rank(), buffers, addresses, device, timeout)
        self.peers = tuple(rank for rank in node_ranks if rank != node_ranks[self.node.rank])
        # Launches are on another stream than the copies that fill the node's tables.
        cuda.synchronize(device)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return a contiguous tensor's offset in bytes; None if it is elsewhere or misaligned."""
        start = tensor.data_ptr() - self.tensor.data_ptr()
        inside = start >= 0 and start + tensor.nbytes <= self.tensor.nbytes
        return start if inside and start % 16 == 0 else None

    def check(self) -> None:
        """Raise CollectiveTimeoutError if a launch timed out; later launches did nothing."""
        try:
            self.node.check(self._names)
        except TimeoutError as error:
            raise CollectiveTimeoutError(str(error)) from None


def allocate(
    nbytes: int,
    pads: int,
    group: dist.ProcessGroup,
    device: torch.device,
    gather: Callable[[Any], list[Any]],
    node_ranks: Sequence[int],
) -> tuple[torch.Tensor, list[int]]:
    """Return new memory, as bytes, and the addresses of the memory of all ranks of the node.

    The addresses are valid in this process. The first `pads` bytes are zeros on all ranks. Ranks
    report failures to each other, since torch's rendezvous would wait for ranks that have failed.
    """
    whole: Any = None
    together = partial(_together, device=device, gather=gather)

    def empty() -> None:
        nonlocal whole
        memory = _symmetric_memory()
        if lack := _lack_of(device):
            raise RuntimeError(lack)
        # Not from torch's pool (torch.distributed._symmetric_memory.empty): a reused block keeps
        # the rendezvous of its earlier tensor, while another rank may still hold that tensor and
        # use a new block.
        with cuda.device(device):
            whole = memory.empty_strided_p2p((nbytes,), (1,), torch.uint8, device)
            whole[:pads].zero_()
            # The pads are zeros before another rank's launch reads them.
            cuda.synchronize(device)

    places = together(empty)[node_ranks[0] : node_ranks[-1] + 1]

    def require_access() -> None:
        if lack := _lack_between(places):
            raise RuntimeError(lack)

    # Each node finds out for itself.
    together(require_access)
    addresses: list[int] = []

    def rendezvous() -> None:
        handle = _symmetric_memory().rendezvous(whole, group.group_name)
        # torch may place the memory inside a larger block, at the same offset on all ranks.
        offset = whole.data_ptr() - handle.buffer_ptrs[handle.rank]
        addresses.extend(address + offset for address in handle.buffer_ptrs)

    together(rendezvous)
    return whole, addresses


def _symmetric_memory() -> Any:
    from torch.distributed._symmetric_memory import _SymmetricMemory

    return _SymmetricMemory


def _together(
    job: Callable[[], None], device: torch.device, gather: Callable[[Any], list[Any]]
) -> list[tuple[str, int, str]]:
    """Do a job on all ranks; raise TransportError on all of them if it failed on any.

    Returns each rank's host, and the number and the UUID of its GPU.
    """
    lack = ""
    try:
        job()
    except (ImportError, AttributeError, RuntimeError) as error:
        # torch's C++ stack follows the first line.
        lack = str(error).strip().split("\n", 1)[0] or type(error).__name__
    gpu = "" if lack else str(cuda.get_device_properties(device).uuid)
    said = gather([lack, socket.gethostname(), device.index or 0, gpu])
    lacks: dict[str, list[str]] = {}
    for rank, (text, *_) in enumerate(said):
        if text:
            lacks.setdefault(text, []).append(f"rank {rank}")
    if lacks:
        reasons = "; ".join(f"{', '.join(ranks)}: {text}" for text, ranks in lacks.items())
        raise TransportError(
            f"torch's symmetric memory on {device} is not available to these ranks: {reasons}"
        )
    return [(host, number, gpu) for _, host, number, gpu in said]


def _lack_of(device: torch.device) -> str:
    """Return why this GPU cannot run the kernels; "" if it can."""
    count = cuda.get_device_properties(device).multi_processor_count
    if count < MULTIPROCESSORS:
        return (
            f"{device} has {count} multiprocessors, and the programs of a launch, which wait for "
            f"each other, need {MULTIPROCESSORS}"
        )
    return ""


def _lack_between(places: Sequence[tuple[str, int, str]]) -> str:
    """Return why GPUs, given by host, number and UUID, cannot share memory; "" if they may."""
    if len({host for host, *_ in places}) > 1:
        return "they are on several hosts"
    numbers = sorted({number for _, number, _ in places})
    if len(numbers) < len({gpu for *_, gpu in places}):
        return (
            "ranks call different GPUs by one number, so that the driver cannot be asked for "
            "native atomics between them: let each rank see all GPUs of the node "
            "(CUDA_VISIBLE_DEVICES)"
        )
    pairs = [(a, b) for a in numbers for b in numbers if a != b]
    try:
        for a, b in pairs:
            if not _has_native_atomics(a, b):
                return f"cuda:{a} has no native atomics in the memory of cuda:{b}"
    except OSError as error:
        return f"the CUDA driver cannot be asked: {error}"
    return ""


def _has_native_atomics(source: int, target: int) -> bool:
    """Return whether the first GPU's atomics work in the second one's memory, as over NVLink.

    The kernels only load and store there. But CUDA's memory model requires native atomics if two
    GPUs access one word in system scope, and the signals' stores are such accesses.
    """
    driver, value = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
    failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(value), _NATIVE_ATOMICS, source, target)
    return not failed and bool(value.value)
