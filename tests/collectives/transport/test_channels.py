"""Messages through shared memory: lengths, order, layouts, and the ends of ranks."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from collectives import CollectiveTimeoutError, TransportError
from collectives.transport import Transport, futex
from collectives.transport.base import as_bytes
from collectives.transport.channels import _HELD_BYTES, SLOT_BYTES, SLOTS
from tests.collectives.transport.thread_ranks import (
    both,
    connect,
    exchange,
    noise,
    poisoned,
    together,
)

# Around every boundary of the protocol; the last is more than the ring holds.
LENGTHS = (0, 1, _HELD_BYTES, _HELD_BYTES + 1, SLOT_BYTES, SLOT_BYTES + 1, SLOTS * SLOT_BYTES)
LONG = 2 * SLOTS * SLOT_BYTES + 12345


@both
def test_every_length_both_ways_in_one_exchange(kind: str) -> None:
    """Both sides send far more than the ring holds before either could have received."""
    lengths = [*LENGTHS, LONG, *LENGTHS]
    first, second = connect(2, kind)

    def swap(transport: Transport) -> None:
        peer = 1 - transport.rank
        sends = [(peer, noise(n, 100 * transport.rank + i)) for i, n in enumerate(lengths)]
        recvs = [(peer, poisoned(n)) for n in lengths]
        exchange(transport, sends, recvs)
        for i, (_, got) in enumerate(recvs):
            assert torch.equal(got, noise(lengths[i], 100 * peer + i)), lengths[i]

    together(lambda: swap(first), lambda: swap(second))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
        *(torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool),
        *(torch.complex64, torch.float8_e4m3fn),
    ],
)
def test_bytes_are_those_in_memory(dtype: torch.dtype) -> None:
    """Of one element, too, which is contiguous with any stride, and of what needs a gradient."""
    many = torch.arange(1, 11).to(dtype)
    for tensor in (many, many[3:7], many.view(2, 5), many[::5][:1], many[:0], many[4]):
        data = as_bytes(tensor)
        dense = torch.empty(tensor.numel(), dtype=dtype).copy_(tensor.reshape(-1))
        assert torch.equal(data, dense.view(torch.uint8))
        before = tensor.clone()
        data.zero_()
        assert not tensor.to(torch.complex128).any()
        tensor.copy_(before)
    if dtype.is_floating_point and dtype.itemsize > 1:
        assert torch.equal(as_bytes(many.clone().requires_grad_()), as_bytes(many))


@both
def test_a_message_of_another_length_is_an_error_that_names_both(kind: str) -> None:
    first, second = connect(2, kind)
    exchange(first, [(1, noise(4, 0))], [])
    with pytest.raises(TransportError, match=r"rank 0 sent 4 bytes in a step where 5 were expect"):
        exchange(second, [], [(0, poisoned(5))])
    with pytest.raises(TransportError, match=r"cannot be used in a step: rank 0 sent .*4 bytes"):
        exchange(second, [], [(0, poisoned(4))])
    # The sender is told.
    with pytest.raises(CollectiveTimeoutError, match="rank 1 in a step: rank 0 sent 4 bytes"):
        exchange(first, [], [(1, poisoned(4))])


@both
def test_without_futexes_messages_arrive_too(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(futex, "available", False)
    first, second = connect(2, kind)
    got = poisoned(LONG)
    together(
        lambda: exchange(first, [(1, noise(LONG, 0))], []),
        lambda: exchange(second, [], [(0, got)]),
    )
    assert torch.equal(got, noise(LONG, 0))


@both
@pytest.mark.parametrize("long", [False, True])
def test_what_was_sent_before_the_end_arrives(kind: str, long: bool) -> None:
    """The sender closes with messages of its peer unread."""
    length = (SLOTS - 1) * SLOT_BYTES if long else 5
    first, second = connect(2, kind)
    exchange(second, [(0, noise(7, 1))], [])
    exchange(first, [(1, noise(length, 2)), (1, noise(9, 3))], [])
    first.close()
    got = [poisoned(length), poisoned(9)]
    for tensor in got:
        exchange(second, [], [(0, tensor)])
    assert torch.equal(got[0], noise(length, 2)) and torch.equal(got[1], noise(9, 3))
    start = time.monotonic()
    with pytest.raises(CollectiveTimeoutError, match="rank 0 has ended"):
        exchange(second, [], [(0, poisoned(1))])
    assert time.monotonic() - start < 1.0
    with pytest.raises(TransportError, match="cannot be used"):
        exchange(first, [(1, noise(1, 0))], [])


@both
def test_rank_that_aborts_ends_waits_for_others(kind: str) -> None:
    """Rank 2 waits for rank 1, which lives and says nothing."""
    first, second, third = connect(3, kind)
    start = time.monotonic()
    threading.Timer(0.1, lambda: first.abort("a fault of its own")).start()
    with pytest.raises(CollectiveTimeoutError, match="from rank 0 in a step: a fault of its own"):
        exchange(third, [], [(1, poisoned(5))])
    assert time.monotonic() - start < 2.0
    assert second.gone() in (0, 2) and second.why_gone(0) == "a fault of its own"


@both
def test_sending_to_a_rank_that_has_ended(kind: str) -> None:
    first, second = connect(2, kind)
    first.close()
    with pytest.raises(CollectiveTimeoutError, match="from rank 0 in a step: rank 0 has ended"):
        exchange(second, [(0, noise(5, 0))], [])


class Elsewhere(torch.Tensor):
    """A tensor whose memory the host cannot reach, as that of one on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cpu = False  # type: ignore[assignment]

    def cpu(self) -> torch.Tensor:  # type: ignore[override]
        return self.as_subclass(torch.Tensor).clone()

    def data_ptr(self) -> int:
        raise AssertionError("this memory is not the host's")


def test_threads_stage_what_is_not_in_the_hosts_memory() -> None:
    first, second = connect(2, "threads")
    sent, got = noise(LONG, 1), poisoned(LONG)
    back = poisoned(5)
    together(
        lambda: exchange(first, [(1, sent.as_subclass(Elsewhere))], [(1, back)]),
        lambda: exchange(second, [(0, noise(5, 2))], [(0, got.as_subclass(Elsewhere))]),
    )
    assert torch.equal(got, sent) and torch.equal(back, noise(5, 2))
