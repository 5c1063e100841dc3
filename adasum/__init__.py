"""Data-parallel training of PyTorch models with sum, average or Adasum.

A Horovod PyTorch script runs with `import adasum as hvd`: names and meaning are Horovod's.
"""

from __future__ import annotations

import sys
from inspect import isfunction
from typing import TYPE_CHECKING

# First: it explains the error if another package is named collectives or kernels.
import adasum._collectives_check  # noqa: F401
from adasum import orthogonality
from adasum.absent import ABSENT
from adasum.bits import bits_of
from adasum.compression import Compression
from adasum.ddp import HookState, ddp_hook
from adasum.fsdp import register_fsdp_hook
from adasum.gradient_recorder.recorder import GradientRecorder
from adasum.handle import poll, synchronize
from adasum.horovod.basics import (
    barrier,
    cross_rank,
    cross_size,
    init,
    is_homogeneous,
    join,
    local_rank,
    local_size,
    rank,
    size,
)
from adasum.horovod.capabilities import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from adasum.horovod.exchanges import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
)
from adasum.horovod.objects import allgather_object, broadcast_object
from adasum.horovod.process_sets import (
    ProcessSet,
    add_process_set,
    get_process_set_ids_and_ranks,
    global_process_set,
    process_set_by_id,
    remove_process_set,
)
from adasum.horovod.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
    sparse_allreduce_async,
)
from adasum.horovod.state import broadcast_optimizer_state, broadcast_parameters
from adasum.horovod.timeline import start_timeline, stop_timeline
from adasum.optimizer.distributed_optimizer import DistributedOptimizer
from adasum.optimizer.errors import OptimizerOrderError
from adasum.reducer import Adasum, AdasumReducer
from collectives import (
    Average,
    CollectiveError,
    CollectiveMismatchError,
    CollectiveTimeoutError,
    Max,
    Min,
    Product,
    Sum,
    TransportError,
    is_initialized,
    shutdown,
)
from collectives.modes import untraced
from kernels import __version__ as __version__
from kernels import logs
from kernels.validation import did_you_mean

__all__ = ["Adasum", "AdasumReducer", "Average", "Compression", "DistributedOptimizer"]
__all__ += ["GradientRecorder", "HookState"]
__all__ += ["Max", "Min", "Product", "Sum"]
__all__ += ["CollectiveError", "CollectiveMismatchError", "CollectiveTimeoutError"]
__all__ += ["OptimizerOrderError", "TransportError"]
__all__ += ["bits_of", "ddp_hook", "orthogonality", "register_fsdp_hook"]
__all__ += ["allgather", "allgather_async", "allgather_object", "grouped_allgather"]
__all__ += ["grouped_allgather_async"]
__all__ += ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "grouped_allreduce"]
__all__ += ["grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_"]
__all__ += ["sparse_allreduce_async"]
__all__ += ["alltoall", "alltoall_async", "broadcast", "broadcast_", "broadcast_async"]
__all__ += ["broadcast_async_", "broadcast_object", "broadcast_optimizer_state"]
__all__ += ["broadcast_parameters"]
__all__ += ["grouped_reducescatter", "grouped_reducescatter_async", "reducescatter"]
__all__ += ["reducescatter_async"]
__all__ += ["ProcessSet", "add_process_set", "get_process_set_ids_and_ranks", "global_process_set"]
__all__ += ["process_set_by_id", "remove_process_set"]
__all__ += ["ccl_built", "cuda_built", "ddl_built", "gloo_built", "gloo_enabled", "mpi_built"]
__all__ += ["mpi_enabled", "mpi_threads_supported", "nccl_built", "rocm_built"]
__all__ += ["barrier", "cross_rank", "cross_size", "init", "is_homogeneous", "is_initialized"]
__all__ += ["join", "local_rank", "local_size", "poll", "rank", "shutdown", "size"]
__all__ += ["start_timeline", "stop_timeline", "synchronize"]

logs.show(__name__)

# Ranks wait for each other in these functions, which torch.compile calls instead of tracing them.
# Pickle finds them in the modules that define them.
for _name in __all__:
    if isfunction(globals()[_name]):
        globals()[_name] = untraced(globals()[_name])
        setattr(sys.modules[globals()[_name].__module__], _name, globals()[_name])

# A type checker that saw __getattr__ would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Raise AttributeError, naming a replacement or the name that was probably meant."""
        # Import and inspection ask for __path__, __wrapped__ and such, and drop the error.
        known = [] if name.startswith("_") else __all__
        advice = ABSENT.get(name) or did_you_mean(name, known)
        raise AttributeError(
            f"module {__name__!r} has no attribute {name!r}" + (advice and f": {advice}")
        )
