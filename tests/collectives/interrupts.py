"""An exception at each place at which CPython runs a signal's handler, one after the other.

That is where a function begins and where a call of one in C returns: what sys.setprofile calls
"call" and "c_return". Loops that go back have such calls in them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt(KeyboardInterrupt):
    """What is raised, as of a signal's handler."""


def run_interrupted(function: Callable[[], Any], at: int) -> int:
    """Run `function` in this thread, with an Interrupt at the `at`th place below it, from 0.

    Beyond the last place, and for -1, nothing is raised. Returns how many places there were.
    """
    passed = 0

    def look(frame: FrameType, event: str, argument: object) -> None:
        nonlocal passed
        if event in ("call", "c_return") and frame.f_code.co_filename != __file__:
            passed += 1
            if passed == at + 1:
                # An exception ends the profile.
                raise Interrupt

    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(None)
    return passed
