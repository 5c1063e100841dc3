"""How ranks meet: through one store, at the address that the environment variables name."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta

import torch.distributed as dist

from .errors import CollectiveError, CollectiveTimeoutError, TransportError


def open_store(rank: int, timeout: float) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT: torchrun's, else rank 0's own.

    As torch's "env://", but it does not wait for the other ranks: `await_ranks` does, and can tell
    who is missing. timeout: seconds. CollectiveTimeoutError where there is none in time,
    TransportError where the port is taken.
    """
    place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    try:
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout)))
            return store
        return _bounded(
            lambda: dist.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=rank == 0,
                timeout=timedelta(seconds=timeout),
                wait_for_workers=False,
            ),
            # torch says more about it, where it gives up by itself.
            timeout + 2.0,
        )
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise TransportError(
                f"rank {rank} cannot listen on {place}, where all ranks are to meet: something "
                "else does already; set another MASTER_PORT on all ranks"
            ) from error
        raise CollectiveTimeoutError(
            f"rank {rank} got no answer from the store at {place}, which rank 0 or torchrun keeps, "
            f"within {timeout:g} s: {first_line(error)}"
        ) from error


def _bounded(make: Callable[[], dist.Store], timeout: float) -> dist.Store:
    """What `make` returns, or its error; DistNetworkError where there is neither in time.

    torch bounds its wait for a listener, but not for a listener's first word: it would wait for
    ever where something else listens.
    """
    future: Future[dist.Store] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except Exception as error:  # noqa: BLE001 - raised by result()
            future.set_exception(error)

    # Not a pool's, which the interpreter would wait for at exit.
    threading.Thread(target=run, name="collectives-store", daemon=True).start()
    try:
        return future.result(timeout)
    except FutureTimeout:
        raise dist.DistNetworkError("what listens there does not answer as a store does") from None


def await_ranks(store: dist.Store, rank: int, size: int, timeout: float) -> None:
    """Return when all ranks have called it; CollectiveTimeoutError naming those that have not."""
    deadline = time.monotonic() + timeout
    keys = [f"rank {peer} has come" for peer in range(size)]
    try:
        store.set(keys[rank], "")
        store.wait(keys, timedelta(seconds=timeout))
    except RuntimeError as error:
        raise _missing(store, rank, keys, timeout, deadline, error) from error


def _missing(
    store: dist.Store,
    rank: int,
    keys: list[str],
    timeout: float,
    deadline: float,
    error: RuntimeError,
) -> CollectiveError:
    start = f"rank {rank} could not start (gave up after "
    start += f"{timeout - (deadline - time.monotonic()):.1f} s of {timeout:g} s): "
    try:
        late = [peer for peer, key in enumerate(keys) if not store.check([key])]
    except RuntimeError:
        return CollectiveTimeoutError(
            f"{start}the store, which rank 0 or torchrun keeps, has ended; look at rank 0's own "
            f"error: {first_line(error)}"
        )
    names = ", ".join(f"rank {peer}" for peer in late)
    return CollectiveTimeoutError(f"{start}{names or 'another rank'} did not come")


def first_line(error: BaseException) -> str:
    """What torch says, without its C++ stack."""
    return str(error).strip().split("\n", 1)[0]
