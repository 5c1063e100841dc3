"""How far Adasum of nearly opposed vectors is from exact arithmetic, by algorithm, as a table.

    python -m tests.accuracy --ranks 8

Rank r has (-1)^r x + delta y_r, of random x and y_r. Errors are in L2 norm beside the result's, in
eps of the dtype. The spread is the largest (sum |c_i| |g_i|)^2 / |v|^2 of the tree's results v =
sum c_i g_i. What is exact has 60 decimal digits.
"""

from __future__ import annotations

import argparse
import decimal
from collections.abc import Sequence
from decimal import Decimal

import torch

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


def exact(vectors: Sequence[torch.Tensor]) -> tuple[list[Decimal], Decimal]:
    """Return Adasum of the vectors and the spread."""
    values = [[Decimal(x) for x in vector.double().tolist()] for vector in vectors]
    norms = [_dot(value, value).sqrt() for value in values]
    coefficients = [[Decimal(i == j) for j in range(len(values))] for i in range(len(values))]
    spread, left = Decimal(1), 0
    for left, right, p, q in balanced_tree(len(values)):
        a, b = values[left], values[right]
        dot = _dot(a, b)
        alpha = 1 - Decimal(p) / (p + q) * dot / _dot(a, a)
        beta = 1 - Decimal(q) / (p + q) * dot / _dot(b, b)
        pairs = zip(a, b, strict=True)
        values[left] = [alpha * x + beta * y for x, y in pairs]
        both = zip(coefficients[left], coefficients[right], strict=True)
        coefficients[left] = [alpha * x + beta * y for x, y in both]
        length = sum(abs(c) * norm for c, norm in zip(coefficients[left], norms, strict=True))
        spread = max(spread, length * length / _dot(values[left], values[left]))
    return values[left], spread


def error(result: torch.Tensor, want: Sequence[Decimal]) -> float:
    """Return the result's error beside the norm of what is wanted, in eps of its dtype."""
    found = [Decimal(x) for x in result.double().tolist()]
    off = [x - y for x, y in zip(found, want, strict=True)]
    relative = (_dot(off, off) / _dot(want, want)).sqrt()
    return float(relative) / torch.finfo(result.dtype).eps


def _dot(a: Sequence[Decimal], b: Sequence[Decimal]) -> Decimal:
    return sum((x * y for x, y in zip(a, b, strict=True)), Decimal(0))


def reduce(vectors: Sequence[torch.Tensor], algorithm: str) -> torch.Tensor:
    """Return what the ranks, which are threads, make of the vectors."""

    def job(group: Group) -> torch.Tensor:
        return group.all_reduce(vectors[group.rank].clone(), Adasum, algorithm=algorithm)

    return run_threads(len(vectors), job)[0]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    ranks = parser.parse_args(arguments).ranks
    print("| dtype | delta | spread | " + " | ".join(ALGORITHMS) + " |")
    print("|---|---|---|" + "---|" * len(ALGORITHMS))
    decimal.getcontext().prec = 60
    for dtype in DTYPES:
        for delta in DELTAS:
            # Smaller ones are lost where the vectors are rounded to the dtype.
            if delta >= torch.finfo(dtype).eps / 2:
                vectors = inputs(ranks, delta, dtype)
                want, spread = exact(vectors)
                errors = (error(reduce(vectors, name), want) for name in ALGORITHMS)
                cells = " | ".join(f"{each:.2g}" for each in errors)
                print(f"| {str(dtype)[6:]} | {delta:.0e} | {spread:.1e} | {cells} |")


if __name__ == "__main__":
    main()
