"""Tensors that are more, or less, than memory of their own: the right answer, or a TypeError."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from kernels.validation import require_plain

X = torch.ones(3, 4)


class Subclass(Tensor):
    """Adds nothing."""


def resized(tensor: Tensor, nbytes: int) -> Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def fake() -> Tensor:
    with FakeTensorMode():
        return torch.empty(8)


PLAIN: dict[str, Callable[[], Tensor]] = {
    "tensor": lambda: torch.ones(8),
    "parameter": lambda: torch.nn.Parameter(torch.ones(8)),
    "buffer": lambda: torch.nn.Buffer(torch.ones(8)),
    "not a leaf": lambda: torch.ones(8, requires_grad=True) * 2,
    "empty": lambda: torch.ones(0),
    "expanded": lambda: torch.ones(1).expand(8),
    "last element of its storage": lambda: torch.zeros(8).as_strided((2, 3), (5, 1)),
    "channels last": lambda: torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "complex": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "float8": lambda: torch.ones(3).to(torch.float8_e4m3fn),
    "meta": lambda: torch.ones(8, device="meta"),
    "sparse": lambda: torch.eye(8).to_sparse(),
}
NOT_PLAIN: dict[str, tuple[Callable[[], Any], str]] = {
    "number": (lambda: 3, r"must be a torch\.Tensor, not int"),
    "subclass": (lambda: torch.ones(8).as_subclass(Subclass), "is a Subclass, .* plain tensor"),
    "fake": (fake, "is a FakeTensor"),
    "zeros of torch": (lambda: torch._efficientzerotensor(8), "has no memory of its own"),
    "too short": (lambda: resized(torch.ones(8), 28), "reaches beyond its storage"),
    "emptied": (lambda: resized(torch.ones(8), 0), "reaches beyond its storage"),
    "too short by one": (lambda: resized(torch.zeros(8)[::2], 24), "reaches beyond its storage"),
}


@pytest.mark.parametrize("kind", PLAIN)
def test_gate_lets_tensors_with_memory_of_their_own_through(kind: str) -> None:
    require_plain("tensor", PLAIN[kind]())


@pytest.mark.parametrize("kind", NOT_PLAIN)
def test_gate_names_what_has_no_memory_of_its_own(kind: str) -> None:
    make, words = NOT_PLAIN[kind]
    with pytest.raises(TypeError, match=rf"^tensors\[1\] {words}"):
        require_plain("tensors[1]", make())


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
def test_gate_names_tensors_inside_a_transform(transform: str) -> None:
    def inside(x: Tensor) -> Tensor:
        with pytest.raises(TypeError, match=r"^x has no memory of its own, as tensors inside vmap"):
            require_plain("x", x)
        return x.sum()

    getattr(torch.func, transform)(inside)(X)


def test_gate_names_a_tensor_under_a_dispatch_mode() -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return func(*args, **(kwargs or {}))

    with Mode(), pytest.raises(TypeError, match=r"^x is passed under a torch dispatch mode"):
        require_plain("x", X)
    with torch.device("cpu"):
        require_plain("x", X)
