"""The backends every kernel test runs on.

`cpu` is the torch path, `triton` the Triton path: on a GPU where there is one. In a process with
TRITON_INTERPRET=1 there is only `interpreter`, the Triton path on CPU tensors;
test_interpreter.py starts that process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels import _launch


@dataclass(frozen=True)
class Backend:
    """device: where inputs go. interpreted: whether the Triton interpreter runs the kernels."""

    device: str
    interpreted: bool


INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


@pytest.fixture(scope="session", autouse=INTERPRETING)
def _integers_of_one_element() -> Iterator[None]:
    """Triton 3.6 takes a scalar's integer from an array of one element, which numpy 2.4 and newer
    refuse; later Tritons do as this does."""
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    whole = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        whole(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "_patch_lang_tensor", patched)
        yield


NAMES = ["interpreter"] if INTERPRETING else ["cpu", "triton"]


@pytest.fixture(params=NAMES)
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    if request.param == "interpreter":
        with _launch.interpreted():
            yield Backend("cpu", True)
    elif request.param == "cpu":
        yield Backend("cpu", False)
    else:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device: the Triton path is run by test_interpreter.py")
        yield Backend("cuda", False)
