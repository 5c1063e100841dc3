"""Train on digits though ranks die: torchrun restarts them from the last checkpoint.

    torchrun --nproc-per-node 2 --max-restarts 3 examples/resume_digits.py --directory out/resume

The final parameters are those of an undisturbed run, bit for bit. Adasum's delta method leaves
every rank an optimizer state of its own, so each writes its own file; rank 0's has the model too. A
checkpoint counts once the file `latest` names it, which rank 0 replaces atomically after all ranks
have written theirs. Kill a rank, or all of them, at any moment and see.
"""

from __future__ import annotations

import argparse
import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from train_digits import BATCH, Digits, LeNet

import adasum as hvd


class Checkpoints:
    """Checkpoints `directory`/<step>/rank<r>.pt; `latest` names the last complete one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Save a checkpoint, which replaces the last one once it is complete; collective."""
        place = self.directory / str(step)
        place.mkdir(parents=True, exist_ok=True)
        state: dict[str, Any] = {"optimizer": optimizer.state_dict()}
        if hvd.rank() == 0:
            state["model"] = model.state_dict()
        _write(state, place / f"rank{hvd.rank()}.pt")
        hvd.barrier()
        if hvd.rank() == 0:
            _write(step, self.directory / "latest")
            for old in self.directory.glob("[0-9]*"):
                if old.name != str(step):
                    shutil.rmtree(old)

    def load(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Restore the last checkpoint; return its step, 0 where there is none; collective."""
        latest = self.directory / "latest"
        # Rank 0 looks for all, so that they do not start from different steps.
        step = torch.tensor(torch.load(latest) if hvd.rank() == 0 and latest.exists() else 0)
        step = int(hvd.broadcast(step, root_rank=0))
        if step:
            state = torch.load(self.directory / str(step) / f"rank{hvd.rank()}.pt")
            optimizer.load_state_dict(state["optimizer"])
            if hvd.rank() == 0:
                model.load_state_dict(state["model"])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        return step


def _write(value: Any, path: Path) -> None:
    """Write a file atomically: it is on the disk before it has its name."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        torch.save(value, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def train(digits: Digits, directory: Path, *, seed: int, steps: int, every: int) -> nn.Module:
    """Return the model after `steps` steps, some of which an earlier start may have taken."""
    torch.manual_seed(seed)
    model = LeNet()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        named_parameters=model.named_parameters(),
        op=hvd.Adasum,
    )
    checkpoints = Checkpoints(directory)
    for step in range(checkpoints.load(model, optimizer), steps):
        # The batch is a function of the step, so it need not be saved.
        draw = torch.Generator().manual_seed(seed * steps + step)
        batch = torch.randperm(len(digits.labels), generator=draw)[hvd.rank() :: hvd.size()][:BATCH]
        optimizer.zero_grad()
        cross_entropy(model(digits.images[batch]), digits.labels[batch]).backward()
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            checkpoints.save(step + 1, model, optimizer)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--directory", type=Path, required=True, help="of the checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20, help="steps from checkpoint to checkpoint")
    options = parser.parse_args()

    hvd.init()
    digits = Digits.load(torch.device("cpu"))
    model = train(
        digits, options.directory, seed=options.seed, steps=options.steps, every=options.every
    )
    if hvd.rank() == 0:
        with torch.no_grad():
            right = model(digits.test_images).argmax(dim=1) == digits.test_labels
        restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        print(f"{options.steps} steps, {restarts} restarts: accuracy {right.float().mean():.3f}")
    hvd.shutdown()


if __name__ == "__main__":
    main()
