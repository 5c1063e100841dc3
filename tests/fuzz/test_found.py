"""What the fuzzers found, each once more by itself; and views without memory of their own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import adasum
import collectives
import kernels
from adasum import Sum
from collectives import CollectiveMismatchError, Group, run_threads


def test_empty_name_is_another_than_none() -> None:
    def run(group: Group) -> str:
        with pytest.raises(CollectiveMismatchError, match=r"all_reduce\(''\)") as caught:
            group.all_reduce(torch.ones(3), name="" if group.rank else None)
        assert group.all_reduce(torch.ones(1)).item() == 2.0
        return str(caught.value)

    first, second = run_threads(2, run)
    assert first == second


def test_what_json_cannot_carry_raises_before_anything_is_sent() -> None:
    def run(group: Group) -> float:
        with pytest.raises(TypeError, match="by_rows must be a bool, got object"):
            group.reduce_scatter(torch.ones(3), by_rows=object())
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
        with pytest.raises(TypeError, match=r"additions, which torch lacks for torch\.float8"):
            group.grouped_all_reduce(ones, op)
        assert ones[0].tolist() == [1.0, 1.0]
        # They can be moved.
        return group.all_gather(ones[1]).float().sum().item()

    assert run_threads(2, run) == [4.0] * 2


def test_functions_on_ranks_with_a_bad_argument_name_it() -> None:
    def run(group: Group) -> float:
        ones = torch.ones(2)
        for call, words in [
            (lambda: adasum.allreduce(ones, compression=None), "compression must have compress"),
            (lambda: adasum.allreduce(ones, average=ones), "average must be a bool"),
            (lambda: adasum.broadcast(ones, "0"), "root_rank must be an int"),
            (lambda: adasum.broadcast_object(1, name=3), "name must be a str or None"),
            (lambda: adasum.reducescatter(ones, prescale_factor="2"), "prescale_factor must be"),
            (lambda: adasum.join(device="cuda"), "device must be of type int"),
            (lambda: adasum.grouped_allreduce(ones), "tensors must be a list of tensors"),
            (lambda: adasum.ddp_hook(None, None), "state must be a HookState"),
        ]:
            with pytest.raises(TypeError, match=words):
                call()
        # A tensor without rows that wants a gradient, too.
        with pytest.raises(ValueError, match="first dimension"):
            adasum.allgather(torch.tensor(1.0, requires_grad=True))
        return adasum.allreduce(ones, op=Sum)[0].item()

    assert run_threads(2, run) == [2.0] * 2


def test_functions_without_ranks_with_a_bad_argument_name_it() -> None:
    for call, error, words in [
        (lambda: adasum.synchronize(None), TypeError, "handle must be"),
        (lambda: adasum.ProcessSet(torch.tensor([0, 1])), TypeError, "must be a list of ranks"),
        (lambda: adasum.process_set_by_id("0"), TypeError, "process_set_id must be an int"),
    ]:
        with pytest.raises(error, match=words):
            call()


@pytest.mark.parametrize(
    "changes",
    [
        {"offsets": (0, 1 << 40)},
        {"offsets": (0, -16)},
        {"offsets": (16, 0)},
        {"numel": 8},
        {"numels": (5, 500)},
        {"numels": (3, 5)},
        {"dtype": torch.int32},
    ],
)
def test_layouts_that_would_write_elsewhere(changes: dict[str, object]) -> None:
    tensors = [torch.ones(5), torch.ones(5)]
    layout = dataclasses.replace(kernels.layout_of(tensors), **changes)
    with pytest.raises((TypeError, ValueError)):
        kernels.pack(tensors, layout=layout)
    buffer = torch.zeros(layout.numel)
    with pytest.raises((TypeError, ValueError)):
        kernels.unpack(buffer, tensors, layout=layout)
    with pytest.raises((TypeError, ValueError)):
        kernels.unpack_reference(buffer, layout)
    assert all(tensor.tolist() == [1.0] * 5 for tensor in tensors) and not buffer.any()


def test_twins_check_as_their_functions_do() -> None:
    with pytest.raises(TypeError, match=r"a must be a torch\.Tensor, got int"):
        kernels.adasum_bytes(3, torch.ones(2))
    with pytest.raises(ValueError, match="tensors is empty"):
        kernels.sum_n_bytes([])
    with pytest.raises(ValueError, match=r"b has shape \(3,\)"):
        kernels.scaled_add_reference(torch.ones(2), torch.ones(3))
    with pytest.raises(TypeError, match=r"layout must be a kernels\.Layout, got NoneType"):
        kernels.unpack_reference(torch.ones(2), None)
    pair = kernels.sum_n_reference([torch.ones(2, requires_grad=True)])
    assert not pair.requires_grad


CONJUGATE = (torch.ones(3, dtype=torch.complex64) * 1j).conj()


def test_memory_that_does_not_hold_the_values() -> None:
    """Bytes travel: a view with a conjugate or negative bit would arrive with another value."""

    def run(group: Group) -> list[complex]:
        with pytest.raises(ValueError, match=r"resolve_conj\(\)\.resolve_neg\(\)"):
            group.all_reduce(CONJUGATE)
        with pytest.raises(ValueError, match=r"resolve_conj\(\)\.resolve_neg\(\)"):
            group.all_gather(CONJUGATE)
        return adasum.allgather(CONJUGATE).tolist()

    assert run_threads(2, run) == [[-1j] * 6] * 2
    negative = (torch.ones(1, dtype=torch.complex64) * 1j).conj().imag
    assert negative.is_contiguous() and negative.is_neg()
    with pytest.raises(ValueError, match=r"a is a negative view: pass a\.resolve_neg\(\)"):
        kernels.adasum(negative, torch.ones(1))
