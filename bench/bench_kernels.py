"""Each kernel beside its torch peer and the copy roof, all measured in this run.

`extra_info` of every row holds bytes, GB/s, the fraction of the roof and the peer's time over
ours, for `--benchmark-json`. A wrong answer fails the row instead of timing it. Inputs are larger
than a core's caches on the CPU; on a GPU they are 64 Mi elements, beyond L2.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import kernels
from bench import peers
from bench.roofline import copy_roof, seconds

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUMEL = 1 << 26 if DEVICE == "cuda" else 1 << 22
Case = tuple[Callable[[], object], Callable[[], object], int, Callable[[], tuple[Tensor, Tensor]]]


@pytest.fixture(scope="module")
def roof() -> float:
    return copy_roof(DEVICE)


def random(count: int) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(0)
    return [torch.randn(NUMEL, generator=generator, device=DEVICE) for _ in range(count)]


def pack_case() -> Case:
    tensors = list(random(1)[0].split(NUMEL // 64))
    call = kernels.pack
    return (
        lambda: call(tensors),
        lambda: peers.pack(tensors),
        kernels.pack_bytes(tensors),
        lambda: (call(tensors), kernels.pack_reference(tensors)),
    )


def unpack_case() -> Case:
    buffer, flat = random(2)
    tensors = list(flat.split(NUMEL // 64))
    return (
        lambda: kernels.unpack(buffer, tensors),
        lambda: peers.unpack(buffer, tensors),
        kernels.unpack_bytes(buffer, tensors),
        lambda: (torch.cat(kernels.unpack(buffer, tensors)), buffer.double()),
    )


def sum_case() -> Case:
    tensors = random(4)
    return (
        lambda: kernels.sum_n(tensors),
        lambda: peers.sum_n(tensors),
        kernels.sum_n_bytes(tensors),
        lambda: (kernels.sum_n(tensors), kernels.sum_n_reference(tensors)),
    )


def scaled_add_case() -> Case:
    a, b = random(2)
    return (
        lambda: kernels.scaled_add(a, b, alpha=0.3, beta=0.7),
        lambda: peers.scaled_add(a, b, 0.3, 0.7),
        kernels.scaled_add_bytes(a, b),
        lambda: (
            kernels.scaled_add(a, b, alpha=0.3, beta=0.7),
            kernels.scaled_add_reference(a, b, alpha=0.3, beta=0.7),
        ),
    )


def dots_case() -> Case:
    a, b = random(2)
    return (
        lambda: kernels.dot_and_norms(a, b),
        lambda: peers.dot_and_norms(a, b),
        kernels.dot_and_norms_bytes(a, b),
        lambda: (kernels.dot_and_norms(a, b), kernels.dot_and_norms_reference(a, b)),
    )


def combine_case() -> Case:
    a, b = random(2)
    dots = kernels.dot_and_norms(a, b)
    alpha, beta = (1 - dots[0, 0] / (2 * dots[0, 1:])).tolist()
    return (
        lambda: kernels.combine(a, b, dots),
        lambda: peers.scaled_add(a, b, alpha, beta),
        kernels.combine_bytes(a, b),
        lambda: (kernels.combine(a, b, dots), kernels.combine_reference(a, b, dots)),
    )


def adasum_case() -> Case:
    a, b = random(2)
    return (
        lambda: kernels.adasum(a, b),
        lambda: peers.adasum(a, b),
        kernels.adasum_bytes(a, b),
        lambda: (kernels.adasum(a, b), kernels.adasum_reference(a, b)),
    )


CASES = {
    "pack": pack_case,
    "unpack": unpack_case,
    "sum_n": sum_case,
    "scaled_add": scaled_add_case,
    "dot_and_norms": dots_case,
    "combine": combine_case,
    "adasum": adasum_case,
}


@pytest.mark.parametrize("name", list(CASES))
def test_kernel(name, benchmark, roof):
    call, peer, nbytes, answer = CASES[name]()
    got, expected = answer()
    error = ((got.double() - expected).norm() / expected.norm()).item()
    assert error <= 100 * torch.finfo(torch.float32).eps, f"wrong answer, error {error:.3g}"
    ours, theirs = seconds(call, DEVICE), seconds(peer, DEVICE)
    benchmark.extra_info.update(
        device=DEVICE,
        bytes=nbytes,
        gigabytes_per_second=nbytes / ours / 1e9,
        fraction_of_copy_roof=nbytes / ours / roof,
        peer_time_over_ours=theirs / ours,
    )

    def timed() -> None:
        call()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    benchmark.pedantic(timed, rounds=9, warmup_rounds=1)
