"""Packages installed beside ours, such as those that look for PyPI's other `kernels`."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import pytest

from collectives._kernels_check import require_our_kernels

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

ACCELERATE = """
import torch, adasum, kernels
from accelerate import Accelerator

model = torch.nn.Linear(2, 1)
accelerator = Accelerator(cpu=True)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
before = model.weight.detach().clone()
accelerator.backward(model(torch.ones(1, 2)).sum())
optimizer.step()
torch.testing.assert_close(model.weight, before - 0.1)
"""


@pytest.mark.parametrize("package", ["transformers", "accelerate"])
def test_package_that_looks_for_kernels_works_with_ours(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install {package}")
    done = subprocess.run(
        [sys.executable, "-c", {"transformers": TRANSFORMERS, "accelerate": ACCELERATE}[package]],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_folder_left_by_uninstalling_the_other_kernels_is_reported_as_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """pip removes the files that both have and leaves the folder."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "_plan.py").touch()
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: PathFinder.find_spec(name, [str(tmp_path)])
    )
    with pytest.raises(ImportError) as caught:
        require_our_kernels()
    assert str(caught.value) == (
        "adasum's own package `kernels` is missing: run "
        "`pip install --force-reinstall --no-deps adasum`"
    )
