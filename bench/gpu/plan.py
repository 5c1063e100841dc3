"""The stages, in order of worth: right on this machine, then the goals, then the rest."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from bench.gpu.machine import sanitizer
from bench.gpu.stages import Stage

# Several ranks on a GPU: NCCL's code for 2.30, and what it asks for.
SHARING = 23000
ONE_GPU = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "4"}
ROWS = ("projection", "gram", "packing", "reduction")
CHECK, NODE, RANKS, HOST = "check", "node-bench", "ranks-bench", "host-cost"
# Under the sanitizers all is many times slower: one element, a few tiles with a tail, and enough
# for several programs.
SIZES = ("1", "5003", "70001")
# torch then counts GPUs without starting CUDA, which would not survive the fork of a test's ranks.
_FORKS = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
_PYTEST = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider")


# What a change of makes timed rows, and those of ranks, old ones.
_KERNELS, _RANKS = ("kernels", "bench"), ("kernels", "collectives", "adasum", "bench")


def _tests(name: str, *paths: str, **options: Any) -> Stage:
    flags = ("--gpu", "-m", "gpu", "-v", "--tb=short", "--junitxml={out}/junit.xml")
    return Stage(name, (*_PYTEST, *paths, *flags), beside=True, **options)


def _kernel_tests() -> list[Stage]:
    """Return the tests of kernels in parts of nearly equal length: most of it Triton compiles."""
    parts = {
        "reduction": ["tests/kernels/test_reduction.py"],
        "gpu": ["tests/kernels/gpu", "tests/bench/gpu/test_sweep.py"],
        "compile": ["tests/kernels/torch_compile"],
        "projection": ["tests/kernels/test_projection.py", "tests/kernels/test_found_inf.py"],
    }
    ignored = [f"--ignore={path}" for paths in parts.values() for path in paths]
    parts["others"] = ["tests/kernels", *ignored]
    # An H200 took 270 s for all, in nine processes at once 43.
    return [
        _tests(f"tests-{name}", *paths, estimate=60.0, limit=300.0) for name, paths in parts.items()
    ]


def _pytest_rows(file: str, *flags: str) -> tuple[str, ...]:
    return (*_PYTEST, f"bench/kernels/bench_{file}.py", "--bench-gpu", *flags)


def _answers(file: str) -> Stage:
    """Return what compiles the kernels of a bench's rows and checks their answers."""
    command = _pytest_rows(file, "--benchmark-disable")
    return Stage(f"answers-{file}", command, estimate=60.0, limit=300.0, beside=True)


def _rows(part: str, file: str, limit: float) -> Stage:
    command = _pytest_rows(
        file,
        *("--benchmark-only", "--benchmark-quiet", "--bench-results={out}"),
        *(f"--bench-part={part}", "--bench-resume"),
    )
    # Every row counts, also where not all come: the next call goes on with the others.
    return Stage(f"{part}-{file}", command, estimate=20.0, limit=limit, reads=_KERNELS)


def _sharing(facts: Mapping[str, Any], nccl: str | None) -> tuple[dict[str, str], str]:
    """Return the variables with which ranks share a GPU, and why they cannot."""
    code = facts["nccl of cupy"]
    if not code:
        return {}, facts["why no nccl of cupy"]
    if code < SHARING:
        return {}, f"ranks on one GPU need NCCL 2.30 or newer, this is code {code}: give --nccl"
    return {**ONE_GPU, **({"LD_PRELOAD": nccl} if nccl else {})}, ""


def _sanitizers() -> list[Stage]:
    """Return the kernels under compute-sanitizer's tools for stray accesses and for races."""
    checker = sanitizer()
    return [
        Stage(
            tool,
            (
                # On an error it would end with the program's own status.
                *(checker or "compute-sanitizer", "--tool", tool, "--error-exitcode", "9"),
                *(sys.executable, "-m", "bench.gpu.sweep", "--sizes", *SIZES),
            ),
            estimate=90.0,
            limit=600.0,
            beside=True,
            # Else all tensors are parts of a few allocations, and a stray access hits another one.
            environment={"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            left_out="" if checker else "compute-sanitizer is not installed",
        )
        for tool in ("memcheck", "racecheck")
    ]


def stages(facts: Mapping[str, Any], nccl: str | None) -> list[Stage]:
    """Return all stages of a machine.

    facts: `machine.facts`, found with LD_PRELOAD set to `nccl`, a newer libnccl.so.2 than torch's.
    """
    python = (sys.executable, "-m")
    sharing, why_not = _sharing(facts, nccl)
    ranks = {
        each: _tests(
            f"ranks-{each}",
            f"tests/processes/test_{each}.py",
            # On an H200 that ranks took in turns 70 s were not enough for NCCL's.
            estimate=150.0 if each == "nccl" else 90.0,
            limit=600.0,
            environment={**_FORKS, **sharing},
        )
        for each in ("node_memory", "trainings", "torch_nccl", "nccl", "one_gpu")
    }

    def timed(name: str, module: str, *words: str, **options: Any) -> Stage:
        command = (*python, module, *words, "-J", "{out}/ranks.json")
        return Stage(name, command, estimate=20.0, limit=240.0, reads=_RANKS, **options)

    return [
        # What is new since any GPU has run it.
        Stage(CHECK, (*python, "adasum.check"), estimate=60.0, limit=300.0, beside=True),
        *(ranks[each] for each in ("node_memory", "trainings", "torch_nccl")),
        timed(NODE, "bench.collectives.node"),
        timed(
            RANKS,
            "bench.collectives.one_gpu",
            *("--ranks", "2"),
            environment=sharing,
            left_out=why_not,
        ),
        timed(HOST, "bench.kernels.host_cost", "--gpu"),
        *_kernel_tests(),
        *map(_answers, ROWS),
        *(_rows("goals", file, 900.0) for file in ROWS[:2]),
        *_sanitizers(),
        *(ranks[each] for each in ("nccl", "one_gpu")),
        # Those that no published table has come first. Of packing they took an H200 150 s.
        *(_rows("others", file, 1800.0) for file in ROWS),
        *(_rows("goals", file, 900.0) for file in ROWS[2:]),
    ]
