"""Training runs of the demo's ranks: a small LeNet on scikit-learn's handwritten digits."""

from __future__ import annotations

import hashlib
import os
import signal
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import adasum as hvd

# 1408 = 11 * 128 of the 1797 images are for training.
TRAINING_IMAGES, BATCH, LEAVES = 1408, 8, 8
WARM_UP = 0.1


class Digits:
    """Images [n, 1, 8, 8], float32 in 0..1, and labels [n], int64; the split never changes."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        labels = torch.tensor(digits.target, dtype=torch.int64)[order]
        n = TRAINING_IMAGES
        self.images, self.labels = images[:n], labels[:n]
        self.test_images, self.test_labels = images[n:], labels[n:]

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        """Return the mean loss on these training images."""
        return cross_entropy(model(self.images[batch]), self.labels[batch])

    @torch.no_grad()
    def accuracy(self, model: nn.Module) -> float:
        """Return the model's accuracy on the test images."""
        found = model(self.test_images).argmax(dim=1) == self.test_labels
        return found.float().mean().item()


def lenet(seed: int) -> nn.Sequential:
    """Return a LeNet of 6,058 parameters, the same for the same seed."""
    torch.manual_seed(seed)
    first = (nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2))
    second = (nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*first, *second, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def hash_of(model: nn.Module) -> str:
    """Return a hash of all bits of the parameters."""
    content = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    return hashlib.sha256(content).hexdigest()[:12]


def bits(digits: Digits, steps: int) -> tuple[str, str]:
    """Train with LEAVES micro-batches per step; return hashes for adasum and DDP over gloo."""
    hvd.init()
    passes, shuffle = LEAVES // hvd.size(), torch.Generator().manual_seed(1)
    batches = [torch.randperm(TRAINING_IMAGES, generator=shuffle)[:64] for _ in range(steps)]
    ours = lenet(0)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(ours.parameters(), lr=0.2),
        ours.named_parameters(),
        backward_passes_per_step=passes,
        order="tree",
    )
    for batch in batches:
        optimizer.zero_grad()
        for leaf in batch.view(LEAVES, BATCH)[hvd.rank() * passes :][:passes]:
            digits.loss(ours, leaf).backward()
        optimizer.step()
    rank = hvd.rank()
    hvd.shutdown()
    dist.init_process_group("gloo")
    theirs = DistributedDataParallel(lenet(0))
    plain = torch.optim.SGD(theirs.parameters(), lr=0.2)
    for batch in batches:
        plain.zero_grad()
        for number, leaf in enumerate(batch.view(LEAVES, BATCH)[rank * passes :][:passes], 1):
            with nullcontext() if number == passes else theirs.no_sync():
                (digits.loss(theirs, leaf) / passes).backward()
        plain.step()
    dist.destroy_process_group()
    return hash_of(ours), hash_of(theirs.module)


def lost(digits: Digits, timeout: float, stopped: int, at: int) -> str:
    """Train until rank `stopped` stops itself at step `at`; return this rank's error."""
    hvd.init(timeout=timeout)
    model = lenet(0)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.2), model.named_parameters()
    )
    try:
        for step in range(10 * at):
            optimizer.zero_grad()
            digits.loss(model, torch.arange(BATCH)).backward()
            if (hvd.rank(), step) == (stopped, at):
                os.kill(os.getpid(), signal.SIGSTOP)
            optimizer.step()
    except hvd.CollectiveError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def curve(digits: Digits, op: str, rate: float, epochs: int) -> list[float]:
    """Train with a peak learning rate; return the test accuracy after each quarter of an epoch."""
    hvd.init()
    model = lenet(0)
    optimizer: Any = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=rate), model.named_parameters(), op=getattr(hvd, op)
    )
    an_epoch = TRAINING_IMAGES // (hvd.size() * BATCH)
    steps, shuffle = epochs * an_epoch, torch.Generator().manual_seed(1000)
    warm = WARM_UP * steps
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (steps - step) / (steps - warm))
    )
    seen = [digits.accuracy(model)]
    looks = {round(look * steps / (4 * epochs)) for look in range(1, 4 * epochs + 1)}
    for step in range(steps):
        if step % an_epoch == 0:
            mine = torch.randperm(TRAINING_IMAGES, generator=shuffle)[hvd.rank() :: hvd.size()]
        optimizer.zero_grad()
        digits.loss(model, mine[step % an_epoch * BATCH :][:BATCH]).backward()
        optimizer.step()
        rates.step()
        if hvd.rank() == 0 and step + 1 in looks:
            seen.append(digits.accuracy(model))
    hvd.shutdown()
    return seen
