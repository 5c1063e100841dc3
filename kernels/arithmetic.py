"""What the GPU and the CPU path compute in, so that their results differ in rounding alone."""

from __future__ import annotations

import math
import sys

import torch

# A squared norm below this has no meaningful direction: its vector is taken as it is.
TINY = math.sqrt(sys.float_info.min)
# Where |alpha a + beta b|^2 is below this part of |alpha a|^2 + |beta b|^2, float32 loses it in
# a blend. Its rounded coefficients and products are off by eps (|alpha a| + |beta b|) together, so
# elsewhere by no more than eps sqrt(2 / CANCELLED) = 12 eps of the sum's length.
CANCELLED = 1 / 64
# Where (sum |c_i| |g_i|)^2 is above this times |v|^2 of v = sum c_i g_i, a float64 Gram matrix
# gives |v|^2 to fewer than 23 bits, and is to be taken again in double-double.
SPREAD_LIMIT = 2.0**30


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtypes` are computed on, float32 or float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
