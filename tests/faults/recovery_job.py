"""Under torchrun: examples/resume_digits.py, in which each rank kills itself once.

`recovery_job.py DIRECTORY OPTIONS`: the options of the example. Rank 0 does not survive a loss,
while the other is in the reduction, and rank 1 a checkpoint, half of it written.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "examples")]

import resume_digits  # noqa: E402
import torch  # noqa: E402


def _deadly(whole: Callable[..., Any], count: int, mark: Path) -> Callable[..., Any]:
    """`whole`, whose call number `count` in this process is the end of it; once, by the mark."""
    calls = 0

    def function(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count and not mark.exists():
            mark.touch()
            if args and hasattr(args[-1], "write"):
                args[-1].write(b"half")
                args[-1].flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return whole(*args)

    return function


if __name__ == "__main__":
    directory = Path(sys.argv.pop(1))
    if os.environ["RANK"] == "0":
        mark = directory / "died in a loss"
        resume_digits.cross_entropy = _deadly(resume_digits.cross_entropy, 7, mark)
    else:
        torch.save = _deadly(torch.save, 2, directory / "died in a checkpoint")
    resume_digits.main()
