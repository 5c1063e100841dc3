"""The precision in which GPU and CPU compute, so that their results differ only by rounding."""

from __future__ import annotations

import math
import sys

import torch

# A vector whose squared norm is below this has no meaningful direction: its coefficient is 1.
TINY = math.sqrt(sys.float_info.min)
# If |alpha a + beta b|^2 is below this part of |alpha a|^2 + |beta b|^2, the blend is computed in
# float64. In float32, rounded coefficients and products make an error of eps (|alpha a| + |beta b|)
# together: above the limit, no more than eps sqrt(2 / CANCELLED) = 12 eps of the sum's length.
CANCELLED = 1 / 64
# Where (sum |c_i| |g_i|)^2 may be above this times |v|^2 of v = sum c_i g_i, a float64 Gram matrix
# would give |v|^2 to fewer than 23 bits, and is to be taken in double-double.
SPREAD_LIMIT = 2.0**30


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of these dtypes are computed: float32 or float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
