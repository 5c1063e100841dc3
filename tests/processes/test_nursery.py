"""The nursery's requests, without ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.processes.nursery import own_variables


class _Losing(dict[str, str]):
    """A mapping from which another thread takes a name once the names have been listed."""

    def __iter__(self) -> Iterator[str]:
        names = [*super().__iter__()]
        self.pop("GOES", None)
        return iter(names)


def test_variable_that_another_thread_deletes_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", _Losing(STAYS="1", GOES="2"))
    assert own_variables() == {"STAYS": "1"}
