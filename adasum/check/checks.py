"""The checks of this machine: their computations and numbers of ranks.

Each check raises if something is wrong, or returns the text for its line.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import collectives
import kernels
from adasum.reducer import Adasum
from collectives.bootstrap.transport_selection import TransportName
from collectives.transport import load_nccl

# Odd, so that every kernel has a tail.
NUMEL = 300_001
# Timeout of a collective's step, in seconds: within it a waiting rank reports a lost one.
_STEP = 40.0
NO_GPU = "torch sees no GPU here"


class Check(NamedTuple):
    """A function, and the number of ranks that run it, each in a process."""

    run: Callable[[], str]
    ranks: int = 1


def checks() -> dict[str, Check]:
    """Return the checks of this machine by name, in the order of their lines."""
    found = {"two ranks": Check(partial(reduce, "cpu"), 2)}
    if not torch.cuda.is_available():
        return found
    found["kernels"] = Check(run_kernels)
    most = 1 << min(torch.cuda.device_count(), 8).bit_length() - 1
    transports: dict[str, TransportName] = {"torch": "auto", "cupy": "nccl"}
    if importlib.util.find_spec("cupy") is None:
        del transports["cupy"]
    for name, transport in transports.items():
        found[f"NCCL of {name}"] = Check(partial(nccl_alone, name))
        if most > 1:
            together = partial(reduce, "cuda", transport)
            found[f"NCCL of {name}, ranks: {most}"] = Check(together, most)
    return found


def reduce(device: str, transport: TransportName | None = None) -> str:
    """Reduce by Sum and Adasum, and compare with float64; return a text with the transport."""
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    group = collectives.init(timeout=_STEP, transport=transport)
    generators = [torch.Generator().manual_seed(rank) for rank in range(group.size)]
    inputs = [torch.randn(NUMEL, generator=each) for each in generators]
    for op in (collectives.Sum, Adasum):
        found = inputs[group.rank].clone().to(device)
        group.all_reduce(found, op, algorithm="rd")
        # A few float32 roundings per level.
        bound = 10 * group.size * torch.finfo(torch.float32).eps
        want = expected(inputs, op is Adasum)
        _compare(f"{op} over {group.transport}", found.cpu(), want, bound)
    collectives.shutdown()
    return f"Sum and Adasum over {type(group.transport).__name__}"


def expected(inputs: Sequence[Tensor], adasum: bool) -> Tensor:
    """Return the sum or Adasum of vectors by a balanced tree; their number is a power of two."""
    join, level = kernels.adasum_reference if adasum else torch.add, [*map(Tensor.double, inputs)]
    while len(level) > 1:
        level = [join(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def run_kernels(device: str = "cuda") -> str:
    """Compare packing, a sum, Adasum and dot products with float64, in all dtypes."""
    for dtype in kernels.DTYPES:
        a, b = (torch.randn(NUMEL, device=device).to(dtype) for _ in range(2))
        results = {
            "pack": (kernels.pack([a, b]), kernels.pack_reference([a, b])),
            "sum_n": (kernels.sum_n([a, b]), kernels.sum_n_reference([a, b])),
            "adasum": (kernels.adasum(a, b), kernels.adasum_reference(a, b)),
            "gram": (kernels.gram([a, b]), kernels.gram_reference([a, b])),
        }
        for name, (got, want) in results.items():
            # An element is rounded once to its dtype, after some 64 additions in float64.
            bound = torch.finfo(dtype).eps + 64 * torch.finfo(torch.float64).eps
            _compare(f"{name} of {dtype}", got, want, bound)
    return ""


def nccl_alone(of: str) -> str:
    """Reduce on one rank, to see NCCL of torch or cupy load, connect and run a kernel."""
    numbers = torch.randn(NUMEL, device="cuda")
    got = torch.full_like(numbers, torch.nan)
    if of == "torch":
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(got.copy_(numbers))
        dist.destroy_process_group()
    else:
        nccl, stream = load_nccl(), torch.cuda.current_stream().cuda_stream
        communicator = nccl.NcclCommunicator(1, nccl.get_unique_id(), 0)
        how = nccl.NCCL_FLOAT32, nccl.NCCL_SUM, stream
        communicator.allReduce(numbers.data_ptr(), got.data_ptr(), NUMEL, *how)
        torch.cuda.synchronize()
        communicator.destroy()
    _compare(f"NCCL of {of}", got, numbers, 0.0)
    return ""


def _compare(what: str, got: Tensor, want: Tensor, bound: float) -> None:
    """Raise AssertionError unless |got - want| <= bound times the largest |want|, everywhere."""
    error = (got.double() - want).abs().max().item()
    # A NaN is not below anything, so it is found.
    if not error <= bound * want.abs().max().item():
        raise AssertionError(f"{what}: off by {error:.2g}, and at most {bound:.2g} is right")
