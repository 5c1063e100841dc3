"""What the fuzzers found in `collectives`, each once more by itself."""

from __future__ import annotations

import pytest
import torch

import collectives
from collectives import CollectiveMismatchError, Group, run_threads


def test_empty_name_is_another_than_none() -> None:
    def run(group: Group) -> str:
        with pytest.raises(CollectiveMismatchError, match=r"all_reduce\(''\)") as caught:
            group.all_reduce(torch.ones(3), name="" if group.rank else None)
        assert group.all_reduce(torch.ones(1)).item() == 2.0
        return str(caught.value)

    first, second = run_threads(2, run)
    assert first == second


def test_name_that_json_cannot_carry_raises_before_anything_is_sent() -> None:
    def run(group: Group) -> float:
        with pytest.raises(TypeError, match="name must be a str or None, got object"):
            group.all_reduce(torch.ones(3), name=object())
        with pytest.raises(TypeError, match="by_rows must be a bool, got object"):
            group.reduce_scatter(torch.ones(3), by_rows=object())
        with pytest.raises(TypeError, match="splits must be a list or tensor of ints"):
            group.all_to_all(torch.ones(2), int)
        with pytest.raises(TypeError, match="segments must be a list or tuple of ints"):
            group.all_reduce(torch.ones(2), segments=torch.tensor([0, 2]))
        with pytest.raises(ValueError, match="prescale must be finite"):
            group.all_reduce(torch.ones(2), prescale=10**400)
        # An int and a float of one value are one scale.
        return group.all_reduce(torch.ones(1), prescale=(2, 2.0)[group.rank]).item()

    assert run_threads(2, run) == [4.0] * 2


def test_plain_functions_of_bad_arguments_name_them() -> None:
    packing = collectives.Packing(((2, 2), (2, 2)), (torch.Size([7]),) * 4)
    for call, error, words in [
        (lambda: collectives.split_by_size([3], 1), TypeError, r"tensors\[0\] must be a torch"),
        (lambda: collectives.plan_groups([None]), TypeError, r"tensors\[0\] must be a torch"),
        (lambda: collectives.FusedBuffer([]), ValueError, "one or more"),
        (lambda: collectives.group_devices({"a": 1}, 1), TypeError, "devices must be a list"),
        (lambda: collectives.split_bounds(1.5, 2), TypeError, "numel must be an int"),
        (lambda: collectives.verify(None), TypeError, "schedule must be a Schedule"),
        (
            lambda: collectives.unpack_small_tensors([torch.ones(7)] * 4, packing),
            ValueError,
            "contradict each other",
        ),
    ]:
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize("op", [collectives.Sum, collectives.Average], ids=str)
def test_dtype_that_torch_cannot_add_raises(op: collectives.Reducer) -> None:
    """One of them behind a tensor that was reduced already left the group unusable."""

    def run(group: Group) -> float:
        ones = [torch.ones(2), torch.ones(2).to(torch.float8_e4m3fn)]
        with pytest.raises(TypeError, match=r"additions, which torch has not for torch\.float8"):
            group.grouped_all_reduce(ones, op)
        assert ones[0].tolist() == [1.0, 1.0]
        # They can be moved.
        return group.all_gather(ones[1]).float().sum().item()

    assert run_threads(2, run) == [4.0] * 2
