"""A short run of every kernel, for compute-sanitizer, under which all is many times slower.

compute-sanitizer --tool memcheck --error-exitcode 9 python -m bench.gpu.sanitized
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from adasum.smoke import one_gpu
from bench.gpu.machine import NO_GPU

# One element, a few tiles with a tail, and enough for several programs.
SIZES = (1, 5_003, 70_001)


def main(device: str = "cuda", sizes: Sequence[int] = SIZES) -> int:
    """Run the smoke test's kernels; return the exit status."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        print(f"bench.gpu.sanitized: {NO_GPU}", file=sys.stderr)
        return 2
    for name, check in one_gpu.KERNELS.items():
        check(device, sizes)
        print(f"{name}: right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
