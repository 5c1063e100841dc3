"""Compiled by torch, every function gives the bits and the writes it gives in eager."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor

import kernels
from tests.kernels.cases import random
from tests.kernels.torch_compile.cases import (
    BF16,
    CASES,
    CUTS,
    F16,
    F32,
    F64,
    compiled,
    flat,
    operators,
    pair,
    paths,
    several,
)

# What torch itself deprecates in its compiler.
pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled", "ignore:.*torch.jit")


@pytest.mark.parametrize("dtype", [F32, pytest.param(BF16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_bits_writes_and_one_call(device, name, dtype):
    inputs, fn, names = CASES[name]
    call, counter = compiled(fn)
    for seed, path in enumerate(paths(device)):
        ours, theirs = (inputs(dtype, device, seed) for _ in range(2))
        with path:
            assert flat(call(*ours)) == flat(fn(*theirs))
        assert flat(ours) == flat(theirs)
    assert operators(counter) == names and counter.frame_count == 1


def test_out_is_returned_itself_and_marked_as_written(device):
    adasum, _ = compiled(lambda a, b: kernels.adasum(a, b, out=a))
    unpack, _ = compiled(kernels.unpack)
    for path in paths(device):
        a, b, _ = pair(F32, device, 1)
        tensors = several(F32, device, 1)
        with path:
            before = a._version
            assert adasum(a, b) is a and a._version > before
            result = unpack(kernels.pack(tensors), tensors)
        assert all(x is y for x, y in zip(result, tensors, strict=True))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_grad_modes(device, mode):
    def fn(a: Tensor, b: Tensor, c: Tensor) -> Any:
        x, y = a.detach(), b.detach()
        with torch.no_grad():
            kernels.unpack(kernels.pack([a]), [c])
        return kernels.adasum(x, y), kernels.dot_and_norms(x, y), (a * b).sin()

    call, _ = compiled(fn)
    for path in paths(device):
        ours, theirs = ([t.requires_grad_() for t in pair(F32, device, 1)] for _ in range(2))
        with path, mode():
            results, expected = call(*ours), fn(*theirs)
            assert flat([*results, *ours]) == flat([*expected, *theirs])
            assert [t.requires_grad for t in results] == [t.requires_grad for t in expected]
        if mode is torch.enable_grad:
            for result, tensors in ((results, ours), (expected, theirs)):
                result[2].sum().backward()
                assert tensors[2].grad is None
            assert flat([t.grad for t in ours[:2]]) == flat([t.grad for t in theirs[:2]])


def test_layouts(device):
    tensors = several(F32, device, 1)
    expected = kernels.layout_of(tensors, dtype=F16, alignment=16)
    call, _ = compiled(lambda t: kernels.layout_of(t, dtype=F16, alignment=16))
    assert call(tensors) == expected
    views, _ = compiled(lambda t: kernels.layout_of(t).views(kernels.pack(t)))
    pack, counter = compiled(lambda t, layout: kernels.pack(t, layout=layout))
    for path in paths(device):
        with path:
            assert flat(views(tensors)) == flat(tensors)
            assert flat(pack(tensors, expected)) == flat(kernels.pack(tensors, layout=expected))
    assert counter.frame_count == 1


def test_dynamic_shapes(device):
    def fn(a: Tensor, b: Tensor) -> Any:
        packed = kernels.pack([a, b])
        views = kernels.layout_of([a, b]).views(packed)
        kernels.unpack(packed, [b, a], scale=0.5)
        return kernels.sum_n(views), kernels.dot_and_norms(a, b), kernels.adasum(a, b, out=a)

    call, counter = compiled(fn, dynamic=True)
    frames = []
    for rows in (9, 5, 130):
        for path in paths(device):
            ours, theirs = ([random((rows, 4), F32, device, i) for i in (1, 2)] for _ in "12")
            with path:
                assert flat(call(*ours)) == flat(fn(*theirs))
            assert flat(ours) == flat(theirs)
            frames.append(counter.frame_count)
    assert len(set(frames)) == 1


def test_dynamic_shapes_with_a_copy_of_an_input_for_out(device):
    def fn(x, y):
        cuts = [0, 3, x.numel()]
        total = kernels.sum_n([x, y], out=x.clone())
        return kernels.adasum(total, y, cuts, out=x.clone()), kernels.gram([x, y], cuts)

    # Inductor alone looks at lengths that it does not know.
    call = torch.compile(fn, fullgraph=True, dynamic=True)
    for numel in (5, 9, 1000):
        x, y = (random(numel, F32, device, seed) for seed in (1, 2))
        assert all(map(torch.equal, call(x, y), fn(x, y)))


SCALED = {
    "scaled_add": lambda a, b, s: kernels.scaled_add(a, b, alpha=0.5, beta=s),
    "sum_n": lambda a, b, s: kernels.sum_n([a, b], scale=s),
    "pack": lambda a, b, s: kernels.pack([a, b], scale=s),
    "adasum": lambda a, b, s: kernels.adasum(a, b, weights=(1.0, s)),
}


@pytest.mark.parametrize("name", SCALED)
def test_a_float_that_changes_costs_two_graphs_as_with_torchs_operators(device, name):
    call, counter = compiled(SCALED[name])
    a, b, _ = pair(F32, device, 1)
    # The ninth graph of one function would be an error.
    for scale in (0.1, 0.2, 0.3, 1.0, 7.0, 1e-3, 3.0, 4.0, 5.0, 6.0):
        assert flat(call(a, b, scale)) == flat(SCALED[name](a, b, scale))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", ["scaled_add", "sum_n", "pack"])
def test_a_tensor_as_scalar_costs_one_graph_and_so_does_its_item(device, name):
    a, b, _ = pair(F32, device, 1)
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        live, counter = compiled(SCALED[name])
        item, other = compiled(lambda a, b, s: SCALED[name](a, b, s.item()))
        for value in (0.25, 1.0, 3.0):
            scale = torch.tensor(value, device=device)
            assert flat(live(a, b, scale)) == flat(item(a, b, scale))
            assert flat(live(a, b, scale)) == flat(SCALED[name](a, b, value))
    assert counter.frame_count == other.frame_count == 1


def everything(a: Tensor, b: Tensor, c: Tensor, flag: Tensor) -> Any:
    """Every function, in place and not, between operations of torch's that round nothing."""
    packed = kernels.pack([a * 2, b, c.relu()], scale=0.5, found_inf=flag)
    total = kernels.sum_n([a, b, c], dtype=F64)
    kernels.scaled_add(a, b, alpha=0.3, out=b)
    both = kernels.combine(a, b, kernels.dot_and_norms(a, b, CUTS), CUTS)
    kernels.unpack(packed, [torch.empty_like(a), both, c], scale=4.0)
    kernels.adasum(c, both, out=c, found_inf=flag)
    views = kernels.layout_of([a, b, c]).views(packed)
    return packed, total, both, (c * 2).relu(), views[1] * 2


def everything_on(device: str, seed: int) -> list[Tensor]:
    return [*pair(F32, device, seed), torch.zeros((), device=device)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor(device, mode):
    if device == "cpu" and mode != "default":
        pytest.skip("CUDA graphs need a CUDA device")
    if mode != "default" and not hasattr(torch.Tag, "cudagraph_unsafe"):
        pytest.skip("this torch cannot keep an operator out of its CUDA graphs")
    if device == "cpu" and shutil.which(os.environ.get("CXX", "g++")) is None:
        pytest.skip("no C++ compiler for inductor")
    call = torch.compile(everything, fullgraph=True, mode=mode)
    for path in paths(device):
        with path:
            # CUDA graphs warm up, record and, on the second path, are replayed.
            for seed in range(2):
                ours, theirs = (everything_on(device, seed) for _ in range(2))
                assert flat(call(*ours)) == flat(everything(*theirs))
                assert flat(ours) == flat(theirs)
