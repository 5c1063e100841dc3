"""torch's own tests of a backend, which its wheel ships, by gloo and by adasum in gloo's place."""

from __future__ import annotations

import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

import collectives
from tests.torch_conformance import torch_ddp


def names() -> list[str]:
    """All tests of torch's suite, also those of DistributedDataParallel."""
    found = [name for name in dir(torch_ddp.tests_of_torch()) if name.startswith("test_")]
    return sorted(found, key=lambda name: (name not in torch_ddp.FIRST, name))


def case(name: str, place: Any) -> unittest.TestCase:
    """Make a rank's instance of one of the tests; place: a `suites.Rank`."""
    return torch_ddp.case(name, place)


@contextmanager
def stand_ins(backend: bool) -> Iterator[None]:
    """Let models on the CPU stand in for GPUs'; and, if asked to, adasum for gloo."""
    with torch_ddp.stand_ins(False):
        if backend:
            _use_backend()
        yield


def _use_backend() -> None:
    """Make every process group over gloo, other than a Group's own, one over adasum."""
    # Public functions have the backend's name in too many ways: all of them end here.
    c10d: Any = dist.distributed_c10d
    make = c10d._new_process_group_helper
    assert collectives.BackendOptions

    def helper(size: int, rank: int, ranks: Any, backend: Any, store: Any, name: Any, **rest: Any):
        if backend == "gloo" and " adasum " not in f" {name} ":
            backend = dist.Backend("adasum")
        return make(size, rank, ranks, backend, store, name, **rest)

    c10d._new_process_group_helper = helper
