"""The all-reduce algorithms by the names of the specification string."""

from __future__ import annotations

from collections.abc import Callable

from ..schedule import Schedule
from . import doubling, halving, ring, tree

ALL_REDUCE: dict[str, Callable[[int], Schedule]] = {
    "xring": ring.all_reduce,
    "rechd": halving.all_reduce,
    "rd": doubling.all_reduce,
    "vhdd": halving.adasum_all_reduce,
}

UNIFORM = frozenset({"rechd", "rd", "vhdd"})
"""Algorithms with one expression tree for the whole buffer and a group for every reduction."""

__all__ = ["ALL_REDUCE", "UNIFORM", "doubling", "halving", "ring", "tree"]
