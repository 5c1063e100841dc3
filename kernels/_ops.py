"""The kernels as registered operators `adasum::*`, so that torch.compile sees one call each.

Eager calls launch directly and never come here. In traced code the public functions make the
checks that need no addresses while torch traces, and call the operator; overlap, which needs
addresses, is checked when the operator runs. What an operator writes is in its schema, so that
torch copies and orders it rightly.

The operators are no public door. One whose schema changes takes a new name: torch's cache of
compiled graphs on disk knows an operator by its name alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from kernels._check import check_tensor, check_tensors, check_writable, check_written, same_device
from kernels._known import Known, KnownLists

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
    a counting one say, the operator gives the same bits.
    """
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


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


def returns_nothing(*_: Any) -> None:
    """The fake of an operator that only writes into its arguments."""


def check_list(name: str, tensors: object) -> list[Tensor]:
    """`check_tensors`, in traced code without its fast path, which dynamo cannot read."""
    if tracing() and not isinstance(tensors, Tensor) and isinstance(tensors, Sequence):
        checked = [check_tensor(f"{name}[{i}]", tensor) for i, tensor in enumerate(tensors)]
        if all(same_device(tensor, checked[0]) for tensor in checked):
            return checked
    return check_tensors(name, tensors)


_OPERANDS: KnownLists[None] = KnownLists()


def check_operands(
    key: Hashable, a: Tensor, b: Tensor, out: Tensor | None, check: Callable[[], None]
) -> Known[None]:
    """Call `check()` on two inputs and their output, unless it passed others like them before.

    key: of the function, and of what else `check` looks at.
    """
    if tracing():
        check()
        return Known(None)
    # Where the output is one of the inputs, as it often is, the key says which.
    given = (a, b) if out is None or out is a or out is b else (a, b, out)
    key = (key, out is a, out is b)
    known = _OPERANDS.find(key, given)
    if known is None:
        check()
        known = _OPERANDS.keep(key, given, None)
    elif out is not None:
        check_writable("out", out)
    return known


def check_written_once(
    known: Known[None], out: Tensor, found_inf: Tensor | None, a: Tensor, b: Tensor
) -> None:
    """`check_written` where these addresses were not found apart before."""
    flag = None if found_inf is None else found_inf.data_ptr()
    place = (a.data_ptr(), b.data_ptr(), out.data_ptr(), out.dtype, flag)
    if place not in known.apart:
        check_written(out, found_inf, (a, b), "ab".__getitem__)
        known.found_apart(place, 2)
