"""Gradients that are packed to be reduced, and where the results go: to p.grad, as it is then."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from adasum.optimizer.bucket import Member, Part, in_memory_order, memory_order
from adasum.optimizer.errors import changed_under_way
from adasum.optimizer.record import version_of


class PackedGradients:
    """Gradients of one dtype and device, of some of a bucket's parameters.

    Args:
        members: (record, parameter) of each.
        gradients: What p.grad was when they were packed.
        part: The memory into which they are packed; None if a compression of the user's is sent.
        apart: By index, tensors that are packed in the place of gradients: of missing ones, and of
            gradients of other strides or in memory that cannot be written.
    """

    def __init__(
        self,
        members: list[Member],
        gradients: Sequence[Tensor | None],
        part: Part | None,
        apart: dict[int, Tensor],
    ) -> None:
        self.members, self.gradients = members, gradients
        self.part, self.apart = part, apart
        self._lacks_some = False
        for (record, _), gradient in zip(members, gradients, strict=True):
            if gradient is None:
                self._lacks_some = True
            else:
                # A view's would count the results of others, too.
                record.version = None if gradient._is_view() else version_of(gradient)

    def install(self, scale: float, rank: int) -> list[tuple[Tensor, Tensor]]:
        """Unpack the results, times `scale`; those of this `rank` if they have owners.

        Returns (parameter, result) of parameters that had no gradient, if ranks have yet to find
        out whether one of them had one. OptimizerOrderError: somebody has changed a gradient.
        """
        for (record, parameter), gradient in zip(self.members, self.gradients, strict=True):
            if parameter.grad is gradient and (
                gradient is None or record.version is None or gradient._version == record.version
            ):
                continue
            raise changed_under_way(record.name)
        part, any_had = self.part, None
        if part is not None and part.owners is not None:
            part.unpack_of(rank, scale)
        elif part is not None:
            if not part.unpack(scale):
                self._separate(part.tensors)
            if part.counts and self._lacks_some:
                any_had = part.any_had()
        unknown = []
        for i, result in self.apart.items():
            parameter = self.members[i][1]
            if parameter.grad is not None:
                copy_to_gradient(parameter, result)
            elif any_had is None or any_had[i]:
                parameter.grad = result
                if any_had is None:
                    unknown.append((parameter, result))
        return unknown

    def _separate(self, results: Sequence[Tensor]) -> None:
        """Give gradients that overlap another's memory their own, and have the others copied to."""
        for i, (_, parameter) in enumerate(self.members):
            self.apart[i] = torch.empty_like(parameter, dtype=dtype_of_gradient(parameter))
            in_memory_order(self.apart[i], memory_order(parameter)).copy_(results[i])
        gradients = {i: p.grad for i, (_, p) in enumerate(self.members) if p.grad is not None}
        end = 0
        for start, i in sorted((each.data_ptr(), i) for i, each in gradients.items()):
            if start < end and gradients[i].nbytes:
                self.members[i][1].grad = self.apart.pop(i)
            end = max(end, start + gradients[i].nbytes)


def tensors_to_pack(members: Sequence[Member]) -> tuple[list[Tensor], dict[int, Tensor]]:
    """Return tensors to pack for gradients of any kind, and those that lie apart, by index.

    ValueError: a gradient has another shape than its parameter.
    """
    tensors: list[Tensor] = []
    apart: dict[int, Tensor] = {}
    for i, (record, parameter) in enumerate(members):
        gradient, order, tensor = parameter.grad, memory_order(parameter), None
        if gradient is not None and gradient.shape != parameter.shape:
            raise ValueError(
                f"the gradient of {record.name} has shape {tuple(gradient.shape)} and the "
                f"parameter {tuple(parameter.shape)}: where a parameter is given another shape, "
                "set its grad to None, and change what the optimizer keeps of it"
            )
        if gradient is not None and _is_ordinary(gradient):
            tensor = in_memory_order(gradient.detach(), order)
        if tensor is None or not tensor.is_contiguous():
            apart[i] = torch.zeros_like(parameter, dtype=dtype_of_gradient(parameter))
            if gradient is not None:
                apart[i].copy_(gradient)
            tensor = in_memory_order(apart[i], order)
        tensors.append(tensor)
    return tensors, apart


def dtype_of_gradient(parameter: Tensor) -> torch.dtype:
    """Return the dtype of the gradient that the parameter has, or would have."""
    if parameter.grad is not None:
        return parameter.grad.dtype
    dtype: torch.dtype | None = getattr(parameter, "grad_dtype", None)
    return dtype or parameter.dtype


def copy_to_gradient(parameter: Tensor, result: Tensor) -> None:
    """Write a result to the parameter's gradient, or replace one that cannot be written."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_inference() or 0 in gradient.stride():
        parameter.grad = result
    else:
        gradient.copy_(result)


def empty_sparse(parameter: Tensor, sparse_dim: int, dtype: torch.dtype) -> Tensor:
    """Return a sparse gradient without entries."""
    shape, device = parameter.shape, parameter.device
    indices = torch.empty(sparse_dim, 0, dtype=torch.int64, device=device)
    values = torch.empty(0, *shape[sparse_dim:], dtype=dtype, device=device)
    return torch.sparse_coo_tensor(indices, values, shape, device=device)


def _is_ordinary(gradient: Tensor) -> bool:
    """Return whether a result can be written to the gradient's memory as it is."""
    odd = gradient.is_conj() or gradient.is_neg() or gradient.is_inference()
    return not odd and 0 not in gradient.stride()
