"""What the NCCL transport does, over fakes that keep NCCL's rules (fake_nccl.py): no GPU needed.

What it does when something fails: test_nccl_failures.py, test_watcher.py. What real NCCL makes of
it: tests/processes/test_nccl.py.
"""

from __future__ import annotations

import gc
import importlib
import importlib.util
import inspect
from typing import Any

import pytest
import torch

from collectives import TransportError
from collectives.transport import Message, ThreadWorld
from collectives.transport.nccl import backend, cupy_backend
from collectives.transport.nccl import transport as nccl
from tests.fakes.fake_cuda import FakeCuda, FakeStream, device_tensor, full
from tests.fakes.fake_nccl import FakeNccl, NcclError
from tests.fakes.nccl_machine import Machine, all_good


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_every_pair_at_once(machine: Machine, size: int) -> None:
    """Sizes differ by pair, order within a pair is kept, empty messages vanish."""

    def work(transport: nccl.NcclTransport) -> None:
        mine, lengths = transport.rank, (3, 0, 7000)
        others = [r for r in range(size) if r != mine]
        sends = [Message(p, full(n, 100.0 * mine + p + n)) for p in others for n in lengths]
        recvs = [Message(p, full(n, float("nan"))) for p in others for n in lengths]
        transport.exchange(sends, recvs, "a test", 10.0)
        for peer, tensor in recvs:
            numel = tensor.numel()
            expected = torch.full((numel,), 100.0 * peer + mine + numel)
            assert torch.equal(machine.read(tensor), expected)

    all_good(machine.run(size, work))
    assert machine.nccl.destroyed and not machine.nccl.aborted


DTYPES = [*(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)]
DTYPES += [torch.int8, torch.uint8, torch.int32, torch.int64]


def test_own_all_reduce(machine: Machine) -> None:
    def work(transport: nccl.NcclTransport) -> None:
        for dtype in DTYPES:
            values = device_tensor(torch.arange(5).to(dtype) + transport.rank)
            transport.all_reduce(values, None, "a test", 10.0)
            assert torch.equal(machine.read(values), (3 * torch.arange(5) + 3).to(dtype))
        for dtype in (torch.int16, torch.bool):
            with pytest.raises(TypeError, match=f"cannot add {dtype}"):
                transport.all_reduce(device_tensor(torch.zeros(2, dtype=dtype)), None, "s", 1.0)
        transport.all_reduce(full(0, 1.0), None, "a test", 10.0)

    all_good(machine.run(3, work))


def _sums_of_parts(machine: Machine) -> list[Any]:
    def work(transport: nccl.NcclTransport) -> list[float]:
        part = (0, 2) if transport.rank in (0, 2) else (1,) if transport.rank == 1 else (3, 4)
        sums = []
        for _ in range(2):
            values = full(4, float(10**transport.rank))
            transport.all_reduce(values, part, "a test", 10.0)
            sums.append(machine.read(values)[0].item())
        whole = full(4, 1.0)
        transport.all_reduce(whole, None, "a test", 10.0)
        return [*sums, machine.read(whole)[0].item()]

    return all_good(machine.run(5, work))


PARTS = [[101.0] * 2, [10.0] * 2, [101.0] * 2, [11000.0] * 2, [11000.0] * 2]


def test_own_all_reduce_over_parts(machine: Machine) -> None:
    assert _sums_of_parts(machine) == [[*part, 5.0] for part in PARTS]
    # Every rank's part and whole were destroyed: a rank of each communicator is counted once.
    assert sorted(machine.nccl.destroyed) == sorted([*range(5), 0, 1, 0, 0, 1])


def test_a_transport_out_of_scope_is_closed(machine: Machine) -> None:
    all_good(machine.run(2, lambda transport: None, close=False))
    gc.collect()
    assert sorted(machine.nccl.destroyed) == [0, 1]


def _names(signature: str) -> list[str]:
    """The parameters' names of one of cupy's embedded signatures, without self."""
    inside = signature[signature.index("(") + 1 : signature.rindex(")")]
    names = [part.split("=")[0].split()[-1] for part in inside.split(",") if part.strip()]
    return [name for name in names if name != "self"]


@pytest.fixture
def real() -> Any:
    """`cupy.cuda.nccl` itself: needs cupy and an NCCL library, but no GPU."""
    if importlib.util.find_spec("cupy") is None:
        pytest.skip("cupy is not installed: pip install cupy-cuda13x nvidia-nccl-cu13")
    module = importlib.import_module("cupy.cuda.nccl")
    if not module.available:
        pytest.skip("cupy finds no NCCL library: pip install nvidia-nccl-cu13")
    return module


def test_the_fake_has_cupys_names_and_arguments(real: Any) -> None:
    fake = FakeNccl()
    constants = [name for name in dir(fake) if name.startswith("NCCL_")]
    assert {n: getattr(real, n) for n in constants} == {n: getattr(fake, n) for n in constants}
    calls = [("send", 5), ("recv", 5), ("allReduce", 6), ("check_async_error", 0), ("commSplit", 3)]
    for name, count in [*calls, ("destroy", 0), ("abort", 0)]:
        first = (getattr(real.NcclCommunicator, name).__doc__ or "").strip().split("\n", 1)[0]
        ours = list(inspect.signature(getattr(fake.NcclCommunicator, name)).parameters)
        assert ours[1:] == _names(first) and len(ours) == count + 1, first
    first = real.NcclCommunicator.__doc__.strip().split("\n", 1)[0]
    ours = list(inspect.signature(fake.NcclCommunicator.__init__).parameters)
    assert ours[1:] == _names(first), first
    assert type(real.get_unique_id()) is bytes and len(real.get_unique_id()) == 128
    for status in range(1, 7):
        prefix = str(NcclError(status))
        assert str(real.NcclError(status)).startswith(prefix)
    for status in (7, 8):
        with pytest.raises(KeyError):
            real.NcclError(status)
    real.groupStart()
    real.groupEnd()


def test_real_nccl_without_a_gpu(real: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's own refusal comes through cupy, a thread and the translation."""
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here: see tests/processes/test_nccl.py")
    cuda = FakeCuda()
    for module in (nccl, backend, cupy_backend):
        monkeypatch.setattr(module, "cuda", cuda)
    assert cupy_backend.load_nccl() is real
    host = ThreadWorld(1).transport(0)
    with pytest.raises(TransportError, match="NCCL failed in start-up: NCCL_ERROR_UNHANDLED_CUDA"):
        nccl.NcclTransport(host, cupy_backend.CupyBackend(), timeout=20.0)
    FakeStream.stop_all()
