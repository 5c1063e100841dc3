"""Under torchrun: examples/resume_digits.py for several seeds, and a death in each.

`recovery_job.py DIRECTORY STEPS EVERY DEATHS`: DEATHS is a JSON list, one [rank, call, step] for
each seed, or null for none. The rank kills itself when it makes that call for the step's time:
"loss" (the others are in the reduction), or "write" (of a checkpoint, half of it written).
"""

from __future__ import annotations

import json
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

import adasum as hvd  # noqa: E402


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


def main(directory: Path, steps: int, every: int, deaths: list[list[Any] | None]) -> None:
    hvd.init(calibrate=False, timeout=20.0)
    digits = resume_digits.Digits.load(torch.device("cpu"))
    loss, save = resume_digits.cross_entropy, torch.save
    for seed, death in enumerate(deaths):
        place = directory / f"seed{seed}"
        if death is not None and death[0] == hvd.rank():
            mark = directory / f"died{seed}"
            if death[1] == "loss":
                resume_digits.cross_entropy = _deadly(loss, death[2], mark)
            else:
                torch.save = _deadly(save, death[2], mark)
        model = resume_digits.train(digits, place, seed=seed, steps=steps, every=every)
        resume_digits.cross_entropy, torch.save = loss, save
        torch.save(model.state_dict(), directory / f"final{seed}.rank{hvd.rank()}.pt")
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
