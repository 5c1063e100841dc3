"""Packages installed beside ours, such as those that look for PyPI's other `kernels`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from collectives._own_packages import require_ours
from tests.processes.commands import python

ROOT = Path(__file__).parents[2]

TRANSFORMERS = """
import torch, adasum, kernels, transformers
from transformers.utils import is_kernels_available

# It reads the version of whichever distribution has `kernels`.
assert not is_kernels_available()
adasum.init()
sizes = dict(hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2)
model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=31, **sizes))
words = torch.arange(6)[None]
optimizer = adasum.DistributedOptimizer(
    torch.optim.SGD(model.parameters(), lr=0.1),
    named_parameters=model.named_parameters(),
    op=adasum.Adasum,
)
losses = []
for _ in range(3):
    optimizer.zero_grad()
    loss = model(words, labels=words).loss
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[2] < losses[0], losses
"""


def test_package_that_looks_for_kernels_works_with_ours() -> None:
    if importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed: pip install transformers")
    python("-c", TRANSFORMERS, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")


@pytest.mark.parametrize("name", ["kernels", "collectives"])
def test_folder_left_by_uninstalling_the_other_package_is_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    """pip removes the files that both have and leaves the folder."""
    (tmp_path / name).mkdir()
    (tmp_path / name / "_plan.py").touch()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)])
    )
    with pytest.raises(ImportError) as caught:
        require_ours(name)
    assert str(caught.value) == (
        f"adasum's own package `{name}` is missing: "
        "run `pip install --force-reinstall --no-deps .` in adasum's checkout, "
        "or with its wheel for `.`"
    )


OTHERS = {"kernels": "import not_installed_here\n", "collectives": "raise NotImplementedError\n"}


@pytest.mark.parametrize(
    ("name", "overwritten"),
    [
        *(("kernels", False), ("collectives", True)),
        pytest.param("kernels", True, marks=pytest.mark.slow),
        pytest.param("collectives", False, marks=pytest.mark.slow),
    ],
)
def test_other_package_of_our_name_is_refused_with_its_file(
    tmp_path: Path, name: str, overwritten: bool
) -> None:
    """Before ours on sys.path, or installed over it; nothing of it is run."""
    place, ours = tmp_path / name, ROOT
    if overwritten:
        for package in ("adasum", "collectives", "kernels"):
            shutil.copytree(ROOT / package, tmp_path / package)
        ours = tmp_path
    place.mkdir(exist_ok=True)
    (place / "__init__.py").write_text(OTHERS[name])
    code = f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(ours)!r}]; import adasum"
    bare = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=bare,
        check=False,
    )
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"ImportError: `import {name}` finds another distribution's package at")
    assert str(place / "__init__.py") in said
    assert f"`pip uninstall {name}`" in said
