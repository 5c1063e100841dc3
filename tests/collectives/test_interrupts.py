"""An interrupt in a call ends the group: its peers get an error."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from collectives import CollectiveError, Group, Sum, TransportError
from collectives.reducers import SumReducer
from tests.collectives.consistency.ranks import everywhere, run, start_and_wait

SECONDS = 5.0

CALLS: dict[str, Any] = {
    "sync": lambda group, tensor, op: group.all_reduce(tensor, op),
    "async": lambda group, tensor, op: group.all_reduce(tensor, op, async_op=True).wait(),
    "request": lambda group, tensor, op: start_and_wait(group.all_reduce_init(tensor, op)),
    # Which the thread that waits for the last call carries out as well.
    "queued": lambda group, tensor, op: [
        group.all_reduce(tensor, op, async_op=True),
        group.all_reduce(tensor.clone(), async_op=True),
    ][1].wait(),
}


class Interrupted(SumReducer):
    """Ends in a KeyboardInterrupt on one rank."""

    rank = 0

    def reduce(self, operands: Any) -> None:
        assert not torch.is_grad_enabled()
        if self.rank == 1:
            raise KeyboardInterrupt
        super().reduce(operands)


@everywhere
@pytest.mark.parametrize("call", CALLS)
def test_interrupt_in_a_call_ends_the_group_on_all_ranks(way: str, call: str) -> None:
    def job(group: Group) -> BaseException:
        op, start = Interrupted(), time.monotonic()
        op.rank = group.rank

        def interrupted() -> None:
            CALLS[call](group, torch.ones(1000), op)
            # A rank that needs nothing of the other's any more may have its sum.
            group.barrier()

        with pytest.raises((KeyboardInterrupt, CollectiveError)) as caught:
            interrupted()
        for later in (group.barrier, lambda: CALLS["async"](group, torch.ones(3), Sum)):
            with pytest.raises(TransportError, match="unusable since an earlier failure"):
                later()
        assert torch.is_grad_enabled()
        assert time.monotonic() - start < 2 * SECONDS
        return caught.value

    told, mine = run(way, 2, job, SECONDS)
    assert isinstance(told, CollectiveError)
    assert isinstance(mine, KeyboardInterrupt) or (
        # The call behind it says why it cannot run, where another thread was interrupted.
        call == "queued" and "KeyboardInterrupt" in str(mine)
    )


@everywhere
def test_interrupt_before_a_peer_has_come_is_what_that_one_is_told(way: str) -> None:
    """In the rank's wait for it: here where the rank says that it has begun."""

    def job(group: Group) -> None:
        if group.rank == 1:
            negotiation, signal = group._calls._negotiation, group._calls._negotiation.signal

            def interrupted(call: Any) -> None:
                signal(call)
                raise KeyboardInterrupt

            negotiation.signal = interrupted  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                group.all_reduce(torch.ones(4))
        for _ in range(2):
            with pytest.raises(CollectiveError):
                group.all_reduce(torch.ones(4))
        assert torch.is_grad_enabled()

    run(way, 2, job, SECONDS)
