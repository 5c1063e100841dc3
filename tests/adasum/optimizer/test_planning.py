"""The division of parameters into buckets."""

from __future__ import annotations

import torch

from adasum.optimizer.planning import plan_buckets


def _named(*sizes: int, dtype: torch.dtype = torch.float32) -> list[tuple[str, torch.Tensor]]:
    return [(f"p{i}", torch.zeros(n, dtype=dtype)) for i, n in enumerate(sizes)]


def _names(buckets: list[list[tuple[str, torch.Tensor]]]) -> list[list[str]]:
    return [[name for name, _ in bucket] for bucket in buckets]


def test_plan_buckets_by_bytes_goes_in_reverse_order() -> None:
    # 4 bytes an element; a bucket holds 40 bytes: 10 elements, exactly full counts as fitting.
    buckets = plan_buckets(_named(4, 6, 4, 30, 5, 5), memory_size=40 / 2**20)
    assert _names(buckets) == [["p5", "p4"], ["p3"], ["p2", "p1"], ["p0"]]


def test_plan_buckets_of_mixed_dtypes_splits_and_orders_by_completion() -> None:
    named = _named(1, 1, 1, 1)
    named[1] = ("p1", torch.zeros(1, dtype=torch.float64))
    named[3] = ("p3", torch.zeros(1, dtype=torch.float64))
    assert _names(plan_buckets(named)) == [["p3", "p1"], ["p2", "p0"]]


def test_plan_buckets_with_a_number_makes_so_many_buckets() -> None:
    named = _named(1, 1, 1, 1, 1)
    assert _names(plan_buckets(named, 2)) == [["p4", "p3", "p2"], ["p1", "p0"]]
    assert _names(plan_buckets(named, 9)) == [["p4"], ["p3"], ["p2"], ["p1"], ["p0"]]


def test_plan_buckets_with_lists_divides_the_rest_by_size() -> None:
    named = _named(1, 1, 1, 1)
    p = [tensor for _, tensor in named]
    assert _names(plan_buckets(named, [[p[3], p[0]]])) == [["p2", "p1"], ["p3", "p0"]]
    assert _names(plan_buckets(named, [])) == [["p3", "p2", "p1", "p0"]]
