"""torch's own tests of DistributedDataParallel and of a backend, which its wheel ships."""

from __future__ import annotations

import functools
import inspect
import os
import re
import unittest
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import adasum
import collectives
from tests.torch_conformance import cpu_for_gpus

# What a test of DDP has in its source, or a helper that it calls.
_DDP = re.compile(r"DistributedDataParallel\(|DDP\(")
_HELPERS = re.compile(r"self\.(_\w+)\(")

# It runs a step under a dispatch mode, in processes that have not reduced anything yet.
FIRST = ("test_ddp_sink_noclone",)


@functools.cache
def tests_of_torch() -> Any:
    cpu_for_gpus.install()
    from torch.testing._internal.distributed import distributed_test

    base = distributed_test.DistributedTest._DistTestBase
    # Its images of 1000 x 1000 pixels keep a CPU busy for hours; smaller ones ask the same.
    uneven = inspect.unwrap(base.test_ddp_uneven_inputs)
    constants = tuple(24 if each == 1000 else each for each in uneven.__code__.co_consts)
    uneven.__code__ = uneven.__code__.replace(co_consts=constants)
    return base


def all_names() -> list[str]:
    """All tests of torch's suite, also those of DistributedDataParallel."""
    found = [name for name in dir(tests_of_torch()) if name.startswith("test_")]
    return sorted(found, key=lambda name: (name not in FIRST, name))


def names() -> list[str]:
    """The tests that make a DistributedDataParallel, themselves or by their helpers."""
    base = tests_of_torch()

    def makes_ddp(name: str, seen: set[str]) -> bool:
        seen.add(name)
        source = inspect.getsource(inspect.unwrap(getattr(base, name)))
        helpers = {each for each in _HELPERS.findall(source) if hasattr(base, each)} - seen
        return bool(_DDP.search(source)) or any(makes_ddp(each, seen) for each in helpers)

    return [name for name in all_names() if makes_ddp(name, set())]


def case(name: str, place: Any) -> unittest.TestCase:
    """Make a rank's instance of one of the tests; place: a `suites.Rank`."""
    base = tests_of_torch()
    from torch.testing._internal.distributed import distributed_test

    for each in ("barrier", "test_dir"):
        (place.directory / each).mkdir(exist_ok=True)
    os.environ["TEMP_DIR"] = str(place.directory)
    distributed_test.Barrier.barrier_id = 0
    test: Any = type("TestDistBackend", (distributed_test.TestDistBackend, base), {})(name)
    test.rank, test.file_name = place.rank, str(place.directory / "file")
    return test


@contextmanager
def stand_ins(hook: bool) -> Iterator[None]:
    """Let DDP take models on the CPU whose tests name a GPU for them."""
    cpu_for_gpus.install()
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def on_cpu(self: Any, module: Any, device_ids: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("output_device", None)
        init(self, module, None, None, *args[1:], **kwargs)

    DistributedDataParallel.__init__ = on_cpu  # type: ignore[method-assign]
    if hook:
        _use_hook()
    with cpu_for_gpus.CpuForGpus():
        yield


def _use_hook() -> None:
    """Register our hook with every DDP, unless it or the test registers another.

    That is known at the first forward or join, and what is registered then is registered in time.
    """
    register = DistributedDataParallel.register_comm_hook

    def register_own(self: Any, state: object, hook: Callable[..., Any]) -> None:
        register(self, state, hook)
        self.has_hook = True

    def with_hook(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not getattr(self, "has_hook", False):
                state = adasum.HookState(op=adasum.Average, process_group=self.process_group)
                self.register_comm_hook(state, adasum.ddp_hook)
            return method(self, *args, **kwargs)

        return call

    DistributedDataParallel.register_comm_hook = register_own  # type: ignore[method-assign]
    for name in ("forward", "join"):
        setattr(DistributedDataParallel, name, with_hook(getattr(DistributedDataParallel, name)))


@contextmanager
def backend_stand_ins(backend: bool) -> Iterator[None]:
    """Let models on the CPU stand in for GPUs'; and, if asked to, adasum for gloo."""
    with stand_ins(False):
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
