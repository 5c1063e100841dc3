"""A demonstration of the library in three acts on this machine's CPUs, each a few seconds long.

    adasum demo                 # or python -m adasum.demo
    adasum demo --act 2         # only the rank that stops

1. The same training run on 8, 4 and 2 ranks ends with the same bits; with gloo there are three
   different results.
2. One rank stops: its peers' errors and the flight record name it.
3. Sum, Average and Adasum on 8 ranks with one rank's learning rate, and Average with a rate tuned
   for 8 ranks: the curves are drawn to OUT/demo.png.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from adasum.demo import ranks, training
from collectives.tools.flight.analysis import Analysis, report
from collectives.tools.flight.reader import read

_NEEDED = {"sklearn": "scikit-learn", "matplotlib": "matplotlib", "tqdm": "tqdm"}
_STEPS, _EPOCHS = 66, 8
_RANKS, _STOPPED, _TIMEOUT = 4, 2, 5.0
# _RATE is tuned on one rank (examples/compare_digits.py --tune). _TUNED is the best of the rates
# 2^(-k/2) for Average on 8 ranks, on validation images, over four seeds.
_RATE, _TUNED = 2**-2, 2**-0.5
# The label, operator, rate, colour (Okabe and Ito's) and style of each line.
_CURVES = (
    ("Adasum, one rank's rate", "Adasum", _RATE, "#009E73", "-"),
    ("Average, rate tuned for 8 ranks", "Average", _TUNED, "#56B4E9", "-."),
    ("Average, one rank's rate", "Average", _RATE, "#0072B2", "--"),
    ("Sum, one rank's rate", "Sum", _RATE, "#D55E00", ":"),
)


def _bits(digits: training.Digits, out: Path) -> None:
    from tqdm import tqdm

    print('1. One training, 8 micro-batches per step: adasum with order="tree", DDP over gloo')
    rows = []
    for size in tqdm((8, 4, 2), desc="trainings", leave=False):
        results = ranks.run(size, training.bits, digits, _STEPS)
        rows.append((size, *(" ".join(sorted({*hashes})) for hashes in zip(*results, strict=True))))
    for size, ours, theirs in rows:
        print(f"   {size} ranks x {8 // size} passes    adasum {ours}    gloo {theirs}")
    same = len({ours for _, ours, _ in rows}) == 1
    print(f"   adasum: {'the same bits on 8, 4 and 2 ranks' if same else 'DIFFERENT bits'}\n")


def _lost_rank(digits: training.Digits, out: Path) -> None:
    print(f"2. Rank {_STOPPED} of {_RANKS} stops in step 20; the timeout is {_TIMEOUT:g} s")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["ADASUM_FLIGHT_FOLDER"] = folder
        # Hide the warnings with the files' names: their folder is deleted below.
        logging.getLogger("collectives.flight").setLevel(logging.ERROR)
        errors = ranks.run(_RANKS, training.lost, digits, _TIMEOUT, _STOPPED, 20)
        del os.environ["ADASUM_FLIGHT_FOLDER"]
        for rank, error in enumerate(errors):
            print(f"   rank {rank}: {error or 'is stopped'}")
        dumps = read([folder])
        culprits = [line for line in report(Analysis(dumps), dumps) if "CULPRIT" in line]
    print("\n".join(f"   flight record: {line}" for line in culprits) + "\n")


def _curves(digits: training.Digits, out: Path) -> None:
    import matplotlib
    from tqdm import tqdm

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    print("3. Sum, Average and Adasum on 8 ranks: test accuracy after 8 epochs, one seed")
    figure, panel = plt.subplots(figsize=(11, 4.5), layout="constrained")
    for name, op, rate, colour, dashes in tqdm(_CURVES, desc="trainings", leave=False):
        seen = ranks.run(8, training.curve, digits, op, rate, _EPOCHS)[0]
        epochs = [look / 4 for look in range(len(seen))]
        panel.plot(epochs, seen, color=colour, linestyle=dashes, label=f"{name} ({rate:.2g})")
        tqdm.write(f"   {name:32} {seen[-1]:.1%}", file=sys.stdout)
    panel.set(xlabel="epochs", ylabel="test accuracy", ylim=(0, 1), xlim=(0, _EPOCHS))
    panel.set_title("Handwritten digits on 8 ranks: 22 steps per epoch, one seed")
    panel.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
    panel.grid(alpha=0.3)
    out.mkdir(parents=True, exist_ok=True)
    figure.savefig(out / "demo.png", dpi=120)
    print(f"   the curves: {out / 'demo.png'}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Show the acts; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="adasum demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    parser.add_argument("--act", type=int, choices=(1, 2, 3), help="run only this act")
    options = parser.parse_args(argv)
    if missing := [_NEEDED[name] for name in _NEEDED if find_spec(name) is None]:
        parser.error(f"it needs more packages: pip install {' '.join(missing)}")
    digits = training.Digits()
    for number, act in enumerate((_bits, _lost_rank, _curves), 1):
        if options.act in (None, number):
            start = time.monotonic()
            act(digits, options.out)
            print(f"   ({time.monotonic() - start:.0f} s)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
