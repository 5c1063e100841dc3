"""The arguments of gram, adasum_coefficients and weighted_sum, checked into a `Call`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.arguments import call_in_segments, check_equals, check_target
from kernels.call import Call, check_tree
from kernels.findings import Findings
from kernels.reading import Checked, read
from kernels.validation import check_segments, check_tensor, check_writable


def check_gram(
    tensors: Sequence[Tensor],
    segments: Sequence[int] | None,
    out: Tensor | None,
    precise: bool,
) -> Call:
    """Check the arguments of `gram`; makes the matrices where `out` is None."""
    found = read("gram", tensors, out, None, segments, kind=precise)
    if found is None:
        inputs = check_equals(tensors)
        bounds = check_segments(segments, inputs[0].numel())
        shape = (len(bounds) - 1, len(inputs), len(inputs))
        device = inputs[0].device
        target = _check_written("out", out, (*shape, 2) if precise else shape, device)
        found = Checked(inputs, target, bounds=bounds)
    return call_in_segments("gram", found, made=out is None)


def check_adasum_coefficients(
    partials: Tensor,
    tree: Sequence[tuple[int, int, float, float]],
    out: Tensor | None,
    spread: Tensor | None,
) -> Call:
    """Check the arguments of `adasum_coefficients`; makes the rows where `out` is None."""
    given = check_partials(check_tensor("partials", partials))
    _, count, size, *_ = given.shape
    device, rows = given.device, check_tree(tree, size)
    target = _check_written("out", out, (count, size), device)
    if spread is not None:
        _check_written("spread", spread, (count,), device)
    made = out is None
    return Call("adasum_coefficients", [given], target, (), spread=spread, tree=rows, made=made)


def check_partials(given: Tensor) -> Tensor:
    """Return a tensor if it has the dtype and shape of results of `gram`, stacked."""
    if given.dtype != torch.float64:
        raise TypeError(f"partials has dtype {given.dtype}: pass what gram returns, float64")
    shape = tuple(given.shape)
    square = len(shape) in (4, 5) and shape[2] == shape[3] and shape[4:] in ((), (2,))
    if not square or 0 in (shape[0], shape[2]):
        raise ValueError(
            f"partials has shape {shape}: pass gram's results stacked, [R, S, n, n] or, precise, "
            "[R, S, n, n, 2]"
        )
    return given


def check_weighted_sum(
    tensors: Sequence[Tensor],
    coefficients: Tensor,
    segments: Sequence[int] | None,
    out: Tensor | None,
    findings: Findings,
) -> Call:
    """Check the arguments of `weighted_sum`; makes the output where `out` is None."""
    found = read("weighted_sum", tensors, out, None, segments, findings, coefficients)
    if found is None:
        inputs = check_equals(tensors)
        target = check_target(out, "tensors[0]", inputs[0], any_dtype=False)
        bounds = check_segments(segments, target.numel())
        check_table("coefficients", coefficients, (len(bounds) - 1, len(inputs)), target.device)
        findings.check(target.device, target.dtype)
        found = Checked(inputs, target, bounds=bounds)
    return call_in_segments(
        "weighted_sum", found, findings=findings, coefficients=coefficients, made=out is None
    )


def check_table(name: str, table: object, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """Return `table` if it is a readable float64 tensor of this shape and device."""
    checked = check_tensor(name, table)
    if checked.dtype != torch.float64:
        raise TypeError(f"{name} has dtype {checked.dtype}: pass float64")
    if checked.shape != shape:
        raise ValueError(
            f"{name} has shape {tuple(checked.shape)} but the other arguments ask for {shape}"
        )
    if checked.device != device:
        raise ValueError(f"{name} is on {checked.device} but the others are on {device}: move one")
    return checked


def _check_written(
    name: str, table: Tensor | None, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    """Return a table to write, made where it is None."""
    if table is None:
        return torch.empty(shape, dtype=torch.float64, device=device)
    return check_writable(name, check_table(name, table, shape, device))
