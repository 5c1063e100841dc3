"""A torch that is built without torch.distributed: what needs one process works."""

from __future__ import annotations

from tests.packaging.subprocess_without import USE, assert_error, assert_use_worked, run

UNDISTRIBUTED = """
import os
from adasum.check import checks
from collectives import Topology, cost

assert not torch.distributed.is_available()
report["spec"] = [str(part) for part in collectives.parse_all_reduce_spec("rd:16k:xring/vhdd")]
report["cost"] = cost.estimate("xring", 2**20, cost.ASSUMED, Topology(16, 8)).seconds
packed, packing = collectives.pack_small_tensors([torch.ones(2), torch.zeros(3)], 64)
report["packed"] = [tensor.tolist() for tensor in packed]
report["built"] = [adasum.gloo_built(), adasum.nccl_built(), adasum.gloo_enabled()]
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
report["init"] = outcome(collectives.init, timeout=5.0)
report["process group"] = outcome(collectives.from_process_group, None)
report["hook"] = outcome(lambda: adasum.HookState().group)
report["FSDP"] = outcome(adasum.register_fsdp_hook, torch.nn.Linear(2, 2), adasum.HookState())
report["check"] = outcome(checks.reduce, "cpu")
"""


def test_torch_without_distributed_works_on_one_process_and_init_names_it() -> None:
    code = "import torch, kernels, collectives, adasum\n" + USE + UNDISTRIBUTED
    report = run(code, "cupy", "triton", "nvidia", "torch.distributed")
    assert_use_worked(report)
    assert report["spec"] == ["rd", "xring/vhdd"]
    assert report["cost"] > 0
    assert report["packed"] == [[1.0, 1.0, 0.0, 0.0, 0.0]]
    assert report["built"] == [False, 0, False]
    for name in ("init", "process group", "FSDP", "check"):
        assert_error(report[name], "RuntimeError", "without torch.distributed", "pip install")
    assert_error(report["hook"], "RuntimeError", "adasum.init()")
