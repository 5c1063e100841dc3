"""Layouts that contradict themselves, which a call would follow out of its memory."""

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
