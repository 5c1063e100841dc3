"""One training for each promise of the optimizer; ranks are threads or processes.

Each function trains on the default group, where `definition.PLACE` says, and returns the parameters
it ends with, which are the same bits on every rank, and on CPUs the same over every transport.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import adasum as hvd
from adasum import Compression
from tests.adasum.definition import OPTIMIZERS, PLACE, flat, loss_of, make_model
from tests.adasum.jobs import WAYS, take_steps, wrapped

STEPS, STOP = 4, 2
Wrap = Callable[..., Any]


def _lbfgs(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(parameters, max_iter=3, line_search_fn="strong_wolfe")


def _wrap(way: str) -> Wrap:
    return lambda kind, model, **options: wrapped(model, kind, **WAYS[way], **options)


def groups(wrap: Wrap) -> Tensor:
    model = make_model()
    return take_steps(model, wrap("adam", model, groups=3), STEPS)


def accumulation(wrap: Wrap) -> Tensor:
    model = make_model()
    return take_steps(model, wrap("momentum", model, backward_passes_per_step=2), STEPS, passes=2)


def compressed(wrap: Wrap) -> Tensor:
    parts = []
    for compression in (Compression.fp16, Compression.bf16):
        model = make_model()
        parts.append(take_steps(model, wrap("sgd", model, compression=compression), STEPS))
    return torch.cat(parts)


def closures(wrap: Wrap) -> Tensor:
    model = make_model()
    optimizer = wrap("adam", model)

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), step)
        loss.backward()
        return loss

    for step in range(STEPS):
        assert optimizer.step(lambda step=step: closure(step)) is not None
    return flat(model)


def line_search(wrap: Wrap) -> Tensor:
    model = make_model()
    optimizer = wrap(_lbfgs, model)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, hvd.rank(), 0)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    return flat(model)


def clipped(wrap: Wrap) -> Tensor:
    model = make_model()
    optimizer = wrap("momentum", model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
    return flat(model)


def scaled(wrap: Wrap) -> Tensor:
    model = make_model().float()
    optimizer = wrap("adamw", model)
    scaler = torch.amp.GradScaler(PLACE["device"], init_scale=8.0)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.full((2, 6), 0.1 * (hvd.rank() + 1 + step), device=PLACE["device"])
        loss = model(x).square().mean()
        if step == 1 and hvd.rank() == hvd.size() - 1:
            loss = loss * float("inf")
        before = flat(model)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, flat(model)) == (step == 1)
    # Under the delta method the other ranks' scalers saw finite gradients of their own.
    assert scaler.get_scale() == 4.0 or hvd.rank() < hvd.size() - 1
    return flat(model)


def autocast(wrap: Wrap) -> Tensor:
    model = make_model().float()
    optimizer = wrap("adamw", model)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))
        with torch.autocast(PLACE["device"], torch.bfloat16):
            loss = model(x.to(PLACE["device"])).square().mean()
        loss.backward()
        optimizer.step()
    return flat(model)


def unused_parameters(wrap: Wrap) -> Tensor:
    """Backward takes another path on every rank."""
    branches = torch.nn.ModuleList([make_model(1), make_model(2)])
    optimizer = wrap("momentum", branches)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(branches[(hvd.rank() + step) % 2], hvd.rank(), step).backward()
        optimizer.step()
    return flat(branches)


def frozen_shared_and_added(wrap: Wrap) -> Tensor:
    first, second, extra = make_model(1), make_model(2), make_model(3)
    second[2].weight = first[2].weight
    second[0].requires_grad_(False)
    both = torch.nn.ModuleList([first, second])
    optimizer = wrap("sgd", both)
    for step in range(STEPS):
        if step == 1:
            second[0].requires_grad_(True)
        if step == 2:
            optimizer.add_param_group({"params": list(extra.parameters())})
        loss = sum(loss_of(model, hvd.rank(), step) for model in (first, second, extra))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return flat(torch.nn.ModuleList([both, extra]))


def two_optimizers(wrap: Wrap) -> Tensor:
    first, second = make_model(1), make_model(2)
    optimizers = [wrap("adam", first), wrap("momentum", second)]
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for model, optimizer in zip((first, second), optimizers, strict=True):
            loss_of(model, hvd.rank(), step).backward()
            optimizer.step()
    return flat(torch.nn.ModuleList([first, second]))


def sparse(wrap: Wrap) -> Tensor:
    parts = []
    for as_dense in (True, False):
        # Not by the global seed, which ranks that are threads share.
        weights = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
        table = torch.nn.Embedding.from_pretrained(weights.to(**PLACE), freeze=False, sparse=True)
        optimizer = wrap(lambda p: torch.optim.SGD(p, lr=0.5), table, sparse_as_dense=as_dense)
        for step in range(STEPS):
            optimizer.zero_grad()
            rows = torch.tensor([hvd.rank(), 2, 2, step], device=PLACE["device"])
            table(rows).square().sum().backward()
            optimizer.step()
        parts.append(flat(table))
    return torch.cat(parts)


def predivided(wrap: Wrap) -> Tensor:
    model = make_model()
    return take_steps(model, wrap("sgd", model, gradient_predivide_factor=4.0), STEPS)


def process_sets(wrap: Wrap) -> Tensor:
    """All ranks but the first train together, the first by itself."""
    others = hvd.add_process_set(range(1, hvd.size()))
    model = make_model()
    mine = take_steps(model, wrap("adam", model, process_set=others), STEPS)
    rows = hvd.allgather(mine.unsqueeze(0))
    alone = make_model()
    plain = OPTIMIZERS["adam"](alone.parameters())
    for step in range(STEPS):
        plain.zero_grad()
        loss_of(alone, 0, step).backward()
        plain.step()
    assert torch.equal(rows[0], flat(alone))
    assert all(torch.equal(row, rows[1]) for row in rows[1:])
    assert not torch.equal(rows[0], rows[1])
    return rows.view(-1)


def resumed(wrap: Wrap) -> Tensor:
    """The same bits as without the interruption."""
    runs = [_interrupted(wrap, stop) for stop in (None, STOP)]
    assert torch.equal(*runs)
    return runs[0]


def _interrupted(wrap: Wrap, stop: int | None) -> Tensor:
    def begin(seed: int) -> tuple[torch.nn.Module, Any, Any]:
        model = make_model(seed)
        optimizer = wrap("adamw", model)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    model, optimizer, rates = begin(0)
    for step in range(STEPS):
        if step == stop:
            parts = [each.state_dict() for each in (model, optimizer, rates)]
            file = io.BytesIO()
            torch.save(parts, file)
            file.seek(0)
            model, optimizer, rates = begin(99)
            for each, part in zip(
                (model, optimizer, rates), torch.load(file, weights_only=True), strict=True
            ):
                each.load_state_dict(part)
        optimizer.zero_grad()
        loss_of(model, hvd.rank(), step).backward()
        optimizer.step()
        rates.step()
    return flat(model)


_AFTER_BACKWARD = ("sum", "average", "delta", "gradient")
_EVERY = (*_AFTER_BACKWARD, "delta in backward")
LINES: dict[Callable[[Wrap], Tensor], tuple[str, ...]] = {
    groups: (*_EVERY, "owners"),
    accumulation: _EVERY,
    compressed: _EVERY,
    closures: _EVERY,
    line_search: _AFTER_BACKWARD,
    clipped: _AFTER_BACKWARD,
    scaled: _AFTER_BACKWARD,
    autocast: _EVERY,
    unused_parameters: (*_EVERY, "owners"),
    frozen_shared_and_added: _EVERY,
    two_optimizers: _EVERY,
    predivided: ("average",),
    process_sets: _EVERY,
    sparse: ("sum", "average", "delta", "delta in backward"),
    resumed: _EVERY,
}


def every_training() -> dict[str, Tensor]:
    """Run each training by each method; return the parameters it ends with."""
    return {
        f"{line.__name__}, {way}": line(_wrap(way)) for line, ways in LINES.items() for way in ways
    }
