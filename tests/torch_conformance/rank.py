"""One rank of a suite: runs tests one after the other in this process, as a training would.

What a test leaves behind in the process is there for the next one. `tests.torch_conformance`
starts it and reads its report, a line of JSON when a test begins and one when it has ended.
"""

from __future__ import annotations

import json
import os
import pkgutil
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.torch_conformance import cpu_for_gpus

# Seconds that gloo waits for a rank: as torch's tests have it.
GROUP_TIMEOUT = 60.0


def main(argument: dict[str, Any]) -> None:
    """What a rank runs in the nursery's process.

    argument: suite, "module:name"; tests, rank, size, hook; report, a file of this rank;
    directory, of all.
    """
    # Read when torch's test modules are imported.
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(argument["size"]), INIT_METHOD="env://")
    from tests.torch_conformance.suites import Rank

    torch.set_num_threads(1)
    suite = pkgutil.resolve_name(argument["suite"])
    rank, size = argument["rank"], argument["size"]
    with Path(argument["report"]).open("a") as report, suite.stand_ins(argument["hook"]):
        for number, name in enumerate(argument["tests"]):
            print(f"--- {name}", flush=True)
            directory = Path(argument["directory"], str(number))
            directory.mkdir(exist_ok=True)
            place = Rank(rank, size, argument["hook"], directory)
            outcome, said = run(suite.case, name, place)
            print(json.dumps([name, time.time(), outcome, said]), file=report, flush=True)
            if outcome == "failed":
                # Its ranks may be anywhere in it: others run the tests after it.
                return
            _wait_for_all(place)
            if dist.is_initialized():
                dist.destroy_process_group()


def _wait_for_all(place: Any) -> None:
    """Keep this rank's connections open until all ranks are done with the test."""
    store = dist.FileStore(str(place.directory / "done"), place.size)
    store.set(str(place.rank), "")
    store.wait([str(rank) for rank in range(place.size)], timedelta(seconds=GROUP_TIMEOUT))


def run(case: Any, name: str, place: Any) -> tuple[str, str]:
    """Run a test on this rank, in a new process group; return its outcome, and why."""
    # A test may have left another one.
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "OFF"
    dist.set_debug_level_from_env()
    torch.manual_seed(1234)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(place.directory / "store"), place.size),
            world_size=place.size,
            rank=place.rank,
            timeout=timedelta(seconds=GROUP_TIMEOUT),
        )
        getattr(case(name, place), name)()
        return "passed", ""
    except unittest.SkipTest as skip:
        return "skipped", str(skip)
    except SystemExit as leaving:
        # So a rank skips a test in torch's tests.
        cpu_for_gpus.import_helpers()
        from torch.testing._internal.common_distributed import TEST_SKIPS

        for each in TEST_SKIPS.values():
            if each.exit_code == leaving.code:
                return "skipped", each.message
        return "failed", f"the test has left with status {leaving.code}"
    except Exception as error:  # noqa: BLE001 - reported
        traceback.print_exc()
        return "failed", f"{type(error).__name__}: {error}".splitlines()[0][:300]
