"""Plans of tensors that were resized or given other memory: runs and `check` name them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.conftest import Backend
from tests.kernels.test_plans import PLANS, pair


def replace(tensor: Tensor) -> None:
    tensor.data = torch.zeros(70)


CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "resized": lambda tensor: tensor.resize_(3),
    "grown": lambda tensor: tensor.resize_(1 << 20),
    "replaced": replace,
    "set to another": lambda tensor: tensor.set_(torch.zeros(70)),
    "emptied": lambda tensor: tensor.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("place", "name"), [(0, "a"), (1, "b"), (2, "out"), (3, "found_inf")])
def test_check_and_run_name_the_tensor_that_was_given_other_memory_and_write_nothing(
    backend: Backend, change: str, place: int, name: str
) -> None:
    if backend.device != "cpu":
        pytest.skip("what changes is on a CPU")
    tensors = torch.ones(70), torch.full((70,), torch.inf), torch.zeros(70), torch.zeros(1)
    plan = kernels.plan_scaled_add(*tensors[:2], out=tensors[2], found_inf=tensors[3])
    plan.check()
    CHANGES[change](tensors[place])
    # A run compares addresses, which a smaller shape leaves.
    for call in (plan.check,) if change == "resized" else (plan.check, plan):
        with pytest.raises(RuntimeError, match=f"^{name} was resized or given other memory"):
            call()
    written = [one for i, one in enumerate(tensors) if i >= 2 and i != place]
    assert not any(one.any() for one in written)


@pytest.mark.parametrize("function", PLANS)
def test_runs_of_any_plan_find_other_memory_and_go_on_once_rebound(
    backend: Backend, function: str
) -> None:
    for place in (0, 1):
        tensors = pair(backend, 1)
        plan = PLANS[function](tensors)
        plan()
        tensors[place].data = tensors[place].data.clone()
        with pytest.raises(RuntimeError, match="was resized or given other memory"):
            plan()
        plan.rebind(tensors)
        plan()


@pytest.mark.parametrize("count", [1, 3, 40])
def test_rebound_lists_are_looked_at_where_they_now_lie(count: int) -> None:
    old, new = ([torch.full((5,), value) for _ in range(count)] for value in (1.0, 2.0))
    plan = kernels.plan_pack(old)
    plan.rebind(new)
    old[-1].data = torch.zeros(5)
    assert plan()[0] == 2
    new[-1].data = torch.zeros(5)
    for call in (plan, plan.check):
        with pytest.raises(RuntimeError, match=rf"tensors\[{count - 1}\] was resized"):
            call()
    plan.release()
    plan.rebind(new)
    plan.check()
    assert plan()[0] == (0 if count == 1 else 2)
