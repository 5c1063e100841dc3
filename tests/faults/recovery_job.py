"""Under torchrun: examples/resume_digits.py for several seeds, and a death in each.

`recovery_job.py DIRECTORY STEPS EVERY DEATHS`: DEATHS is a JSON list, one [rank, call, step] for
each seed. The rank kills itself when it makes that call for the step's time: "loss" (the others are
in the reduction), or "write" (of a checkpoint, half of it written). Before all of them every seed
is trained once without, in processes that have not been started again.
"""

from __future__ import annotations

import itertools
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


def main(directory: Path, steps: int, every: int, deaths: list[list[Any]]) -> None:
    hvd.init(timeout=20.0)
    digits = resume_digits.Digits.load(torch.device("cpu"))
    loss, save = resume_digits.cross_entropy, torch.save
    for how, (seed, death) in itertools.product(("undisturbed", "killed"), enumerate(deaths)):
        place = directory / how
        place.mkdir(exist_ok=True)
        final = place / f"final{seed}.rank{hvd.rank()}.pt"
        rank, call, count = death
        if how == "killed" and rank == hvd.rank():
            mark = place / f"died{seed}"
            if call == "loss":
                resume_digits.cross_entropy = _deadly(loss, count, mark)
            else:
                torch.save = _deadly(save, count, mark)
        model = resume_digits.train(
            digits, place / f"seed{seed}", seed=seed, steps=steps, every=every
        )
        resume_digits.cross_entropy, torch.save = loss, save
        if not final.exists():
            # The other rank may die meanwhile, which ends this one, too.
            torch.save(model.state_dict(), final.with_suffix(".part"))
            final.with_suffix(".part").rename(final)
    hvd.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), json.loads(sys.argv[4]))
