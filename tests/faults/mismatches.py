"""Ranks that call different things: every rank gets the same error, and the group stays usable.

One rank differs, the others do what they all should. `run` carries out all of them one after the
other in one group, which is itself a part of what is shown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd
import collectives
from collectives import Average, CollectiveMismatchError, Group

# The rank that differs.
ODD = 1
N = 12
Call = Callable[[Group, torch.Tensor], Any]


def _reduce(**options: Any) -> Call:
    def call(group: Group, tensor: torch.Tensor) -> Any:
        return group.all_reduce(tensor, **{"name": "w", **options})

    return call


def _wait(call: Call) -> Call:
    def waited(group: Group, tensor: torch.Tensor) -> Any:
        return call(group, tensor).wait()

    return waited


def _order(*names: str) -> Call:
    def call(group: Group, tensor: torch.Tensor) -> Any:
        works = [group.all_reduce(tensor.clone(), name=name, async_op=True) for name in names]
        errors = []
        for work in works:
            try:
                work.wait()
            except CollectiveMismatchError as error:
                errors.append(error)
        # Neither pair agrees, and both are told.
        assert len(errors) == len(names)
        raise errors[0]

    return call


def _request(number: int) -> Call:
    """Start one of two requests that all ranks made alike."""

    def call(group: Group, tensor: torch.Tensor) -> Any:
        requests = [group.all_reduce_init(tensor, name=f"w{i}") for i in range(2)]
        requests[number].start()
        requests[number].wait()

    return call


def _train(method: str, width: int = 4, op: Any = hvd.Adasum, algorithm: str | None = None) -> Call:
    """Two steps' worth of one: the model is `width` wide on this rank."""

    def call(group: Group, tensor: torch.Tensor) -> Any:
        model = nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"method": method} if op is hvd.Adasum else {}
        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            op=op,
            algorithm=algorithm,
            check_parameters=False,
            **options,
        )
        before = [parameter.detach().clone() for parameter in model.parameters()]
        try:
            model(torch.ones(3, 4)).square().sum().backward()
            optimizer.step()
        finally:
            assert all(map(torch.equal, before, model.parameters())), "a parameter has changed"

    return call


def _skipped_step(skip: bool) -> Call:
    """One rank leaves out a step, and goes on to the reduction that the others do after it."""

    def call(group: Group, tensor: torch.Tensor) -> Any:
        model = nn.Linear(4, 2)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            op=hvd.Adasum,
        )
        model(torch.ones(3, 4)).square().sum().backward()
        if not skip:
            optimizer.step()
        group.all_reduce(tensor, name="loss")

    return call


def _ddp(op: Any) -> Call:
    """DDP's own start-up compares the models, so the hook's op is what can differ."""

    def call(group: Group, tensor: torch.Tensor) -> Any:
        model = DistributedDataParallel(nn.Linear(4, 2))
        model.register_comm_hook(hvd.HookState(op=op), hvd.ddp_hook)
        model(torch.ones(3, 4)).square().sum().backward()

    return call


def _tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape).to(dtype)


# Name: what all ranks but ODD call, what ODD calls, and ODD's tensor where it is another one.
CASES: dict[str, tuple[Call, Call, torch.Tensor | None]] = {
    "shape": (_reduce(), _reduce(), _tensor(3, 4)),
    "name": (_reduce(), _reduce(name="v"), None),
    "kind": (_reduce(), lambda group, tensor: group.broadcast(tensor, 0, name="w"), None),
    "root": (
        lambda group, tensor: group.broadcast(tensor, 0),
        lambda group, tensor: group.broadcast(tensor, 2),
        None,
    ),
    "count of calls": (_reduce(), lambda group, tensor: group.barrier(), None),
    "order": (_order("a", "b"), _order("b", "a"), None),
    "ranks of a split": (
        lambda group, tensor: group.split([0, 1]),
        lambda group, tensor: group.split([1, 0]),
        None,
    ),
    "asynchronous and not": (_wait(_reduce(async_op=True)), _reduce(op=Average), None),
    "request": (_request(0), _request(1), None),
    "request and direct call": (_request(0), _reduce(name="w0"), None),
    "another model, delta": (_train("delta"), _train("delta", 5), None),
    "another model, gradient": (_train("gradient"), _train("gradient", 5), None),
    "another op, optimizer": (_train("gradient"), _train("gradient", op=hvd.Average), None),
    "another algorithm, optimizer": (
        _train("delta", algorithm="vhdd"),
        _train("delta", algorithm="rd"),
        None,
    ),
    "a step left out": (_skipped_step(False), _skipped_step(True), None),
    "another op, ddp": (_ddp(hvd.Adasum), _ddp(hvd.Average), None),
}


def run(diary: Callable[..., None]) -> None:
    """Carry out all cases; each is written down with what was raised and what came after."""
    group = collectives.default_group()
    for name, (usual, odd, other) in CASES.items():
        mine = group.rank == ODD
        tensor = _tensor(N) if other is None or not mine else other.clone()
        before = tensor.clone()
        try:
            (odd if mine else usual)(group, tensor)
            said = {"kind": None, "text": ""}
        except Exception as error:  # noqa: BLE001 - written down for the test
            said = {"kind": type(error).__name__, "text": str(error)}
        after = torch.full((5,), float(group.rank + 1))
        group.all_reduce(after, name=f"after {name}")
        diary(
            "mismatch",
            case=name,
            **said,
            untouched=torch.equal(tensor, before),
            after=after.tolist(),
        )
