"""What the fuzzers found in `kernels`, each once more by itself."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels


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
    with pytest.raises(TypeError, match=r"a must be a torch\.Tensor, not int"):
        kernels.adasum_bytes(3, torch.ones(2))
    with pytest.raises(ValueError, match="tensors is empty"):
        kernels.sum_n_bytes([])
    with pytest.raises(ValueError, match=r"b has shape \(3,\)"):
        kernels.scaled_add_reference(torch.ones(2), torch.ones(3))
    with pytest.raises(TypeError, match=r"layout must be a kernels\.Layout, not NoneType"):
        kernels.unpack_reference(torch.ones(2), None)
    pair = kernels.sum_n_reference([torch.ones(2, requires_grad=True)])
    assert not pair.requires_grad
