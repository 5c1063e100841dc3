"""One rank of Horovod's tests: `adasum` stands in for `horovod.torch`, and pytest runs a test file.

`tests.horovod_conformance` starts it. A file whose name does not begin with test_ is an example,
run as a program.
"""

from __future__ import annotations

import functools
import importlib
import os
import runpy
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import adasum as hvd
from tests.horovod_conformance.expected import CPU_FOR_GPUS

# Seconds that a rank waits for the others between two tests.
TEST_TIMEOUT = 300.0


def install() -> None:
    """Make `import horovod.torch` give adasum, and give Horovod's test helpers what they import."""
    stand_in = types.ModuleType("horovod.torch")
    stand_in.__path__ = []  # type: ignore[attr-defined]
    stand_in.__getattr__ = functools.partial(getattr, hvd)  # type: ignore[method-assign]
    vars(stand_in).update({name: getattr(hvd, name) for name in hvd.__all__})
    _set(
        stand_in, init=functools.partial(hvd.init, timeout=float(os.environ["CONFORMANCE_TIMEOUT"]))
    )
    # Horovod's name for what a failed collective raises.
    _set(stand_in, HorovodInternalError=hvd.CollectiveError)
    horovod = _module("horovod", torch=stand_in)
    horovod.__path__ = []  # type: ignore[attr-defined]
    sys.modules["horovod.torch"] = stand_in
    _set(stand_in, mpi_ops=_module("horovod.torch.mpi_ops", **vars(stand_in)))
    for name in ("horovod.runner", "horovod.runner.util"):
        _module(name).__path__ = []  # type: ignore[attr-defined]
    # Imported by its helpers, and used by none of the tests run here.
    _module("horovod.runner.util.threads", in_thread=None)
    for name in ("mock", "cloudpickle"):
        try:
            importlib.import_module(name)
        except ImportError:
            _module(name)
    # Its tests are older than numpy 2.
    if hasattr(torch.optim, "Muon"):
        # Newer, too: they give parameters of one dimension to every optimizer of torch.optim.
        torch.optim.Muon.__module__ = "newer than the tests"
    if not hasattr(np, "alltrue"):
        np.alltrue = np.all  # type: ignore[attr-defined]


def _set(module: types.ModuleType, **values: Any) -> None:
    vars(module).update(values)


def _module(name: str, **values: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    _set(module, **{key: value for key, value in values.items() if not key.startswith("__")})
    sys.modules[name] = module
    return module


class _TorchWithGpus(types.ModuleType):
    """torch, whose GPUs are the CPU: for tests of arithmetic that ask for one."""

    cuda = types.SimpleNamespace(is_available=lambda: True)

    @staticmethod
    def device(name: str) -> torch.device:
        return torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextmanager
def cpu_for_gpus(module: types.ModuleType) -> Iterator[None]:
    """Let a test module see GPUs, which are the CPU, and a Horovod built with MPI, without NCCL."""
    horovod = sys.modules["horovod.torch"]
    with ExitStack() as stack:
        for owner in (torch.Tensor, torch.nn.Module):
            stack.enter_context(patch.object(owner, "cuda", lambda this, *_: this))
        stack.enter_context(patch.object(module, "torch", _TorchWithGpus("torch")))
        answers = {"mpi_enabled": lambda: True, "nccl_built": lambda: 0}
        stack.enter_context(patch.multiple(horovod, **answers))
        yield


class Ranks:
    """A pytest plugin: ranks begin each test together, and with a new group after a failure."""

    def __init__(self) -> None:
        self.results: dict[str, list[str]] = {}
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["CONFORMANCE_PORT"]),
            is_master=self._rank == 0,
            timeout=timedelta(seconds=TEST_TIMEOUT),
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("::")[2]
        if report.when == "call" or report.outcome != "passed":
            reason = "" if report.passed else _last_line(report)
            self.results[name] = [report.outcome, reason]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        module: types.ModuleType = item.module  # type: ignore[attr-defined]
        with cpu_for_gpus(module) if item.name in CPU_FOR_GPUS else nullcontext():
            result = yield
        name = item.nodeid.rpartition("::")[2]
        said = self._all_say(name, self.results[name][0])
        # After a failure ranks may be anywhere in it.
        if "failed" in said and hvd.is_initialized():
            hvd.shutdown()
        self._all_say(f"{name}: over", "")
        return result

    def wait_for_all(self) -> None:
        """Keep the store open until every rank is done."""
        self._all_say("all is over", "")

    def _all_say(self, topic: str, text: str) -> list[str]:
        self._store.set(f"{topic} {self._rank}", text)
        keys = [f"{topic} {rank}" for rank in range(self._size)]
        return [self._store.get(key).decode() for key in keys]


def _last_line(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).splitlines()[0]


class _Images(TensorDataset):
    """Where MNIST is expected: 28 x 28 random pixels, brighter by the class."""

    def __init__(self, *_: Any, train: bool, **options: Any) -> None:
        labels = torch.arange(640 if train else 320) % 10
        noise = torch.rand(
            len(labels), 1, 28, 28, generator=torch.Generator().manual_seed(int(train))
        )
        super().__init__(noise + labels.view(-1, 1, 1, 1), labels)


def run_example(file: str) -> dict[str, list[str]]:
    """Run an example of Horovod for an epoch; torchvision is not needed."""
    ignored = MagicMock()
    _module("torchvision", datasets=types.SimpleNamespace(MNIST=_Images), transforms=ignored)
    sys.argv = [file, "--epochs", "1", "--use-adasum"]
    outcome = ["passed", ""]
    try:
        runpy.run_path(file, run_name="__main__")
    except Exception as error:  # noqa: BLE001 - reported
        outcome = ["failed", f"{type(error).__name__}: {error}"]
    return {Path(file).name: outcome}


def main(rank: int, file: str, keyword: str, variables: dict[str, str]) -> dict[str, list[str]]:
    """Run a file on this rank; return [outcome, reason] of each test."""
    # The rank as horovodrun --gloo sets it: tests then take their ways of gloo.
    os.environ.update(variables, HOROVOD_RANK=str(rank))
    os.chdir(variables["HOME"])
    install()
    if not Path(file).name.startswith("test_"):
        return run_example(file)
    ranks = Ranks()
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--noconftest", "-k", keyword]
    pytest.main([file, *options, "--rootdir", str(Path(file).parent)], plugins=[ranks])
    ranks.wait_for_all()
    return ranks.results
