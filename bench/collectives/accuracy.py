"""The error of Adasum of nearly opposed vectors, by algorithm, as a table.

    python -m bench.collectives.accuracy --ranks 8

Rank r has (-1)^r x + delta y_r, with random x and y_r. Errors are relative to the result's L2 norm,
in eps of the dtype. The spread is the largest (sum |c_i| |g_i|)^2 / |v|^2 of the tree's results
v = sum c_i g_i.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from unittest import mock

import numpy as np
import torch

import kernels
from adasum import Adasum
from collectives import Group, run_threads
from collectives.schedules.halving import balanced_tree

NUMEL = 1000
DELTAS = (1.0, 1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)
ALGORITHMS = ("direct", "vhdd")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def inputs(ranks: int, delta: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return every rank's vector."""
    generator = torch.Generator().manual_seed(1)
    common, *own = torch.randn(ranks + 1, NUMEL, generator=generator, dtype=torch.float64)
    return [((-1) ** rank * common + delta * mine).to(dtype) for rank, mine in enumerate(own)]


def exact(vectors: Sequence[torch.Tensor]) -> np.ndarray:
    """Return the tree's Adasum by its formula, pair by pair.

    A result that is 10^7 times shorter than its pair loses 24 of a long double's 64 bits, which
    leaves enough for errors in units of the last bit of a float32.
    """
    parts = [vector.double().numpy().astype(np.longdouble) for vector in vectors]
    last = 0
    for left, right, p, q in balanced_tree(len(parts)):
        a, b = parts[left], parts[right]
        dot, weight = a @ b, np.longdouble(p) / (p + q)
        parts[left] = (1 - weight * dot / (a @ a)) * a + (1 - (1 - weight) * dot / (b @ b)) * b
        last = left
    return parts[last]


def distance(result: torch.Tensor, want: np.ndarray) -> float:
    """Return the relative error in L2 norm."""
    return float(np.linalg.norm(result.double().numpy() - want) / np.linalg.norm(want))


def reduce(vectors: Sequence[torch.Tensor], algorithm: str) -> torch.Tensor:
    """Return the all-reduce of the vectors over ranks that are threads."""

    def job(group: Group) -> torch.Tensor:
        return group.all_reduce(vectors[group.rank].clone(), Adasum, algorithm=algorithm)

    # By messages: ranks that share memory would take Gram matrices for any algorithm.
    with mock.patch("collectives.calls.plan_host_all_reduce", return_value=None):
        return run_threads(len(vectors), job)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    ranks = parser.parse_args(arguments).ranks
    print("| dtype | delta | spread | " + " | ".join(ALGORITHMS) + " |")
    print("|---|---|---|" + "---|" * len(ALGORITHMS))
    tree, spread = balanced_tree(ranks), torch.empty(1, dtype=torch.float64)
    for dtype in DTYPES:
        eps = torch.finfo(dtype).eps
        # Smaller ones are lost where the vectors are rounded to the dtype.
        for delta in (delta for delta in DELTAS if delta >= eps / 2):
            vectors = inputs(ranks, delta, dtype)
            want = exact(vectors)
            kernels.adasum_coefficients(
                kernels.gram(vectors, precise=True)[None], tree, spread=spread
            )
            errors = (distance(reduce(vectors, name), want) / eps for name in ALGORITHMS)
            cells = " | ".join(f"{each:.2g}" for each in errors)
            print(f"| {str(dtype)[6:]} | {delta:.0e} | {spread.item():.1e} | {cells} |")


if __name__ == "__main__":
    main()
