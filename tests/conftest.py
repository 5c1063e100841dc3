"""The order of the test files, and `--emulated`.

Those that start processes and wait for them come first: two workers take files in turn, so what is
long must not come last.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import kernels
from tests.ptx_emulator.driver import emulated

FIRST = ("faults", "packaging", "examples", "network_namespaces", "processes", "bench", "docs")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        folder = item.nodeid.split("/")[1:2]
        return FIRST.index(folder[0]) if folder and folder[0] in FIRST else len(FIRST)

    items.sort(key=place)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--emulated",
        action="store_true",
        help="this process's kernels run what Triton compiles for sm_90, in tests/ptx_emulator",
    )


@pytest.fixture(scope="session", autouse=True)
def _compiled() -> None:
    """Before ranks are started that would each compile, and be timed meanwhile."""
    kernels.cpu_path()
    kernels.calls_recognised_by()


@pytest.fixture(scope="session", autouse=True)
def _all_emulated(request: pytest.FixtureRequest) -> Iterator[None]:
    if not request.config.getoption("emulated"):
        yield
        return
    # Looking for races costs a copy of all memory, and here ranks have windows of 32 MiB.
    with emulated(races=False):
        yield
