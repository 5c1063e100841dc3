"""What the GPU and the CPU path compute in, so that their results differ in rounding alone."""

from __future__ import annotations

import math
import sys

import torch

# A squared norm below this has no meaningful direction: its vector is taken as it is.
TINY = math.sqrt(sys.float_info.min)


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of `dtypes` are computed on, float32 or float64."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
