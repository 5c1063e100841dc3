"""The hook in other frameworks: registered where it reduces, refused where it cannot.

The tests of real frameworks are slow; `make test-recipes` and, on their newest releases,
`make test-newest-frameworks` run them.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import pytest

from tests.adasum import integration_jobs
from tests.processes.harness import run_ranks

NEEDED = {
    "lightning": ("lightning", "pytorch_lightning"),
    "accelerate": ("accelerate",),
    "transformers": ("transformers",),
}


def test_hook_is_registered_once_on_what_wraps_the_model_and_else_is_an_error() -> None:
    run_ranks(2, integration_jobs.check_registration)


@pytest.mark.parametrize("name", NEEDED)
def test_integration_without_its_framework_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    for package in NEEDED[name]:
        for module in [each for each in sys.modules if each.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"adasum.integrations.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"^adasum.integrations.{name} needs .*: pip install "):
        importlib.import_module(f"adasum.integrations.{name}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("package", "check"),
    [
        ("lightning.pytorch", integration_jobs.check_lightning),
        ("pytorch_lightning", integration_jobs.check_lightning),
        ("accelerate", integration_jobs.check_accelerate),
        ("transformers", integration_jobs.check_transformers),
    ],
)
def test_framework_trains_by_adasum_of_what_it_accumulated(package: str, check: Any) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed: make test-recipes does so")
    run_ranks(2, check, package)
