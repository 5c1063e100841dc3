"""What DistributedOptimizer was asked for, as its methods need it."""

from __future__ import annotations

from dataclasses import dataclass

from adasum.horovod.process_sets import ProcessSet
from adasum.optimizer.buckets.planning import PlanBuckets
from adasum.optimizer.buckets.reduction import BucketReducer
from collectives import Reducer


@dataclass
class Settings:
    """What DistributedOptimizer was asked for.

    Attributes:
        reducer: Reduces each bucket.
        plan_buckets: Divides parameters into buckets by size.
        passes: Backward passes of a step.
        sparse_as_dense: Whether sparse gradients are made dense first.
        one_rank: Whether this rank reduces with no other.
        op: As asked for; the reducer's is Sum where Average is divided before and after it.
        process_set: As asked for.
        local_steps: Steps between two reductions.
        gradient_as_bucket_view: Whether gradients that are reduced lie in their buckets' buffers.
    """

    reducer: BucketReducer
    plan_buckets: PlanBuckets
    passes: int
    sparse_as_dense: bool
    one_rank: bool
    op: Reducer
    process_set: ProcessSet
    local_steps: int = 1
    gradient_as_bucket_view: bool = True
