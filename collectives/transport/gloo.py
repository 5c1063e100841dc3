"""Messages of CPU tensors over torch.distributed's gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from collectives.errors import CollectiveError
from collectives.stall import Stall
from collectives.transport.base import Messages, Transport, as_bytes
from collectives.transport.process_groups import extend_timeout, failed, leave, subgroup


class GlooTransport(Transport):
    """Messages of CPU tensors over a torch.distributed process group, which it ends if `owned`."""

    process_group: dist.ProcessGroup
    symmetric_memory = None

    def __init__(
        self, process_group: dist.ProcessGroup, *, owned: bool = False, names: Sequence[int] = ()
    ) -> None:
        self.names = names
        self.process_group = process_group
        self._owned = owned
        self.rank = dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)
        self._config = dist.get_backend_config(process_group)
        # Such as "cpu:gloo,cuda:nccl": the backend of each device type.
        parts = [part.split(":", 1) for part in self._config.split(",")]
        self._backends = {part[0]: part[-1] for part in parts if len(part) == 2}
        if self._backends.get("cpu") != "gloo":
            raise ValueError(
                f"process_group must carry CPU tensors over gloo, its backends are "
                f'{self._backends}: make it with backend="gloo" or "cpu:gloo,cuda:nccl"'
            )
        if owned:
            extend_timeout(process_group)

    def __repr__(self) -> str:
        return "GlooTransport()"

    def check_device(self, device: torch.device) -> None:
        if device.type != "cpu":
            raise ValueError(
                f"tensor is on {device}, which this process group's backends "
                f"({self._backends}) do not carry; move it to the CPU, or initialise "
                'torch.distributed with backend="cpu:gloo,cuda:nccl"'
            )

    def exchange(self, sends: Messages, recvs: Messages, step: str, timeout: float) -> None:
        self.post(sends, recvs, step, timeout)()

    def post(
        self, sends: Messages, recvs: Messages, step: str, timeout: float
    ) -> Callable[[], None]:
        """Start an `exchange`, which gloo's own thread carries on; the function waits for it."""
        start = time.monotonic()
        posted: list[tuple[int, dist.Work]] = []
        peer = self.rank
        try:
            for post, messages in (
                (self.process_group.recv, recvs),
                (self.process_group.send, sends),
            ):
                for peer, tensor in messages:
                    if tensor.numel():
                        posted.append((peer, post([as_bytes(tensor)], peer, 0)))
        except RuntimeError as error:
            raise self._error(peer, step, start, timeout, error) from error
        return partial(self._wait, posted, step, start, timeout)

    def _wait(
        self, posted: Sequence[tuple[int, dist.Work]], step: str, start: float, timeout: float
    ) -> None:
        peer = self.rank
        stall = Stall(self.name(self.rank), step, timeout, lambda: self.named([peer]))
        try:
            with stall.within():
                # The loop's variable is what `stall` and the error name.
                for peer, work in posted:  # noqa: B007
                    left = max(start + timeout - time.monotonic(), 1e-3)
                    work.wait(timedelta(seconds=left))
        except RuntimeError as error:
            raise self._error(peer, step, start, timeout, error) from error
        self.check_interrupt(step)

    def _error(
        self, peer: int, step: str, start: float, timeout: float, error: RuntimeError
    ) -> CollectiveError | OSError:
        """Return our error for gloo's, which came while this rank waited for a peer."""
        return failed(
            f"{self.me} got no answer from {self.named([peer])} in {step} (stopped after "
            f"{time.monotonic() - start:.1f} s of {timeout:g} s)",
            error,
        )

    def split(self, ranks: Sequence[int], timeout: float) -> GlooTransport:
        # Lazy: with faster connections gloo is seldom used, and would otherwise connect all ranks.
        part = subgroup(self.process_group, ranks, self._config, timeout, lazy=True)
        return GlooTransport(part, owned=True, names=tuple(map(self.name, ranks)))

    def close(self) -> None:
        if self._owned:
            leave(self.process_group)
