"""What DistributedOptimizer refuses of parameters on a GPU; no GPU needed."""

from __future__ import annotations

import pytest
import torch

from adasum.optimizer.arguments import require_own_autograd
from collectives import Group, run_threads


class OnGpu(torch.nn.Parameter):
    """A parameter that says it is on a GPU."""

    is_cuda = True  # type: ignore[assignment]


def test_ranks_that_are_threads_are_refused_where_a_gpus_backward_would_wait() -> None:
    named = [("a", torch.nn.Parameter(torch.zeros(1))), ("b", OnGpu(torch.zeros(1)))]

    def run(group: Group) -> None:
        require_own_autograd(group, named[:1])
        with pytest.raises(ValueError, match="share autograd's one thread of a GPU"):
            require_own_autograd(group, named)

    run_threads(2, run)
    # Nobody waits.
    run_threads(1, lambda group: require_own_autograd(group, named))
