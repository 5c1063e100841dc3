"""What a step costs the recorder, on a CPU: `python -m tests.adasum.gradient_recorder --cost`."""

from __future__ import annotations

import time

import torch

from adasum.gradient_recorder import GradientRecorder
from adasum.observer import ObservedGram
from collectives.schedules.halving import balanced_tree

# Layers, ranks and buckets: LeNet's, a ResNet-50's, and those of a transformer of 24 blocks.
CASES = ((8, 4, 1), (8, 8, 1), (161, 8, 4), (290, 8, 10), (290, 16, 10))
STEPS = 60


def cost_table() -> str:
    """Return the microseconds of CPU time that a step of some models' layers takes."""
    lines = ["| layers | ranks | buckets | µs a step |", "|---:|---:|---:|---:|"]
    for layers, ranks, buckets in CASES:
        lines.append(
            f"| {layers} | {ranks} | {buckets} | {_microseconds(layers, ranks, buckets):,.0f} |"
        )
    return "\n".join(lines)


def _microseconds(layers: int, ranks: int, buckets: int) -> float:
    """Return the CPU time of a step's calls of `after_gram`; gradients differ by step."""
    torch.set_num_threads(1)
    generator, recorder = torch.Generator().manual_seed(0), GradientRecorder()
    names = [[f"{b}.{i}" for i in range(b, layers, buckets)] for b in range(buckets)]
    steps = [[_gram(len(some), ranks, generator) for some in names] for _ in range(STEPS)]
    started = time.process_time()
    for grams in steps:
        for some, gram in zip(names, grams, strict=True):
            recorder.after_gram(some, gram)
    return 1e6 * (time.process_time() - started) / STEPS


def _gram(layers: int, ranks: int, generator: torch.Generator) -> ObservedGram:
    vectors = torch.randn(layers, ranks, 30, generator=generator, dtype=torch.float64)
    coefficients = torch.full((layers, ranks), 0.5, dtype=torch.float64)
    spread = torch.ones(layers, dtype=torch.float64)
    return ObservedGram(vectors @ vectors.mT, coefficients, spread, balanced_tree(ranks))
