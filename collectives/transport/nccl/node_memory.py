"""GPU memory that the GPUs of all ranks of one node reach, from torch's symmetric memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import cuda

from collectives.errors import CollectiveError, CollectiveTimeoutError, TransportError
from kernels.gpu.node_kernels import GIVEN_UP, Node, pad_bytes

# Vectors of all dtypes start at whole lines of memory behind the pads.
_LINE = 256
# More streams than torch has in a pool: 32 of each priority.
_POOL = 64


class NodeMemory:
    """One allocation on each rank's GPU, which kernels of all ranks read and write.

    Making one is a collective of all ranks of the process group. Before anything is launched all
    ranks must have made theirs.

    Attributes:
        tensor: This rank's memory, as bytes, uninitialised.
        node: Launches the kernels.
    """

    def __init__(
        self,
        nbytes: int,
        process_group: dist.ProcessGroup,
        device: torch.device,
        timeout: float,
        arrive: Callable[[], object],
    ) -> None:
        pads = -(-pad_bytes(process_group.size()) // _LINE) * _LINE
        whole, addresses = allocate(pads + nbytes, process_group, device, arrive)
        whole[:pads].zero_()
        self.tensor = whole[pads:]
        buffers = [address + pads for address in addresses]
        self.node = Node(process_group.rank(), buffers, addresses, device, timeout)
        # The pads are zeros before another rank's launch reads them.
        cuda.synchronize(device)
        # The error of each launch is copied here, without a wait.
        pinned = torch.cuda.is_available()
        self._error = torch.zeros(1, dtype=torch.int64, pin_memory=pinned)
        self._given_up = torch.full((1,), GIVEN_UP, dtype=torch.int64, pin_memory=pinned)

    def offset_of(self, tensor: torch.Tensor) -> int | None:
        """Return the bytes at which a contiguous tensor starts here; None if it does not."""
        start = tensor.data_ptr() - self.tensor.data_ptr()
        inside = start >= 0 and start + tensor.nbytes <= self.tensor.nbytes
        return start if inside and start % 16 == 0 else None

    def fetch_error(self) -> None:
        """Put a copy of the error on the current stream, behind a launch, for `check`."""
        self._error.copy_(self.node.error, non_blocking=True)

    def give_up(self) -> None:
        """End the launches that wait for a peer, and all later ones; does not wait for it."""
        # By the GPU's copy engine, on a stream that is not behind them.
        with cuda.device(self.tensor.device), cuda.stream(_free_stream()):
            self.node.error.copy_(self._given_up, non_blocking=True)

    def check(self) -> None:
        """Raise CollectiveTimeoutError if a launch waited in vain; later ones have done nothing."""
        why = self.node.describe(int(self._error[0]))
        if why:
            raise CollectiveTimeoutError(why)


def _free_stream() -> cuda.Stream:
    """Return a stream with nothing under way: torch hands out those of a pool, again and again."""
    for _ in range(_POOL):
        stream = cuda.Stream()
        if stream.query():
            break
    return stream


def allocate(
    nbytes: int, group: dist.ProcessGroup, device: torch.device, arrive: Callable[[], object]
) -> tuple[torch.Tensor, list[int]]:
    """Return new memory, as bytes, and the address of each rank's memory, in this process.

    `arrive` waits until all ranks call it; torch's own wait does not notice one that has failed.
    """
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        # The pool is the current GPU's, whichever thread calls.
        with cuda.device(device):
            whole = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
        arrive()
        handle: Any = symmetric_memory.rendezvous(whole, group.group_name)
        # torch's pool may place it inside of a larger block, alike on all ranks.
        offset = whole.data_ptr() - handle.buffer_ptrs[handle.rank]
        return whole, [address + offset for address in handle.buffer_ptrs]
    except CollectiveError:
        raise
    except (ImportError, AttributeError, RuntimeError) as error:
        raise TransportError(
            f"torch's symmetric memory on {device} cannot be had among these ranks: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
