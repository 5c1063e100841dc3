"""What `auto` takes of CUDA tensors: a library's own sum where there is one for the dtype.

Over the stand-ins for CUDA and NCCL; no GPU needed.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from adasum import Adasum
from collectives import Average, Group, Reducer, Sum
from collectives.execution import all_reduce
from collectives.execution.all_reduce import Runner
from collectives.reducers import Max, SumReducer
from collectives.schedules.spec import AllReduceSpec
from collectives.schedules.topology import Topology
from tests.collectives.transport import streams
from tests.collectives.transport.streams import on_gpu
from tests.collectives.transport.streams_nccl import on_ranks

BUCKET = 25 << 20
ADDED = [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.int64]


class _Tensor(SimpleNamespace):
    """What a choice looks at, of a tensor on a GPU that would be too large for a test."""

    def is_complex(self) -> bool:
        return bool(self.dtype.is_complex)


def tensor(nbytes: int, dtype: torch.dtype = torch.float32, *, is_cuda: bool = True) -> Any:
    return _Tensor(nbytes=nbytes, dtype=dtype, is_cuda=is_cuda)


def runner(size: int, *, sums: bool = True, group: object = None, local: int = 0) -> Runner:
    transport: Any = SimpleNamespace(size=size, rank=0, sums_on_gpu=sums, process_group=group)
    return Runner(transport, Topology(size, local or min(size, 8)), 1.0)


def chosen(of: Runner, what: Any, op: Reducer = Sum) -> str:
    return str(of.choose(what, op))


@pytest.mark.parametrize("size", [2, 3, 8, 64, 8192])
def test_bucket_goes_to_nccl(size: int) -> None:
    of = runner(size, local=1 if size == 3 else 0)
    for dtype in [*ADDED, torch.int8, torch.uint8]:
        assert chosen(of, tensor(BUCKET, dtype)) == "nccl"
    for dtype in (torch.float16, torch.bfloat16, torch.complex64):
        assert chosen(of, tensor(BUCKET, dtype), Average) == "nccl"


def test_what_no_library_takes_goes_by_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(SumReducer):
        """Reduces in a way of its own."""

    of = runner(64)
    without = runner(64, sums=False)
    answers = {
        "dtype": chosen(of, tensor(BUCKET, torch.int16)),
        "maximum": chosen(of, tensor(BUCKET), Max),
        "operator of the user's": chosen(of, tensor(BUCKET), Doubled()),
        "on the host": chosen(of, tensor(BUCKET, is_cuda=False)),
        "no library": chosen(without, tensor(BUCKET)),
    }
    # What is no plain sum chooses by its own rule, which is the same for all devices.
    by_rule = {"maximum": "rechd", "operator of the user's": "xring", "on the host": "xring/xring"}
    assert answers == {name: by_rule.get(name, "rechd/rd") for name in answers}
    assert chosen(of, tensor(BUCKET << 2, torch.int16)) == "xring/xring"
    for nbytes, schedule in ((1 << 10, "rd"), (BUCKET, "direct")):
        assert chosen(of, tensor(nbytes), Adasum) == schedule


@pytest.mark.parametrize(
    ("config", "answer"), [("cpu:gloo,cuda:nccl", "collective"), ("cpu:gloo,cuda:gloo", "rechd")]
)
def test_bucket_goes_to_the_process_groups_nccl(
    monkeypatch: pytest.MonkeyPatch, config: str, answer: str
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert chosen(runner(8, sums=False, group=object()), tensor(BUCKET)) == answer


@pytest.mark.parametrize("op", [Sum, Average], ids=str)
def test_all_reduce_by_auto_is_ncclis_own(op: Reducer, monkeypatch: pytest.MonkeyPatch) -> None:
    streams.install(monkeypatch)
    taken: list[str] = []
    choose = all_reduce.auto_of

    def noted(*arguments: Any) -> AllReduceSpec:
        spec = choose(*arguments)
        taken.append(str(spec))
        return spec

    monkeypatch.setattr(all_reduce, "auto_of", noted)

    def work(group: Group) -> list[torch.Tensor]:
        mine = on_gpu(torch.full((5000,), 1.0 + group.rank))
        group.all_reduce(mine, op)
        return [streams.plain(mine)]

    expected = torch.full((5000,), 6.0 if op is Sum else 2.0)
    for results in on_ranks(3, work):
        assert all(torch.equal(result, expected) for result in results)
    assert taken == ["nccl"] * 3
