"""The kernels as registered operators `adasum::*`, so that torch.compile sees one call each.

Eager calls launch directly and never come here. In traced code the public functions make the
checks that need no addresses while torch traces, and call the operator; overlap, which needs
addresses, is checked when the operator runs. What an operator writes is in its schema, so that
torch copies and orders it rightly.

The operators are no public door. One whose schema changes takes a new name: torch's cache of
compiled graphs on disk knows an operator by its name alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernels.validation import check_sequence, check_tensor, check_tensors, same_device

Kernel = TypeVar("Kernel", bound=Callable[..., Any])
_LIBRARY = torch.library.Library("adasum", "DEF")
# Tags that some supported version of torch lacks are left out there. Contiguous inputs must stay
# so. Address tables and scratch outlive a call, which the memory pool of torch's own CUDA graphs
# (mode="reduce-overhead") takes for a leak: the calls run between those graphs.
_TAGS = tuple(
    getattr(torch.Tag, name)
    for name in ("needs_exact_strides", "needs_fixed_stride_order", "cudagraph_unsafe")
    if hasattr(torch.Tag, name)
)


def tracing() -> bool:
    """Whether the call is read rather than run: by torch.compile, export or a dispatch mode.

    make_fx, aot_function and FakeTensorMode are dispatch modes. Under one that does run the call,
    a counting one say, the operator gives the same bits. What recognises known calls cannot ask
    instead: inside make_fx a tensor looks to torch's guards as outside.
    """
    return is_compiling() or is_in_torch_dispatch_mode()


def operator(schema: str, fake: Callable[..., Any]) -> Callable[[Kernel], Kernel]:
    """Register the decorated function as `adasum::<schema>` and hand it back as it is.

    fake: stands in for it on tensors without data; allocates what it returns and no more.
    """
    name = schema.partition("(")[0]

    def register(run: Kernel) -> Kernel:
        _LIBRARY.define(schema, tags=_TAGS)
        _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"adasum::{name}", fake, lib=_LIBRARY)
        return run

    return register


def call(name: str, *args: Any) -> Any:
    """Call the operator `adasum::<name>`. No kernel has a derivative: no result requires grad."""
    with torch.no_grad():
        return getattr(torch.ops.adasum, name).default(*args)


def mark_written(tensors: Sequence[Tensor]) -> None:
    """Tell autograd that a kernel has written the tensors in place, as torch's own ops do.

    Without it a backward pass that had saved one of them would use the new values in silence.
    Those made in inference mode have no version, which torch knows.
    """
    torch.autograd.graph.increment_version(tensors)


def returns_nothing(*_: Any) -> None:
    """The fake of an operator that only writes into its arguments."""


def read_list(name: str, tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors, read once: what is used is what was checked, whatever the list says later.

    Another thread may change it, and a Sequence of one's own may make its tensors anew.
    """
    if type(tensors) not in (list, tuple):
        check_sequence(name, tensors)
    return list(tensors)


def check_list(name: str, tensors: object) -> list[Tensor]:
    """`check_tensors`, in traced code without its fast path, which dynamo cannot read."""
    if tracing() and not isinstance(tensors, Tensor) and isinstance(tensors, Sequence):
        checked = [check_tensor(f"{name}[{i}]", tensor) for i, tensor in enumerate(tensors)]
        if all(same_device(tensor, checked[0]) for tensor in checked):
            return checked
    return check_tensors(name, tensors)
