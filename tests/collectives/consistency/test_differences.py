"""What ranks are told where they call different things."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from collectives import CollectiveMismatchError, Group, run_threads
from collectives.call import Call
from collectives.negotiation import difference
from collectives.transport import ThreadWorld

RANKS = ThreadWorld(3).transport(0)


def call(kind: str, name: str | None, op: str, *numels: int) -> Call:
    return Call(kind, name, {"op": op}, [torch.empty(numel) for numel in numels])


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
            "rank 0 calls all_reduce(w) with 1 tensor, rank 2 calls all_reduce(w) with 2 tensors, "
            "among them tensor 1: shape (3,) torch.float32 cpu",
        ),
        (
            call("all_reduce", "w", "Sum"),
            "with 1 tensor, among them tensor 0: shape (3,) torch.float32 cpu, "
            "rank 2 calls all_reduce(w) with 0 tensors",
        ),
        (call("all_reduce", "w", "Max", 3, 3), "with op=Sum, rank 2 calls all_reduce(w) with op="),
    ],
)
def test_difference_names_the_first_one(other: Call, text: str) -> None:
    mine = call("all_reduce", "w", "Sum", 3)
    said = difference({2: other, 1: mine, 0: mine}, RANKS)
    assert said.startswith("ranks disagree: rank 0 calls all_reduce(w)")
    assert text in said


def test_difference_calls_tensors_by_their_names() -> None:
    mine, other = (
        Call(
            "grouped_all_reduce",
            "bucket 0",
            tensors=[torch.empty(numel) for numel in numels],
            names=[f"layer{i}" for i in range(len(numels))],
        )
        for numels in ((2, 3), (2, 4))
    )
    said = difference({0: mine, 1: other}, RANKS)
    assert "with layer1: shape (3,) torch.float32 cpu, rank 1" in said
    assert Call.of_text(mine.text).entries() == mine.entries()


@pytest.mark.parametrize(
    "options",
    [({}, {"names": ["tensor 0"]}), ({"name": ""}, {"name": "''"})],
    ids=["tensor", "call"],
)
def test_calls_that_only_look_alike_are_a_mismatch_and_the_group_stays_usable(
    options: tuple[Any, Any],
) -> None:
    def job(group: Group) -> None:
        with pytest.raises(CollectiveMismatchError, match=r"rank 0 and rank 1 call .* look alike"):
            group.grouped_all_reduce([torch.ones(2)], **options[group.rank])
        group.barrier()

    run_threads(2, job)
