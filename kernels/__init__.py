"""One-device kernels for gradient reduction: Triton on CUDA tensors, C or torch on CPU tensors.

::

    pack, unpack            many tensors to one aligned buffer and back, scale and cast fused
    sum_n, scaled_add       n-way and weighted sums, accumulated wider than they are stored
    dot_and_norms, combine  the two halves of Adasum's pairwise projection, a segment at a time
    adasum                  both at once
    Layout, layout_of       where each tensor lies in a packed buffer

Dtypes are float16, bfloat16, float32 and float64 (`DTYPES`); any other one is a TypeError. Wrong
arguments raise before anything is written. `pack`, `unpack`, `sum_n` and `scaled_add` have
derivatives, and rules for `torch.vmap`. For the other functions, for plans and with `out=`, a
tensor that requires a gradient is a ValueError while grad mode is on. Each function has `*_bytes`
(its least memory traffic), `*_reference` (float64, plain torch) and `plan_*` (arguments checked
once, run many times). Nothing here communicates.
`__adasum__` is True in this package and tells it from the distribution on PyPI that is also called
`kernels`.
"""

from kernels import logs
from kernels.backends import BackendInfo, backend_info
from kernels.findings import max_abs_reference
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
from kernels.plans import (
    AdasumPlan,
    CombinePlan,
    DotAndNormsPlan,
    PackPlan,
    Plan,
    ScaledAddPlan,
    SumPlan,
    UnpackPlan,
)
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
from kernels.validation import DTYPES

__adasum__ = True

__all__ = [
    "DTYPES",
    "AdasumPlan",
    "BackendInfo",
    "CombinePlan",
    "DotAndNormsPlan",
    "Layout",
    "PackPlan",
    "Plan",
    "ScaledAddPlan",
    "SumPlan",
    "UnpackPlan",
    "adasum",
    "adasum_bytes",
    "adasum_reference",
    "backend_info",
    "combine",
    "combine_bytes",
    "combine_reference",
    "dot_and_norms",
    "dot_and_norms_bytes",
    "dot_and_norms_reference",
    "layout_of",
    "max_abs_reference",
    "pack",
    "pack_bytes",
    "pack_reference",
    "plan_adasum",
    "plan_combine",
    "plan_dot_and_norms",
    "plan_pack",
    "plan_scaled_add",
    "plan_sum_n",
    "plan_unpack",
    "scaled_add",
    "scaled_add_bytes",
    "scaled_add_reference",
    "sum_n",
    "sum_n_bytes",
    "sum_n_reference",
    "unpack",
    "unpack_bytes",
    "unpack_reference",
]

logs.show(__name__)
