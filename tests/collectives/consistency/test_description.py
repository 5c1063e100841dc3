"""What ranks are told where they call different things."""

from __future__ import annotations

import pytest
import torch

from collectives.consistency.description import Description, describe_tensor, difference


def call(kind: str, name: str | None, op: str, *numels: int) -> Description:
    tensors = [describe_tensor(torch.empty(numel)) for numel in numels]
    return Description(kind, name, {"op": op}, tensors)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (call("broadcast", "w", "Sum", 3), "rank 0 calls all_reduce(w), rank 2 calls broadcast(w)"),
        (call("all_reduce", None, "Sum", 3), "all_reduce(w), rank 2 calls all_reduce()"),
        (
            call("all_reduce", "w", "Average", 3),
            "rank 0 calls all_reduce(w) with op=Sum, rank 2 calls all_reduce(w) with op=Average",
        ),
        (call("all_reduce", "w", "Sum", 4), "with tensor 0: "),
        (
            call("all_reduce", "w", "Sum", 3, 3),
            "all_reduce(w) with nothing more, rank 2 calls all_reduce(w) with tensor 1: shape (3,)",
        ),
    ],
)
def test_difference_names_the_first_one(other: Description, text: str) -> None:
    mine = call("all_reduce", "w", "Sum", 3)
    said = difference({2: other, 1: mine, 0: mine})
    assert said.startswith("ranks disagree: rank 0 calls all_reduce(w)")
    assert text in said
