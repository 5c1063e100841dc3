"""Facts that the bits of a training run depend on, to be stored with its checkpoints.

Write `json.dumps(adasum.bits_of(optimizer))` to a file; then

    python -m adasum.bits FILE

prints these facts, and marks those that differ in this process.
"""

from __future__ import annotations

import torch

import kernels
from adasum.compression import Compression
from adasum.optimizer.distributed_optimizer import DistributedOptimizer
from adasum.optimizer.local_step import parameters_of
from collectives import validation
from collectives.schedules.algorithm import tree_text

__all__ = ["bits_of"]

Facts = dict[str, str]


def bits_of(optimizer: torch.optim.Optimizer) -> dict[str, dict[str, str]]:
    """Return the facts that the bits of a training run depend on, as text for JSON.

    Args:
        optimizer: Made by `DistributedOptimizer`.

    Returns:
        "reduction": how gradients are reduced; "torch": the versions, threads, settings and devices
        of this process, which decide the model's own bits. Seeds and the order of data are left
        out: keep them yourself.

    Raises:
        TypeError: The optimizer was not made by `DistributedOptimizer`.

    Examples:
        >>> hvd.init()
        >>> plain = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        >>> hvd.bits_of(hvd.DistributedOptimizer(plain))["reduction"]["op"]
        'Average'
    """
    validation.instance("optimizer", optimizer, DistributedOptimizer, "a DistributedOptimizer")
    assert isinstance(optimizer, DistributedOptimizer)
    return {"reduction": _reduction(optimizer), "torch": torch_facts()}


def _reduction(optimizer: DistributedOptimizer) -> Facts:
    settings, passes = optimizer._adasum.settings, optimizer.backward_passes_per_step
    reducer = settings.reducer
    size = 1 if settings.one_rank else reducer.group.size
    compressions = {getattr(Compression, name): name for name in ("none", "fp16", "bf16")}
    found = {
        "op": str(settings.op),
        "dtypes": ", ".join(sorted({str(p.dtype) for p in parameters_of(optimizer)})),
        "compression": compressions.get(reducer.compression, reducer.compression.__name__),
        "method": type(optimizer._adasum).__name__.removesuffix("Method").lower(),
    }
    if not reducer.op.ordered:
        return {
            **found,
            "order": "none: the bits depend on ranks, hosts, algorithm, sizes and buckets",
            "ranks × passes": f"{size} × {passes}",
            "algorithm": str(reducer.algorithm),
            "transport": type(reducer.group.transport).__name__,
        }
    options = reducer.op.order_options
    leaves = size * passes
    return {
        **found,
        "order": f"tree of {leaves} leaves, {tree_text(leaves)}: ranks × passes may change",
        "accumulate": str(options["accumulate"] or "the gradients' dtype"),
    }


def torch_facts() -> Facts:
    """Return the facts of this process that torch's own bits depend on."""
    backends = torch.backends
    found = {
        "torch": str(torch.__version__),
        "deterministic algorithms": str(torch.are_deterministic_algorithms_enabled()),
        "CPU capability": backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "float32 matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": str(backends.mkldnn.is_available() and backends.mkldnn.enabled),
        "MKL": str(backends.mkl.is_available()),
        "CPU kernels of adasum": kernels.backend_info().cpu_path,
    }
    if torch.cuda.is_available():
        found |= {
            "device": torch.cuda.get_device_name(),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(backends.cudnn.version()),
            "cuDNN deterministic": str(backends.cudnn.deterministic),
            "cuDNN benchmark": str(backends.cudnn.benchmark),
            "TF32 of matmul": str(backends.cuda.matmul.allow_tf32),
            "Triton": str(kernels.backend_info().triton),
        }
    return found
