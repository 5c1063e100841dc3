"""Parameters, optimizer state and objects from one rank to all. Ranks are threads."""

from __future__ import annotations

import argparse
import collections
import datetime
import io
import pathlib
import pickle
import types
import zoneinfo
from typing import Any

import numpy as np
import pytest
import torch

import adasum as hvd
from collectives import Group, run_threads
from tests.adasum.definition import OPTIMIZERS, flat, loss_of, make_model
from tests.adasum.jobs import on_ranks


class Foreign:
    """Of a kind that cannot be sent."""


class Zone(datetime.tzinfo):
    """A user's own time zone."""

    def utcoffset(self, _: Any) -> datetime.timedelta:
        return datetime.timedelta(0)


@on_ranks(3)
def test_broadcast_parameters_in_every_form_overwrites_them(group: Group) -> None:
    want = flat(make_model(1))
    for form in ("state_dict", "named_parameters", "parameters", "list"):
        model = make_model(group.rank)
        given: Any = list(model.parameters()) if form == "list" else getattr(model, form)()
        hvd.broadcast_parameters(given, root_rank=1)
        assert torch.equal(flat(model), want)


def test_broadcast_parameters_of_no_tensors_raises() -> None:
    def refuse(params: Any, root: int = 0) -> None:
        run_threads(1, lambda group: hvd.broadcast_parameters(params, root))

    with pytest.raises(TypeError, match=r"params\['lr'\] must be a tensor, got float"):
        refuse({"lr": 0.1})
    with pytest.raises(TypeError, match="params must be a dict or a list, got Tensor"):
        refuse(torch.ones(2))
    with pytest.raises(TypeError, match="params must be a dict or a list, got int"):
        refuse(3)
    with pytest.raises(TypeError, match=r"params\['parameter 0'\] must be a tensor, got tuple"):
        refuse([("weight", torch.ones(2), 1)])
    with pytest.raises(ValueError, match="root_rank must be a rank from 0 to 0, got 1"):
        refuse([torch.ones(2)], 1)
    used = torch.nn.Linear(2, 1).parameters()
    list(used)
    with pytest.raises(ValueError, match="params has no tensors: an iterator"):
        refuse(used)
    # A model without parameters is no mistake.
    for params in ([], {}):
        refuse(params)


@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
@pytest.mark.parametrize("stateful", [{1}, {0, 2}, {0, 1, 2}, set()], ids=str)
@pytest.mark.parametrize("wrapped", [False, True])
def test_broadcast_optimizer_state_gives_the_roots(
    kind: str, stateful: set[int], wrapped: bool
) -> None:
    def run(group: Group) -> tuple[list[Any], list[Any]]:
        model = make_model()
        optimizer = OPTIMIZERS[kind](model.parameters())
        if group.rank in stateful:
            for step in range(group.rank + 1):
                loss_of(model, group.rank, step).backward()
                optimizer.step()
            optimizer.param_groups[0]["lr"] = 0.5 + group.rank
        if wrapped:
            optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Adasum)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        saved = optimizer.state_dict()
        hyper = [{k: v for k, v in g.items() if k != "params"} for g in saved["param_groups"]]
        return hyper, [
            (index, name, value)
            for index, each in saved["state"].items()
            for name, value in each.items()
        ]

    results = run_threads(3, run)
    assert (results[1][0][0]["lr"] == 1.5) == (1 in stateful)
    if kind != "sgd":
        assert bool(results[1][1]) == (1 in stateful)
    for hyper, state in results:
        assert hyper == results[1][0]
        assert len(state) == len(results[1][1])
        for (index, name, value), (at, called, want) in zip(state, results[1][1], strict=True):
            assert (index, name) == (at, called)
            if isinstance(want, torch.Tensor):
                assert value.dtype == want.dtype
                assert torch.equal(value, want)
                assert value is want or value.data_ptr() != want.data_ptr()
            else:
                assert value == want


def test_broadcast_optimizer_state_of_another_dtype_keeps_its_bits() -> None:
    def run(group: Group) -> torch.Tensor:
        parameter = torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
        optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9)
        if group.rank == 0:
            optimizer.state[parameter]["momentum_buffer"] = torch.tensor([1.0 + 2.0**-20, 2.0])
        hvd.broadcast_optimizer_state(optimizer, 0)
        return optimizer.state[parameter]["momentum_buffer"]

    for result in run_threads(2, run):
        assert torch.equal(result, torch.tensor([1.0 + 2.0**-20, 2.0]))


class Odd(torch.optim.SGD):
    """Has state by a string, and of many kinds in a parameter's."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.state["whole"] = {"count": self.state.get("whole", {}).get("count", 0) + 1}
        for parameter in self.param_groups[0]["params"]:
            kept = parameter.detach().clone()
            self.state[parameter] |= {"n": np.float32(1.5), "array": np.arange(3), "flag": True}
            self.state[parameter] |= {"none": None, "pair": (1, 2.0), "name": "a", "big": 2**70}
            self.state[parameter] |= {"history": [kept], "by name": {"kept": kept}}
        return loss


def test_broadcast_optimizer_state_of_odd_kinds_arrives_with_type_and_value() -> None:
    def run(group: Group) -> torch.optim.Optimizer:
        parameter = torch.nn.Parameter(torch.ones(2))
        optimizer = Odd([parameter], lr=0.1, momentum=0.5)
        if group.rank == 1:
            optimizer.param_groups[0]["lr"] = np.cos(np.float64(1.0))
            parameter.grad = torch.ones(2)
            optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, 1)
        return optimizer

    first, second = run_threads(2, run)
    assert first.state["whole"] == {"count": 1}
    (found,), (wanted,) = (
        [s for key, s in each.state.items() if key != "whole"] for each in (first, second)
    )
    assert len(found) == 10 and {*found} == {*wanted}
    for key, value in wanted.items():
        assert type(found[key]) is type(value) and str(found[key]) == str(value), key
    rates = [each.param_groups[0]["lr"] for each in (first, second)]
    assert rates[0] == rates[1] == np.cos(1.0)


def test_broadcast_optimizer_state_of_different_groups_raises_everywhere() -> None:
    def run(group: Group) -> str:
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(1 + group.rank)]
        with pytest.raises(ValueError, match="parameter groups") as e:
            hvd.broadcast_optimizer_state(torch.optim.SGD(parameters, lr=0.1), 0)
        return str(e.value)

    first, second = run_threads(2, run)
    assert first == second
    assert "[1]" in first
    assert "[2]" in first


SENT = [
    np.float32(1.5),
    np.int64(-3),
    np.bool_(True),
    np.datetime64("2026-11-24"),
    np.arange(6).reshape(2, 3)[:, ::2],
    np.zeros((0, 3), np.float16),
    np.array(["ab", "c"]),
    np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
    pathlib.Path("/data/set"),
    pathlib.PureWindowsPath("c:\\data"),
    datetime.datetime(2026, 11, 24, 1, 2, 3, 4),
    datetime.datetime(2026, 11, 24, tzinfo=datetime.timezone.utc),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.date(2026, 11, 24),
    datetime.time(1, 2, tzinfo=datetime.timezone(datetime.timedelta(hours=-3.5))),
    datetime.timedelta(1, 2, 3),
    argparse.Namespace(lr=0.1, out=pathlib.Path("out"), sizes=[np.int32(3)]),
    types.SimpleNamespace(a=1),
    collections.defaultdict(list, {"a": [1], (0, 1): []}),
    collections.defaultdict(None, {1: {2, 3}}),
    collections.OrderedDict(b=1, a=2),
    collections.Counter("aab"),
    b"bytes",
    1 + 2j,
]


@on_ranks(2)
def test_objects_that_scripts_broadcast_arrive_with_type_and_value(group: Group) -> None:
    shared = [1]
    got, one, two = hvd.broadcast_object(
        (SENT, shared, [shared]) if group.rank == 1 else None, root_rank=1
    )
    assert two[0] is one or group.rank == 1
    for mine, theirs in zip(got, SENT, strict=True):
        assert type(mine) is type(theirs)
        if isinstance(theirs, np.ndarray):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        else:
            assert mine == theirs
        for attribute in ("default_factory", "tzinfo", "fold"):
            assert getattr(mine, attribute, 0) == getattr(theirs, attribute, 0)
    # What arrives may be written to.
    if group.rank == 0:
        got[4][:] = 0


@pytest.mark.parametrize(
    "thing",
    [
        np.array([object()]),
        collections.defaultdict(lambda: 0),
        datetime.datetime(2026, 11, 24, tzinfo=Zone()),
        type("Args", (argparse.Namespace,), {})(),
        [pathlib.Path],
    ],
    ids=["array of objects", "factory", "zone", "subclass", "class"],
)
@on_ranks(2)
def test_objects_that_would_need_code_are_refused(group: Group, thing: Any) -> None:
    with pytest.raises(TypeError, match=r"rank 0: an object of .* cannot be sent"):
        hvd.broadcast_object(thing)


def test_foreign_objects_raise_on_every_rank() -> None:
    def run(group: Group) -> list[str]:
        texts = []
        with pytest.raises(TypeError, match="rank 0: an object of Foreign cannot be sent") as e:
            hvd.broadcast_object(Foreign() if group.rank == 0 else None, root_rank=0)
        assert "Unsupported global: GLOBAL tests.adasum.horovod.test_state.Foreign" in str(e.value)
        texts.append(str(e.value))
        with pytest.raises(TypeError, match="rank 1: an object of function cannot be sent") as e:
            hvd.allgather_object((lambda: 0) if group.rank == 1 else 0)
        texts.append(str(e.value))
        # The ranks are still in step.
        assert hvd.allgather_object(group.rank) == [0, 1]
        return texts

    first, second = run_threads(2, run)
    assert first == second


def test_received_bytes_cannot_run_code() -> None:
    class Malice:
        def __reduce__(self) -> Any:
            return (pytest.fail, ("code ran while unpickling",))

    from adasum.horovod.objects import _decode

    payload = io.BytesIO()
    torch.save(Malice(), payload)
    with pytest.raises(pickle.UnpicklingError):
        _decode(payload.getvalue())
