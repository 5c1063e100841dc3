"""Names of horovod.torch that are missing here, and what to use instead."""

from __future__ import annotations

ABSENT = {
    "HorovodInternalError": "catch adasum.CollectiveError",
    "SyncBatchNorm": "use torch.nn.SyncBatchNorm, which needs CUDA and torch.distributed",
    "elastic": "torchrun --max-restarts starts ranks again; resume from a checkpoint, as "
    "examples/resume_digits.py does",
    "run": "start ranks with torchrun, or call a function in them with "
    "torch.distributed.launcher.elastic_launch",
}
