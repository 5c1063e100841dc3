"""What a call costs the host: planned runs, direct calls and rebinding, on CPU tensors.

    python -m bench.kernels.host_cost
    python -m bench.kernels.host_cost --gpu
    python -m bench.kernels.host_cost --compiled
    python -m bench.kernels.host_cost --against OTHER_TREE

The second has a GPU's tensors, and torch's functions beside ours: a call's time until it returns.
The third has functions that torch has compiled: what torch.add and an operator that does nothing
take there, no operator takes less. The last runs in turns, in processes of their own, this tree and
another one that has plans, too.
Figures are minima in microseconds of the calling thread's processor time, to which what else runs
on the machine adds least.

"to Triton's launcher" is a run on the GPU path, of a plan or direct, on CPU tensors and without a
GPU: what is stubbed is the compiled kernel that Triton would start, the look-up of the current
stream, and the GPU's size. Left out are asking torch for the current device, about 0.2 us, and of
direct calls the upload of the addresses and the question on which GPU each tensor is.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import kernels
from kernels.gpu import launcher

# Elements of float32: 64 bytes and 64 KiB.
SIZES = (16, 16384)
# As many tensors as ResNet-50 has parameters.
COUNT = 161
# Of direct calls on the GPU path.
COUNTS = (16, COUNT, 1000)
_SECONDS = 0.02
_REPEATS = 15
# Calls between two looks at the clock, few enough for a stream to take them all.
_ENQUEUED = 20
Call = Callable[[], object]


def microseconds(call: Call, seconds: float = _SECONDS, repeats: int = _REPEATS) -> float:
    """Return the least time of a call over several samples, each of about so many seconds."""
    timer = timeit.Timer(call, timer=time.thread_time)
    timer.timeit(10)
    number = max(1, int(100 * seconds / max(timer.timeit(100), 1e-9)))
    return min(timer.repeat(repeats, number)) / number * 1e6


def to_return(call: Call) -> float:
    """Return the median time of a call of which a GPU still has to do its part."""
    taken = []
    for _ in range(10 * _REPEATS):
        # Else it would wait, in the end, for room in the stream.
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(_ENQUEUED):
            call()
        taken.append((time.perf_counter() - begin) / _ENQUEUED)
    return statistics.median(taken) * 1e6


def planned(numel: int, device: str = "cpu") -> dict[str, Call]:
    """Return a planned run of each function, on tensors of `numel` elements, by its name."""
    a, b, out = (torch.randn(numel, device=device) for _ in range(3))
    tensors, dots = [a, b], kernels.dot_and_norms(a, b)
    layout = kernels.layout_of(tensors)
    buffer = kernels.pack(tensors, layout=layout)
    return {
        "pack": partial(kernels.plan_pack(tensors, layout=layout, out=buffer), scale=0.5),
        "unpack": partial(kernels.plan_unpack(buffer, tensors, layout=layout), scale=0.5),
        "sum_n": partial(kernels.plan_sum_n(tensors, out=out), scale=0.5),
        "scaled_add": partial(kernels.plan_scaled_add(a, b, out=out), alpha=0.5),
        "dot_and_norms": kernels.plan_dot_and_norms(a, b),
        "combine": kernels.plan_combine(a, b, dots, out=out),
        "adasum": kernels.plan_adasum(a, b, out=out),
    }


def checks() -> dict[str, Call]:
    """Return what is checked each time: direct calls on one tensor and on many, and rebinding."""
    tensors = [torch.randn(5, 3) for _ in range(COUNT)]
    others = [tensor.clone() for tensor in tensors]
    layout, one = kernels.layout_of(tensors), kernels.layout_of(tensors[:1])
    buffer, out = kernels.pack(tensors, layout=layout), torch.empty(5, 3)
    calls: dict[str, Call] = {}
    for count, chosen in ((1, one), (COUNT, layout)):
        given, into = tensors[:count], buffer[: chosen.numel]
        calls[f"pack of {count}"] = partial(kernels.pack, given, layout=chosen, out=into)
        calls[f"unpack of {count}"] = partial(kernels.unpack, into, given, layout=chosen)
        calls[f"sum_n of {count}"] = partial(kernels.sum_n, given, out=out)
    a, b = tensors[:2]
    pack = kernels.plan_pack(tensors, layout=layout, out=buffer)
    unpack = kernels.plan_unpack(buffer, tensors, layout=layout)
    return calls | {
        "scaled_add": partial(kernels.scaled_add, a, b, out=out),
        "dot_and_norms": partial(kernels.dot_and_norms, a, b),
        "combine": partial(kernels.combine, a, b, kernels.dot_and_norms(a, b), out=out),
        "adasum": partial(kernels.adasum, a, b, out=out),
        f"rebind pack of {COUNT}": partial(pack.rebind, others),
        f"rebind unpack of {COUNT}": partial(unpack.rebind, others),
    }


@contextmanager
def stubbed_launches() -> Iterator[None]:
    """Bind CPU tensors as tensors of an H100, with launches that end where Triton's would begin."""

    def bind(
        kernel: Any, programs: int, leading: Any, *arguments: Any, **constants: Any
    ) -> launcher.Launch:
        def started(*_: Any, stream: int) -> None:
            """Stand for a compiled kernel."""

        # A mock of its stream would take most of the time.
        given = *arguments, *constants.values()
        return launcher.Launch("stub", -1, lambda device: 0, started, given)

    with (
        mock.patch.object(launcher.Kernel, "bind", bind),
        mock.patch.object(launcher, "emulated", True),
        mock.patch.object(launcher, "chip_of", return_value=launcher.Chip(132, 50 << 20)),
    ):
        yield


def launches(device: str = "cpu") -> dict[str, Call]:
    """Return planned runs and direct calls, most of them of many tensors."""
    tensors = [torch.randn(5, 3, device=device) for _ in range(COUNT)]
    layout = kernels.layout_of(tensors)
    a, b = (torch.randn(layout.numel, device=device) for _ in range(2))
    calls: dict[str, Call] = {
        f"pack of {COUNT}": partial(kernels.plan_pack(tensors, layout=layout, out=a), 0.5),
        f"unpack of {COUNT}": partial(kernels.plan_unpack(a, tensors, layout=layout), 0.5),
        f"adasum of {COUNT} segments": kernels.plan_adasum(a, b, layout.segments),
        "adasum": kernels.plan_adasum(a, b),
        "adasum in two launches": kernels.plan_adasum(a, b, cooperative=False),
    }
    pair, out = tensors[:2], torch.empty_like(tensors[0])
    calls["direct sum_n of 2"] = partial(kernels.sum_n, pair, out=out)
    calls["direct scaled_add"] = partial(kernels.scaled_add, *pair, alpha=0.5, out=out)
    for count in COUNTS:
        given = [torch.randn(5, 3, device=device) for _ in range(count)]
        chosen = kernels.layout_of(given)
        buffer = kernels.pack(given, layout=chosen)
        calls[f"direct pack of {count}"] = partial(
            kernels.pack, given, layout=chosen, out=buffer, scale=0.5
        )
        calls[f"direct unpack of {count}"] = partial(
            kernels.unpack, buffer, given, layout=chosen, scale=0.5
        )
    return calls


def figures() -> dict[str, float]:
    """Return all figures of this process's tree."""
    found = {
        f"{name}, {4 * numel} bytes": microseconds(call)
        for numel in SIZES
        for name, call in planned(numel).items()
    }
    found |= {name: microseconds(call) for name, call in checks().items()}
    for name in ("scaled_add", "dot_and_norms", "combine", "adasum"):
        found[f"{name}, over its plan"] = found[name] - found[f"{name}, {4 * SIZES[0]} bytes"]
    for name in ("pack", "unpack", "sum_n"):
        one, many = found[f"{name} of 1"], found[f"{name} of {COUNT}"]
        found[f"{name} of 1, over its plan"] = one - found[f"{name}, {4 * SIZES[0]} bytes"]
        found[f"{name}, a further tensor"] = (many - one) / (COUNT - 1)
    with stubbed_launches():
        for name, call in launches().items():
            found[f"{name}, to Triton's launcher"] = microseconds(call)
    return found


def compiled() -> dict[str, float]:
    """Return the figures of calls in eager mode and compiled by torch, on tensors of 1 KiB."""
    a, b, out = (torch.randn(256) for _ in range(3))
    layout = kernels.layout_of([a, b])
    flat = kernels.pack([a, b], layout=layout)
    library = torch.library.Library("adasum_bench", "FRAGMENT")
    library.define("nothing(Tensor[] inputs, Tensor(a!) out) -> ()")
    library.impl("nothing", lambda *_: None, "CompositeExplicitAutograd")
    torch.library.register_fake("adasum_bench::nothing", lambda *_: None, lib=library)
    # Of their tensors as arguments: dynamo checks each variable that a function refers to.
    calls: dict[str, Callable[..., object]] = {
        "torch.add": lambda a, b, out: torch.add(a, b, out=out),
        "an empty operator": lambda a, b, out: torch.ops.adasum_bench.nothing.default([a, b], out),
        "sum_n of 2": lambda a, b, out: kernels.sum_n([a, b], out=out),
        "scaled_add": lambda a, b, out: kernels.scaled_add(a, b, alpha=0.5, out=out),
        "dot_and_norms": lambda a, b, _: kernels.dot_and_norms(a, b),
        "adasum": lambda a, b, out: kernels.adasum(a, b, out=out),
        "gram of 2": lambda a, b, _: kernels.gram([a, b]),
        "pack of 2": lambda a, b, out: kernels.pack([a, b], layout=layout, out=out),
    }
    # Short samples: of those, some run between what else uses the core's caches.
    least, found = partial(microseconds, seconds=_SECONDS / 20, repeats=20 * _REPEATS), {}
    for name, call in calls.items():
        given = a, b, flat if name == "pack of 2" else out
        found[name] = least(partial(call, *given))
        found[f"{name}, compiled"] = least(partial(torch.compile(call, fullgraph=True), *given))
    return found


def on_gpu() -> dict[str, float]:
    """Return the figures of a GPU's tensors, and of torch's functions."""
    calls = planned(SIZES[1], "cuda") | launches("cuda")
    a, b, out = (torch.randn(SIZES[1], device="cuda") for _ in range(3))
    calls["torch.add"] = partial(torch.add, a, b, out=out)
    for count in COUNTS:
        given = [torch.randn(5, 3, device="cuda") for _ in range(count)]
        others = [tensor.clone() for tensor in given]
        calls[f"torch._foreach_copy_ of {count}"] = partial(torch._foreach_copy_, given, others)
    return {name: to_return(call) for name, call in calls.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures, or those of two trees and their ratio; return 2 without a GPU."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="another tree of this library")
    parser.add_argument("--rounds", type=int, default=5, help="of both trees, in turns")
    parser.add_argument("-J", "--json", type=Path, metavar="FILE", help="write figures as JSON")
    parser.add_argument("--gpu", action="store_true", help="of a GPU's tensors")
    parser.add_argument("--compiled", action="store_true", help="of functions compiled by torch")
    given = parser.parse_args(argv)
    if given.gpu and not torch.cuda.is_available():
        print("bench.kernels.host_cost: torch sees no GPU here", file=sys.stderr)
        return 2
    if given.against is None:
        found = (on_gpu if given.gpu else compiled if given.compiled else figures)()
        if given.json is not None:
            given.json.write_text(json.dumps(found))
        print(*(f"{name:44} {value:8.2f}" for name, value in found.items()), sep="\n")
        return 0
    # Not at the top: another tree's process may have no such module.
    from bench.processes import in_turns

    here = Path(__file__).resolve()
    trees = {"here": here.parents[2], "there": given.against.resolve()}
    flags = ["--compiled"] if given.compiled else []
    commands = {tree: [sys.executable, str(here), *flags] for tree in trees}
    least: dict[str, dict[str, float]] = {tree: {} for tree in trees}
    for _, tree, found in in_turns(commands, given.rounds, trees):
        least[tree] = {name: min(each, least[tree].get(name, each)) for name, each in found.items()}
    print(f"{'microseconds':44} {'here':>8} {'there':>8} {'ratio':>6}")
    for name, value in least["here"].items():
        other = least["there"].get(name)
        tail = "" if other is None else f"{other:8.2f} {value / other:6.2f}"
        print(f"{name:44} {value:8.2f} {tail}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
