"""What becomes of those of Horovod's tests that do not simply pass."""

from __future__ import annotations

# Tests of Adasum, which want GPUs and Horovod's MPI but test neither: run with .cuda() and "cuda:0"
# meaning the CPU, and counted by themselves.
CPU_FOR_GPUS = frozenset(
    {
        "test_delta_optimizer",
        "test_orthogonal",
        "test_parallel",
        "test_stability",
        "test_stability_2",
    }
)

_BY_ORDER = (
    "the second call of a name is a ValueError as there, but between its calls one rank is at a "
    "barrier: calls are matched by order and not by name, so that is a CollectiveMismatchError"
)
_WITH_JOINED = (
    "Horovod refuses this while a rank has joined, and here it works: the joined rank adds no rows "
    "to an allgather, and broadcasts come from the others"
)

DIFFERENT = {
    "test_broadcast_state_no_grad": (
        "broadcast_optimizer_state takes no step with zero gradients, so it leaves gradients and "
        "the optimizer's state as they were"
    ),
    "test_horovod_allgather_duplicate_name_error": _BY_ORDER,
    "test_horovod_allreduce_duplicate_name_error": _BY_ORDER,
    "test_horovod_broadcast_duplicate_name_error": _BY_ORDER,
    "test_horovod_reducescatter_duplicate_name_error": _BY_ORDER,
    "test_horovod_join_allgather": _WITH_JOINED,
    "test_horovod_join_broadcast": _WITH_JOINED,
    "test_horovod_reducescatter_adasum": (
        "it wants op=Adasum refused for every dtype; reducescatter takes it here, and refuses "
        "integers alone, by a TypeError"
    ),
}

SKIPPED = {
    "test_broadcast_state_gpu": "Horovod skips it always",
    "test_timeline_api": "Horovod skips it always; tests/collectives/test_trace.py has our own",
    "test_gpu_required": "wants a GPU, and tests nothing else",
    "test_horovod_allreduce_cpu_gpu_error": "wants a GPU",
    "test_horovod_allreduce_multi_gpu": "wants two GPUs a rank",
    "test_horovod_alltoall_splits_on_gpu": "wants a GPU",
    "test_horovod_grouped_allreduce_cpu_gpu_error": "wants a GPU",
    "test_model_parallelism": "wants two GPUs a rank",
    "test_horovod_sync_batch_norm": "wants a GPU; hvd.SyncBatchNorm does not exist here",
}
