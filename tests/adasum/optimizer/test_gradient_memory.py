"""Gradients stay the user's: in the memory, with the strides, dtype and graph that they have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import adasum as hvd
from collectives import CollectiveMismatchError, Group, run_threads
from tests.adasum.jobs import on_ranks, ways, wrapped

WAYS = ways("average", "gradient", "owners", "delta")


@pytest.mark.parametrize("way", ["average", "gradient"])
def test_gradients_that_backward_has_not_made_stay_in_the_memory_that_others_write_to(
    way: str,
) -> None:
    """As NumPy does to its arrays, and a CUDA graph to the gradients of a backward it holds."""

    def run(group: Group, array: Any) -> list[list[float]]:
        parameter = torch.nn.Parameter(torch.zeros(2))
        plain = torch.optim.SGD([parameter], lr=1.0)
        optimizer: Any = hvd.DistributedOptimizer(plain, [("p", parameter)], **WAYS[way])
        parameter.grad = torch.from_numpy(array)
        found = []
        for scale in (1.0, 2.0, 4.0):
            array[:] = scale, -scale
            optimizer.step()
            found += [parameter.tolist(), array.tolist()]
            optimizer.zero_grad(set_to_none=False)
            assert not array.any()
        return found

    def start(group: Group) -> list[list[float]]:
        return run(group, np.zeros(2, np.float32))

    # Equal gradients are their own average, and Adasum.
    steps = [[-1.0, 1.0], [1.0, -1.0], [-3.0, 3.0], [2.0, -2.0], [-7.0, 7.0], [4.0, -4.0]]
    assert run_threads(2, start) == [steps] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None])
def test_gradients_of_another_dtype_than_their_parameter_are_reduced_in_it(
    dtype: torch.dtype | None,
) -> None:
    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has no grad_dtype")

    def run(group: Group) -> None:
        parameter = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16))
        other = torch.nn.Parameter(torch.ones(3))
        parameter.grad_dtype = dtype
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter, other], lr=0.0))
        for step in range(2):
            optimizer.zero_grad()
            wide = dtype or torch.float32
            mine = torch.full((5,), 1.0 + (group.rank + step) * 2.0**-12, dtype=wide)
            if group.rank == 0 or dtype is None:
                parameter.grad = mine.clone()
            else:
                # This rank has none.
                mine.zero_()
            other.grad = torch.full((3,), float(group.rank))
            optimizer.synchronize()
            ranks = [
                1.0 + step * 2.0**-12,
                1.0 + (1 + step) * 2.0**-12 if dtype is None else 0.0,
            ]
            assert parameter.grad.dtype == wide
            assert torch.equal(parameter.grad, torch.full((5,), sum(ranks) / 2, dtype=wide))
            assert torch.equal(other.grad, torch.full((3,), 0.5))
            with optimizer.skip_synchronize():
                optimizer.step()

    run_threads(2, run)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_state_of_another_shape_than_its_parameter_raises_and_names_both(
    group: Group, way: str
) -> None:
    model = torch.nn.Linear(4, 4)
    with torch.no_grad():
        for each in model.parameters():
            each.fill_(0.5)
    optimizer = wrapped(model, torch.optim.Adam, **WAYS[way])

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()

    step()
    for each in model.parameters():
        each.grad = None
        each.data = torch.cat([each.data, each.data])[:6].clone()
    # A state is on its owner alone, and the other rank waits for its parameters.
    if way != "owners":
        with pytest.raises(ValueError, match=r"exp_avg of (bias|weight) has shape \(4.*\(6"):
            step()
        for each in model.parameters():
            optimizer.state.pop(each)
        step()


@on_ranks(2)
def test_a_gradient_of_another_shape_than_its_parameter_raises_and_names_it(group: Group) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = wrapped(model, check_parameters=False)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    model.bias.data = torch.zeros(6)
    with pytest.raises(ValueError, match=r"gradient of bias has shape \(4,\) .* \(6,\).*None"):
        optimizer.step()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("strides", [(1, 4), (6, 1), (6, 2), (12, 3)], ids=str)
def test_parameters_not_contiguous_train_as_a_contiguous_copy(
    way: str, strides: tuple[int, int]
) -> None:
    """Columns of a larger tensor."""

    def run(group: Group, copied: bool) -> Tensor:
        values = torch.arange(48.0).as_strided((4, 3), strides)
        columns = torch.nn.Parameter(values.contiguous() if copied else values)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([columns], lr=0.1), **WAYS[way])
        for _ in range(2):
            optimizer.zero_grad()
            (columns * (group.rank + 1) - 1).square().sum().backward()
            optimizer.step()
        return columns.detach().clone(memory_format=torch.contiguous_format)

    plain = run_threads(2, lambda group: run(group, True))
    for got in run_threads(2, lambda group: run(group, False)):
        assert torch.equal(got, plain[0])


@pytest.mark.parametrize("way", WAYS)
def test_channels_last_gradients_keep_their_strides_and_have_to_on_all_ranks(way: str) -> None:
    def run(group: Group, alike: bool) -> None:
        weight = torch.ones(4, 3, 2, 2)
        last = alike or group.rank == 0
        parameter = torch.nn.Parameter(
            weight.to(memory_format=torch.channels_last) if last else weight
        )
        stride = parameter.stride()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), **WAYS[way])

        def step() -> None:
            optimizer.zero_grad()
            (parameter * (1.0 + group.rank)).sum().backward()
            optimizer.step()

        if not alike:
            with pytest.raises(CollectiveMismatchError, match="memory formats"):
                step()
            return
        for _ in range(3):
            step()
            assert parameter.stride() == stride
            assert parameter.grad is None or parameter.grad.stride() == stride

    for alike in (True, False):
        run_threads(2, lambda group, alike=alike: run(group, alike))
