"""The timeline of the digits example names its reductions."""

from __future__ import annotations

import json
from pathlib import Path

from tests.processes.harness import run_ranks, script

SCRIPT = Path(__file__).parents[2] / "examples" / "train_digits.py"


def test_trace_of_a_step_names_bucket_operator_algorithm_and_bytes(tmp_path):
    options = ("--op", "average", "--epochs", "1", "--trace", str(tmp_path / "trace"))
    run_ranks(2, script, str(SCRIPT), *options)
    for rank in range(2):
        events = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())["traceEvents"]
        ranges = [each for each in events if each["ph"] == "X"]
        reductions = [each for each in ranges if each["name"].startswith("grouped_all_reduce")]
        # One bucket a step: 6,058 float32 elements and their slots' padding. What the communication
        # thread reduces is not the caller's, which torch.profiler records.
        buckets = [each for each in reductions if "bucket 0: 9.bias to 0.weight" in each["name"]]
        assert buckets
        name = buckets[0]["name"]
        assert ": Average, " in name and name.endswith(" B")
        assert int(name.split()[-2]) >= 4 * 6_058
        # Each of 88 steps of 16 images is waited for by the caller.
        named = [each for each in ranges if each["name"].startswith("wait grouped_all")]
        assert len([each for each in named if "bucket 0: 9.bias" in each["name"]]) == 88
