"""What a state holds besides plain tensors, and ranks whose states differ. Ranks are threads."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import adasum as hvd
from collectives import CollectiveMismatchError, Group, run_threads
from tests.adasum.jobs import on_ranks


class Scaled(nn.Linear):
    """A layer with extra state, as layers that compute in 8 bits have it."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.parametrize(
    "make",
    [bytes, dict, io.BytesIO, lambda: None, lambda: [torch.ones(2)]],
    ids=["bytes", "dict", "file", "None", "list"],
)
def test_broadcast_parameters_gives_only_extra_state_that_is_a_tensor(
    make: Callable[[], Any],
) -> None:
    def run(group: Group) -> Tensor:
        extra, tensor = make(), torch.full((3,), float(group.rank))
        model = nn.Sequential(Scaled(extra), Scaled(tensor))
        with torch.no_grad():
            model[0].weight.fill_(float(group.rank))
        hvd.broadcast_parameters(model.state_dict(), root_rank=1)
        hvd.broadcast_parameters(list(model.state_dict().items()), root_rank=1)
        assert model[0].extra is extra and tensor.tolist() == [1.0] * 3
        return model[0].weight.detach()

    assert all(torch.equal(weight, torch.ones(2, 2)) for weight in run_threads(3, run))


@on_ranks(3)
def test_broadcast_parameters_writes_expanded_and_tied_and_strided_tensors(group: Group) -> None:
    mine = float(group.rank)
    mask = torch.full((1, 3), mine).expand(4, 3)
    row = torch.arange(3.0).add(mine).expand(2, 5, 3)
    scalar = torch.tensor(mine).expand(7)
    tied = torch.full((2, 2), mine)
    image = torch.full((2, 3, 4, 4), mine).to(memory_format=torch.channels_last)
    every_other = torch.full((6,), mine)
    windows = torch.arange(6.0).add(mine).unfold(0, 3, 1)
    conjugate = torch.full((3,), complex(1, mine)).conj()
    negative = torch.full((3,), complex(1, mine)).conj().imag
    state = {
        "mask": mask,
        "row": row,
        "scalar": scalar,
        "tied": tied,
        "tied again": tied,
        "image": image,
        "every other": every_other[::2],
        "windows": windows,
        "conjugate": conjugate,
        "negative": negative,
        "empty": torch.empty(0, 3),
        "none of many": torch.empty(1, 0).expand(4, 0),
        "parameter": nn.Parameter(torch.full((2,), mine).expand(3, 2)),
    }
    hvd.broadcast_parameters(state, root_rank=1)
    assert torch.equal(mask, torch.ones(4, 3))
    assert torch.equal(row, torch.arange(1.0, 4.0).expand(2, 5, 3))
    assert torch.equal(scalar, torch.ones(7))
    assert torch.equal(tied, torch.ones(2, 2))
    assert torch.equal(image, torch.ones(2, 3, 4, 4))
    # The elements between are of no tensor in the state.
    assert every_other.tolist() == [1.0, mine] * 3
    assert torch.equal(windows, torch.arange(1.0, 7.0).unfold(0, 3, 1))
    assert torch.equal(conjugate.resolve_conj(), torch.full((3,), 1 - 1j))
    assert negative.tolist() == [-1.0] * 3
    assert torch.equal(state["parameter"].detach(), torch.ones(3, 2))


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (lambda: torch.eye(2).to_sparse(), r"params\['x'\] must be dense"),
        (lambda: torch.ones(2, device="meta"), r"params\['x'\] is on meta"),
        (lambda: nn.UninitializedParameter(), r"params\['x'\] is an uninitialised parameter"),
        (lambda: torch.nested.nested_tensor([torch.ones(2)]), r"params\['x'\] must not be nested"),
        (
            lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
            r"params\['x'\] must not be quantized",
        ),
        (lambda: 0.1, r"params\['x'\] must be a tensor, got float"),
        (lambda: {"a": torch.ones(2)}, r"params\['x'\] must be a tensor, got dict"),
    ],
    ids=["sparse", "meta", "lazy", "nested", "quantized", "float", "dict"],
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_broadcast_parameters_of_what_cannot_be_sent_raises_on_every_rank_and_loses_nothing(
    entry: Callable[[], Any], text: str
) -> None:
    def run(group: Group) -> str:
        weight = torch.full((2,), float(group.rank))
        state = {"w": weight, "x": entry() if group.rank == 1 else torch.ones(2)}
        with pytest.raises((TypeError, ValueError), match=f"rank 1: {text}") as error:
            hvd.broadcast_parameters(state, root_rank=0)
        # The ranks are still in step, and nothing was overwritten.
        assert weight.tolist() == [float(group.rank)] * 2
        hvd.broadcast_parameters({"w": weight}, root_rank=0)
        assert weight.tolist() == [0.0, 0.0]
        return str(error.value)

    first, *others = run_threads(3, run)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("mine", "other", "text"),
    [
        ({"w": (2, 3)}, {"w": (3, 2)}, r"w is float32 \(2, 3\) on cpu on rank 0 and"),
        ({"w": (2,)}, {"w": (2,), "b": (2,)}, "rank 2 has 'b', which rank 0 has not: build"),
        ({"w": (2,), "b": (2,)}, {"w": (2,)}, "rank 0 has 'b', which rank 2 has not: build"),
        ({"w": (2,)}, {"v": (2,)}, "rank 0 has 'w', which rank 2 has not and rank 2 has 'v'"),
        (
            {"a.w": (2,), "b.w": (2,)},
            {"a._orig_mod.w": (2,), "b.w": (2,)},
            "which rank 0 has not: '_orig_mod.' is what torch.compile puts before names",
        ),
        ({"w": (2,)}, {"module.w": (2,)}, "'module.' is what DistributedDataParallel puts before"),
    ],
    ids=["shape", "more", "fewer", "name", "compiled", "wrapped"],
)
@pytest.mark.parametrize("form", [dict, lambda state: list(state.items())], ids=["dict", "list"])
def test_broadcast_parameters_of_other_entries_raises_on_every_rank_and_names_them(
    mine: dict[str, Any], other: dict[str, Any], text: str, form: Callable[..., Any]
) -> None:
    def run(group: Group) -> str:
        shapes = other if group.rank == 2 else mine
        state = {name: torch.full(shape, float(group.rank)) for name, shape in shapes.items()}
        with pytest.raises(CollectiveMismatchError, match=text) as error:
            hvd.broadcast_parameters(form(state), root_rank=0)
        assert all((tensor == group.rank).all() for tensor in state.values())
        assert hvd.allgather_object(group.rank) == [0, 1, 2]
        return str(error.value)

    first, *others = run_threads(3, run)
    assert first.startswith("broadcast_parameters: ")
    assert all(each == first for each in others)


def _optimizer(state: Any) -> torch.optim.Optimizer:
    parameter = nn.Parameter(torch.zeros(4, 3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if state is not None:
        optimizer.state[parameter]["x"] = state
    return optimizer


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (lambda: {"y": torch.eye(2).to_sparse()}, r"\['state'\]\[0\]\['x'\]\['y'\] must be dense"),
        (lambda: torch.ones(2, device="meta"), r"\['state'\]\[0\]\['x'\] is on meta"),
    ],
    ids=["sparse", "meta"],
)
@on_ranks(2)
def test_broadcast_optimizer_state_of_what_cannot_be_sent_raises_on_every_rank(
    group: Group, state: Callable[[], Any], text: str
) -> None:
    optimizer = _optimizer(state() if group.rank == 0 else None)
    with pytest.raises(TypeError, match=f"rank 0: optimizer.state_dict.*{text}"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    # Only the root's is sent.
    hvd.broadcast_optimizer_state(_optimizer(None), root_rank=1)
    assert hvd.allgather_object(group.rank) == [0, 1]


@on_ranks(2)
def test_broadcast_optimizer_state_of_no_optimizer_raises_on_every_rank(group: Group) -> None:
    given: Any = nn.Linear(2, 2) if group.rank == 1 else _optimizer(None)
    with pytest.raises(TypeError, match="rank 1: optimizer must be a torch"):
        hvd.broadcast_optimizer_state(given, root_rank=0)
    assert hvd.allgather_object(group.rank) == [0, 1]


DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex32, torch.complex64, torch.complex128),
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@on_ranks(2)
def test_broadcast_parameters_of_any_dtype_gives_the_roots_bits(group: Group) -> None:
    raw = torch.arange(64, dtype=torch.uint8)
    raw = raw % 2 if group.rank else torch.zeros_like(raw)
    tensors = {str(dtype): raw.clone().view(dtype) for dtype in DTYPES}
    hvd.broadcast_parameters(tensors, root_rank=1)
    for name, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), torch.arange(64) % 2), name
