"""What ranks run in the optimizer tests, as threads or as processes."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import Tensor

import adasum as hvd
from adasum import DistributedOptimizer
from tests.adasum.definition import OPTIMIZERS, flat, loss_of, make_model, relative_error, tree

OPS = {"Sum": hvd.Sum, "Average": hvd.Average, "Adasum": hvd.Adasum}


def train(op: str, kind: str, passes: int, steps: int, **options: Any) -> Tensor:
    """Parameters [steps, P] after each step of this rank."""
    model = make_model()
    optimizer = DistributedOptimizer(
        OPTIMIZERS[kind](model.parameters()),
        model.named_parameters(),
        op=OPS[op],
        backward_passes_per_step=passes,
        **options,
    )
    rows = []
    for step in range(steps):
        optimizer.zero_grad()
        for turn in range(passes):
            loss_of(model, hvd.rank(), step, turn).backward()
        optimizer.step()
        rows.append(flat(model))
    return torch.stack(rows)


def process_job(rank: int, seed: int, bounds: tuple[int, ...]) -> dict[str, Any]:
    """Everything that one start of processes computes; the test checks the results."""
    hvd.init(timeout=60.0)
    out: dict[str, Any] = {"locality": (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size())}
    vectors = inputs(hvd.size(), seed, bounds[-1])
    for name, dtype in DTYPES.items():
        mine = [v.to(dtype) for v in vectors][rank]
        pieces = [mine[low:high].clone() for low, high in itertools.pairwise(bounds)]
        grouped = hvd.grouped_allreduce(pieces, op=hvd.Adasum, name=f"grouped {name}")
        out[f"grouped {name}"] = torch.cat(grouped)
        out[f"whole {name}"] = hvd.allreduce(mine, op=hvd.Adasum, name=f"whole {name}")
    # Larger than what "rd" is chosen for, so vector halving runs between processes.
    large = [v.float().repeat(80) for v in vectors]
    assert hvd.Adasum.algorithm(large[0].nbytes, hvd.size()) != "rd"
    reduced = hvd.allreduce(large[rank], op=hvd.Adasum)
    out["large"] = reduced.double().sum().item()
    out["large error"] = relative_error(reduced, tree(large))
    out["average"] = hvd.allreduce(vectors[rank])
    out["gathered"] = hvd.allgather(torch.full((rank + 1, 2), float(rank)))
    out["objects"] = hvd.allgather_object({"rank": rank, "list": [1, "two", None]})
    if hvd.size() <= 4:
        for op, kind, passes in TRAJECTORIES:
            out[f"{op} {kind} {passes}"] = train(op, kind, passes, STEPS)
    hvd.barrier()
    hvd.shutdown()
    # As numpy arrays, which travel by value: a tensor would travel as a handle to this process.
    return {k: v.double().numpy() if isinstance(v, Tensor) else v for k, v in out.items()}


DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
STEPS = 4
# The other combinations run with ranks as threads.
TRAJECTORIES = [("Adasum", kind, passes) for kind in OPTIMIZERS for passes in (1, 2)]
TRAJECTORIES += [("Average", "adamw", 1), ("Sum", "momentum", 2)]


def inputs(size: int, seed: int, numel: int) -> list[Tensor]:
    """Return one float64 vector a rank, with a part in common."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(numel, generator=generator, dtype=torch.float64)
    return [
        common + torch.randn(numel, generator=generator, dtype=torch.float64) for _ in range(size)
    ]
