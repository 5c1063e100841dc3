"""One-device kernels for gradient reduction: Triton on CUDA tensors, C or torch on CPU tensors.

::

    pack, unpack            many tensors to one aligned buffer and back, scale and cast fused
    sum_n, scaled_add       n-way and weighted sums, accumulated wider than they are stored
    dot_and_norms, combine  the two halves of Adasum's pairwise projection, for each segment
    adasum                  both at once
    gram, adasum_coefficients, weighted_sum
                            Adasum of n tensors in any order of pairs: their dot products, the
                            coefficients computed from those, and the weighted sum
    Layout, layout_of       the places of tensors in a packed buffer

Dtypes are float16, bfloat16, float32 and float64 (`DTYPES`); any other one is a TypeError. Wrong
arguments raise before anything is written. Backward passes go through `pack`, `unpack`, `sum_n`
and `scaled_add`. For the other functions, for plans and with `out=` or `found_inf=`, a tensor that
requires a gradient is a ValueError while grad mode is on. Each function has, with the
same arguments and errors, `*_bytes` (its least memory traffic), `*_reference` (float64, plain
torch) and `plan_*` (arguments checked once, run many times). Nothing here communicates. Examples
are after `import torch, kernels`. `__adasum__` is True in this package and tells it from the
distribution on PyPI that is also called `kernels`.
"""

from typing import TYPE_CHECKING

from kernels import logs
from kernels.arithmetic import SPREAD_LIMIT
from kernels.backends import BackendInfo, backend_info
from kernels.gram_matrix import (
    adasum_coefficients,
    adasum_coefficients_bytes,
    adasum_coefficients_reference,
    gram,
    gram_bytes,
    gram_reference,
    plan_adasum_coefficients,
    plan_gram,
    plan_weighted_sum,
    weighted_sum,
    weighted_sum_bytes,
    weighted_sum_reference,
)
from kernels.layout import Layout, layout_of
from kernels.packing import (
    pack,
    pack_bytes,
    pack_reference,
    plan_pack,
    plan_unpack,
    unpack,
    unpack_bytes,
    unpack_reference,
)
from kernels.plans import Plan, ProjectionPlan, ScaledAddPlan, ScaledPlan
from kernels.projection import (
    adasum,
    adasum_bytes,
    adasum_reference,
    combine,
    combine_bytes,
    combine_reference,
    dot_and_norms,
    dot_and_norms_bytes,
    dot_and_norms_reference,
    plan_adasum,
    plan_combine,
    plan_dot_and_norms,
)
from kernels.reduction import (
    plan_scaled_add,
    plan_sum_n,
    scaled_add,
    scaled_add_bytes,
    scaled_add_reference,
    sum_n,
    sum_n_bytes,
    sum_n_reference,
)
from kernels.validation import DTYPES, did_you_mean

__adasum__ = True
# Of all three packages.
__version__ = "0.1.0"

__all__ = [
    "DTYPES",
    "SPREAD_LIMIT",
    "BackendInfo",
    "Layout",
    "Plan",
    "ProjectionPlan",
    "ScaledAddPlan",
    "ScaledPlan",
    "adasum",
    "adasum_bytes",
    "adasum_coefficients",
    "adasum_coefficients_bytes",
    "adasum_coefficients_reference",
    "adasum_reference",
    "backend_info",
    "combine",
    "combine_bytes",
    "combine_reference",
    "dot_and_norms",
    "dot_and_norms_bytes",
    "dot_and_norms_reference",
    "gram",
    "gram_bytes",
    "gram_reference",
    "layout_of",
    "pack",
    "pack_bytes",
    "pack_reference",
    "plan_adasum",
    "plan_adasum_coefficients",
    "plan_combine",
    "plan_dot_and_norms",
    "plan_gram",
    "plan_pack",
    "plan_scaled_add",
    "plan_sum_n",
    "plan_unpack",
    "plan_weighted_sum",
    "scaled_add",
    "scaled_add_bytes",
    "scaled_add_reference",
    "sum_n",
    "sum_n_bytes",
    "sum_n_reference",
    "unpack",
    "unpack_bytes",
    "unpack_reference",
    "weighted_sum",
    "weighted_sum_bytes",
    "weighted_sum_reference",
]

logs.show(__name__)

# Public names of the distribution on PyPI that is also called `kernels`.
_HUGGING_FACES = {
    *("get_kernel", "get_local_kernel", "get_locked_kernel", "has_kernel", "load_kernel"),
    *("kernelize", "register_kernel_mapping", "use_kernel_forward_from_hub", "use_kernel_mapping"),
}

# A type checker that saw __getattr__ would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Raise AttributeError with a suggestion, or ImportError for Hugging Face's names."""
        if name in _HUGGING_FACES:
            raise ImportError(
                f"{name!r} is of Hugging Face's `kernels`, another distribution of this name, and "
                f"this is adasum's at {__file__}: install one of them in each environment"
            )
        advice = did_you_mean(name, [] if name.startswith("_") else __all__)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}" + (advice and f": {advice}")
        )
