"""All ranks' buffers of a call, as tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Of the buffers, kept as tensors; making one costs some microseconds.
MAX_VIEWS = 256


class RankBuffers:
    """All ranks' buffers in a call: `vectors` by rank. Keeps views, which cost microseconds."""

    def __init__(self, vectors: Sequence[torch.Tensor]) -> None:
        self.vectors = vectors
        self._parts: dict[tuple[int, int, int], torch.Tensor] = {}

    def part(self, rank: int, start: int, stop: int) -> torch.Tensor:
        """Return elements [start, stop) of a rank's vector."""
        key = rank, start, stop
        part = self._parts.get(key)
        if part is None:
            if len(self._parts) >= MAX_VIEWS:
                self._parts.clear()
            with torch.inference_mode(False):
                part = self._parts[key] = self.vectors[rank][start:stop]
        return part
