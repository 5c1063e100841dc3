"""Users find every public name where it was, and call it as before."""

from __future__ import annotations

from difflib import unified_diff
from typing import Protocol, TypedDict

import pytest
from typing_extensions import Unpack

from tests.frozen.public_names import MODULES, PATH, listed, parameters


def test_public_names_are_those_that_are_listed() -> None:
    """`python -m tests.frozen --names` writes the list anew, where a change is meant."""
    held, now = PATH.read_text().splitlines(), listed().splitlines()
    assert not list(unified_diff(held, now, "public_names.txt", "now", lineterm="", n=0))


@pytest.mark.parametrize("module", MODULES)
def test_every_module_is_listed(module: str) -> None:
    assert f"\n{module}." in "\n" + listed()


class Options(TypedDict, total=False):
    later: int
    early: int


class Methods(Protocol):
    def packed(self, a: int, *, b: int = 2, **options: Unpack[Options]) -> None: ...
    def alone(self, **options: Unpack[Options]) -> None: ...
    def any(self, *args: int, c: object = 1.5, **options: int) -> None: ...


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("packed", "(self, a, *, b=2, early=..., later=...)"),
        ("alone", "(self, *, early=..., later=...)"),
        ("any", "(self, *args, c=1.5, **options)"),
    ],
)
def test_parameters_are_shown_as_callers_give_them(name: str, shown: str) -> None:
    assert parameters(getattr(Methods, name)) == shown
