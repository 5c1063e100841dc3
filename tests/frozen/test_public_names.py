"""Users find every public name where it was, and call it as before."""

from __future__ import annotations

from difflib import unified_diff

from tests.frozen.public_names import PATH, listed


def test_public_names_are_those_that_are_listed() -> None:
    """`python -m tests.frozen --names` writes the list anew, where a change is meant."""
    held, now = PATH.read_text().splitlines(), listed().splitlines()
    assert not list(unified_diff(held, now, "public_names.txt", "now", lineterm="", n=0))
