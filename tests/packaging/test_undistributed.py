"""A torch built without torch.distributed: what needs no second process works all the same."""

from __future__ import annotations

from tests.packaging.machine import USE, check_work, one_line, run

UNDISTRIBUTED = """
import os
from adasum import check
from collectives import Topology, cost

assert not torch.distributed.is_available()
report["spec"] = [str(part) for part in collectives.parse_all_reduce_spec("rd:16k:xring/vhdd")]
report["cost"] = cost.estimate("xring", 2**20, cost.ASSUMED, Topology(16, 8)).seconds
packed, packing = collectives.pack_small_tensors([torch.ones(2), torch.zeros(3)], 64)
report["packed"] = [tensor.tolist() for tensor in packed]
report["built"] = [adasum.gloo_built(), adasum.nccl_built(), adasum.gloo_enabled()]
os.environ.update(RANK="0", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
report["init"] = said(collectives.init, timeout=5.0)
report["process group"] = said(collectives.from_process_group, None)
report["hook"] = said(lambda: adasum.HookState().group)
report["FSDP"] = said(adasum.register_fsdp_hook, torch.nn.Linear(2, 2), adasum.HookState())
report["check"] = check._self_test()
"""


def test_without_torch_distributed() -> None:
    code = "import torch, kernels, collectives, adasum\n" + USE + UNDISTRIBUTED
    report = run(code, "cupy", "triton", "nvidia", "torch.distributed")
    check_work(report)
    assert report["spec"] == ["rd", "xring/vhdd"]
    assert report["cost"] > 0
    assert report["packed"] == [[1.0, 1.0, 0.0, 0.0, 0.0]]
    assert report["built"] == [False, 0, False]
    for name in ("init", "process group", "FSDP"):
        one_line(report[name], "RuntimeError", "without torch.distributed", "pip install")
    one_line(report["hook"], "RuntimeError", "adasum.init()")
    assert report["check"] == [False, "torch.distributed is not in this build of torch"]
