"""Bad input: an error that names the argument and the fix, and nothing sent or changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

import collectives
from collectives import Group, Sum
from collectives.schedules.topology import Topology
from collectives.transport import ThreadWorld, Transport
from tests.frozen import errors, table, worlds

HELD = table.read()


class _Silent(Transport):
    """A transport on which any message is a failure."""

    def __init__(self) -> None:
        self.rank, self.size = 0, 2

    def check_device(self, device: torch.device) -> None:
        ThreadWorld(1).transport(0).check_device(device)

    def exchange(self, *args: object) -> None:
        raise AssertionError("something was sent")

    def split(self, ranks: Sequence[int], timeout: float) -> Transport:
        raise AssertionError("something was split")

    def close(self) -> None:
        """Nothing to let go of."""


@pytest.fixture
def group() -> Iterator[Group]:
    silent = Group(_Silent(), timeout=1.0, local_rank=0, local_size=2, topology=Topology(2, 2))
    yield silent
    silent.close()


def _is_refused_by_one_rank(name: str) -> bool:
    """Whether it fails without a message; ranks negotiate a request before they start it."""
    held = HELD.outcomes[f"error {name} messages 2"]
    alone = not name.startswith(("start_", "wait_", "rebind_"))
    return alone and isinstance(held, str) and held.startswith(("TypeError", "ValueError"))


REFUSED = [*filter(_is_refused_by_one_rank, (*errors.REFUSED, *errors.SPECIFICATIONS))]


@pytest.mark.filterwarnings("ignore:.*quantize")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_call_has_sent_nothing_and_names_the_fix(group: Group, name: str) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        errors.ERRORS[name](group)
    case = f"error {name} messages 2"
    assert not table.differences(HELD, {case: worlds.said(caught.value)})


def test_tensor_with_a_tangent_is_refused(group: Group) -> None:
    with (
        forward_ad.dual_level(),
        pytest.raises(ValueError, match=r"tensor has a tangent, .* pass forward_ad\.unpack_dual"),
    ):
        group.reduce_scatter(forward_ad.make_dual(torch.ones(4), torch.ones(4)))


def test_all_reduce_of_a_leaf_that_requires_grad_is_in_place() -> None:
    group = Group(ThreadWorld(1).transport(0), timeout=1.0, local_rank=0, local_size=1)
    leaf = torch.ones(3, requires_grad=True)
    group.all_reduce(leaf, Sum, prescale=2.0)
    assert torch.equal(leaf.detach(), torch.full((3,), 2.0)) and leaf.requires_grad
    group.all_reduce(leaf[1:], Sum, prescale=2.0)
    assert leaf.tolist() == [2.0, 4.0, 4.0]
    with torch.no_grad():
        group.all_reduce(leaf * 2, Sum)
    made = leaf * 2
    with torch.no_grad():
        group.all_reduce(made, Sum)
    group.close()


@pytest.mark.parametrize(
    ("dtype", "factor"), [(torch.int8, 127.0), (torch.float64, 1e300), (torch.complex128, 1e300)]
)
def test_the_largest_factors_of_a_dtype_multiply(dtype: torch.dtype, factor: float) -> None:
    group = Group(ThreadWorld(1).transport(0), timeout=1.0, local_rank=0, local_size=1)
    result = group.all_reduce(torch.ones(2, dtype=dtype), Sum, prescale=factor)
    assert torch.equal(result, torch.full((2,), factor, dtype=dtype))
    group.close()


@pytest.mark.parametrize("timeout", [math.inf, math.nan, 0, -1, 1e300])
def test_group_of_a_bad_timeout_raises(timeout: float) -> None:
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        Group(ThreadWorld(1).transport(0), timeout=timeout, local_rank=0, local_size=1)


@pytest.mark.parametrize("half", [np.float32(0.5), np.float64(0.5), Fraction(1, 2)])
def test_numbers_of_other_libraries_are_factors(half: Any) -> None:
    def work(group: Group) -> list[float]:
        x = torch.ones(2)
        group.all_reduce(x, Sum, prescale=half, postscale=np.int64(3))
        found: list[float] = x.tolist()
        return found

    assert collectives.run_threads(2, work) == [[3.0, 3.0]] * 2
