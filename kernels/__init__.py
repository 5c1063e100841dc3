"""One-device kernels for gradient reduction: Triton on CUDA tensors, C or torch on CPU tensors.

    pack, unpack            many tensors to one aligned buffer and back, scale and cast fused
    sum_n, scaled_add       n-way and weighted sums, accumulated wider than they are stored
    dot_and_norms, combine  the two halves of Adasum's pairwise projection, a segment at a time
    adasum                  both at once
    Layout, layout_of       where each tensor lies in a packed buffer

float16, bfloat16, float32 and float64 (`DTYPES`); any other dtype is a TypeError. Bad arguments
raise before anything is written. Each function has a twin `*_bytes` (least memory traffic) and
`*_reference` (float64, plain torch). `cpu_path` says what computes on CPU tensors: C compiled at
first use, or torch's functions, with `use_torch_on_cpu` in any case. `calls_recognised_by` says
whether C or Python does that for calls made before. No communication happens here.
`__adasum__` is True in this package and tells it from the distribution on PyPI that is also called
`kernels`.
"""

from kernels._recall import calls_recognised_by
from kernels.cpu.native import cpu_path, use_torch_on_cpu
from kernels.layout import Layout, layout_of
from kernels.packing import pack, pack_bytes, pack_reference, unpack, unpack_bytes, unpack_reference
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
)
from kernels.reduction import (
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
    "Layout",
    "adasum",
    "adasum_bytes",
    "adasum_reference",
    "calls_recognised_by",
    "combine",
    "combine_bytes",
    "combine_reference",
    "cpu_path",
    "dot_and_norms",
    "dot_and_norms_bytes",
    "dot_and_norms_reference",
    "layout_of",
    "pack",
    "pack_bytes",
    "pack_reference",
    "scaled_add",
    "scaled_add_bytes",
    "scaled_add_reference",
    "sum_n",
    "sum_n_bytes",
    "sum_n_reference",
    "unpack",
    "unpack_bytes",
    "unpack_reference",
    "use_torch_on_cpu",
]
