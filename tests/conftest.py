"""The order of the test files: those that start processes and wait for them first.

Two workers take files in turn, so what is long must not come last.
"""

from __future__ import annotations

import pytest

FIRST = ("faults", "packaging", "examples", "hosts", "multi_rank", "bench", "docs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.nodeid.split("/")[1:2]
        return FIRST.index(folder[0]) if folder and folder[0] in FIRST else len(FIRST)

    items.sort(key=place)
