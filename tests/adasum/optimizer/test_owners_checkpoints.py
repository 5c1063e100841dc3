"""mode="owners": checkpoints are whole, of any number of ranks, and cost no hang."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import adasum as hvd
import collectives
from adasum import DistributedOptimizer
from tests.adasum.definition import OPTIMIZERS, flat, loss_of, make_model
from tests.adasum.jobs import on_ranks, wrapped

STEPS, STOP = 4, 2
Checkpoint = tuple[dict[str, Any], dict[str, Any]]


def _make(mode: str | None = "owners", seed: int = 0) -> tuple[torch.nn.Sequential, Any]:
    model = make_model(seed)
    optimizer = wrapped(model, "adamw", mode=mode, algorithm="rechd")
    return model, optimizer


def _step(model: torch.nn.Module, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    loss_of(model, hvd.rank(), step).backward()
    optimizer.step()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other) and one.dtype == other.dtype
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _train(size: int, mode: str | None, start: Checkpoint | None = None) -> Checkpoint:
    """Train to STOP, or on from a checkpoint; return rank 0's checkpoint."""

    def job(group: collectives.Group) -> Checkpoint | None:
        model, optimizer = _make(mode, seed=0 if start is None else 99)
        assert optimizer.state_dict()["state"] == {}, "there is no state before the first step"
        steps = range(STOP)
        if start is not None:
            model.load_state_dict(start[0])
            optimizer.load_state_dict(copy.deepcopy(start[1]))
            steps = range(STOP, STEPS)
        for step in steps:
            _step(model, optimizer, step)
        if mode is not None:
            if size > 1:
                with pytest.raises(RuntimeError, match=rf"to={group.rank}\) on every rank before"):
                    optimizer.state_dict()
            optimizer.consolidate_state_dict()
            if group.rank:
                with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                    optimizer.state_dict()
        if group.rank:
            return None
        return copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    answers = collectives.run_threads(size, job)
    assert answers[0] is not None
    return answers[0]


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3), (3, 2), (4, 1), (1, 5)])
def test_checkpoint_loaded_on_any_number_of_ranks_goes_on_with_the_same_bits(
    sizes: tuple[int, int],
) -> None:
    middle = _train(sizes[0], "owners")
    assert _same(middle, _train(sizes[0], None))
    assert _same(_train(sizes[1], "owners", middle), _train(sizes[1], None, middle))
    plain = make_model()
    OPTIMIZERS["adamw"](plain.parameters()).load_state_dict(middle[1])


@on_ranks(3)
def test_consolidated_state_is_a_copy_that_the_next_step_drops(group: collectives.Group) -> None:
    model, optimizer = _make()
    _step(model, optimizer, 0)
    optimizer.consolidate_state_dict(to=None)
    saved = optimizer.state_dict()
    kept = copy.deepcopy(saved)
    optimizer.consolidate_state_dict(to=1)
    assert len(saved["state"]) == 4
    _step(model, optimizer, 1)
    assert _same(saved, kept)
    with pytest.raises(RuntimeError, match="consolidate_state_dict"):
        optimizer.state_dict()
    assert all(optimizer.state[p] for p in optimizer.state), "a state without content"


def test_broadcast_optimizer_state_from_the_rank_that_loaded_gives_each_its_part() -> None:
    middle = _train(2, "owners")
    wanted = _train(2, None, middle)

    def job(group: collectives.Group) -> None:
        model, optimizer = _make(seed=99)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert not optimizer.state
        if group.rank == 1:
            model.load_state_dict(middle[0])
            optimizer.load_state_dict(middle[1])
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=1)
        assert len(optimizer.state) in (1, 2, 3)
        for step in range(STOP, STEPS):
            _step(model, optimizer, step)
            # In mid-run, too.
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        assert _same(model.state_dict(), wanted[0])
        assert len(optimizer.state) < 4

    collectives.run_threads(2, job)


def test_state_that_cannot_be_sent_is_an_error_on_every_rank() -> None:
    class Odd:
        pass

    def job(group: collectives.Group) -> None:
        model, optimizer = _make()
        _step(model, optimizer, 0)
        if group.rank == 1:
            for state in optimizer.state.values():
                state["odd"] = Odd()
        with pytest.raises(TypeError, match=r"the state of parameter \d on rank 1"):
            optimizer.consolidate_state_dict()
        _step(model, optimizer, 1)

    collectives.run_threads(2, job)


def test_state_loaded_before_wrapping_is_kept_in_part() -> None:
    middle = _train(2, "owners")
    wanted = _train(2, None, middle)

    def job(group: collectives.Group) -> None:
        model = make_model()
        plain = OPTIMIZERS["adamw"](model.parameters())
        model.load_state_dict(middle[0])
        plain.load_state_dict(copy.deepcopy(middle[1]))
        optimizer = DistributedOptimizer(plain, mode="owners")
        assert len(optimizer.state) < 4
        for step in range(STOP, STEPS):
            _step(model, optimizer, step)
        assert torch.equal(flat(model), torch.cat([v.reshape(-1) for v in wanted[0].values()]))

    collectives.run_threads(2, job)
