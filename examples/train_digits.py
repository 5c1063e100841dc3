"""Train a small LeNet on scikit-learn's handwritten digits, on any number of ranks.

    python examples/train_digits.py                                       # one rank
    torchrun --nproc-per-node 4 examples/train_digits.py --op adasum      # four
    torchrun --nproc-per-node 2 examples/train_digits.py --epochs 1 --trace out/trace

Every rank has its own share of each epoch's shuffled examples, `BATCH` of them a step, so n ranks
take one n-th of the steps. The learning rate is for one rank whatever the number of ranks.
--trace writes torch.profiler's timeline of each rank, for chrome://tracing or ui.perfetto.dev, with
its reductions by bucket.
`compare_digits.py` runs this file for Sum, Average and Adasum at several numbers of ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import adasum as hvd

OPS = {"sum": hvd.Sum, "average": hvd.Average, "adasum": hvd.Adasum}
# Of the 1797 images; 1408 = 11 * 128, so that up to 16 ranks see every one of them each epoch.
TRAINING_IMAGES = 1408
# Of those, the images that learning rates are tuned on, instead of the test images.
VALIDATION_IMAGES = 256
BATCH = 8
EPOCHS = 8
# Found by `compare_digits.py --tune`: the rate that trains fastest on one rank.
LEARNING_RATE = 2**-2
WARM_UP = 0.1
TARGET = 0.97
# Accuracy is evaluated after so many examples, so equally often at every number of ranks.
EXAMPLES_PER_LOOK = 128


class LeNet(nn.Sequential):
    """Two convolutions and two linear layers, 6,058 parameters, for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(16 * 2 * 2, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


@dataclass
class Digits:
    """Images [n, 1, 8, 8], float32 in 0..1, and labels [n], int64; the split never changes."""

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @classmethod
    def load(cls, device: torch.device) -> Digits:
        digits = load_digits()
        order = torch.randperm(len(digits.target), generator=torch.Generator().manual_seed(0))
        images = torch.tensor(digits.images, dtype=torch.float32)[order].unsqueeze(1) / 16
        labels = torch.tensor(digits.target, dtype=torch.int64)[order]
        images, labels = images.to(device), labels.to(device)
        n = TRAINING_IMAGES
        return cls(images[:n], labels[:n], images[n:], labels[n:])

    def for_tuning(self) -> Digits:
        """Return the training images, VALIDATION_IMAGES of them in place of the test images."""
        n = len(self.labels) - VALIDATION_IMAGES
        return Digits(self.images[:n], self.labels[:n], self.images[n:], self.labels[n:])


@dataclass
class Run:
    """One training, with the accuracy on the test images (0..1) at each evaluation."""

    op: str
    ranks: int
    seed: int
    learning_rate: float
    steps: int
    looks: list[tuple[int, float]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def accuracy(self) -> float:
        return self.looks[-1][1]

    @property
    def steps_to_target(self) -> int | None:
        """Return the first evaluation that reached TARGET; None if none did."""
        return next((step for step, accuracy in self.looks if accuracy >= TARGET), None)


def schedule(step: int, steps: int) -> float:
    """Return the factor on the learning rate: linearly up from zero, then down to zero."""
    warm = WARM_UP * steps
    return min((step + 1) / warm, (steps - step) / (steps - warm))


def train(
    digits: Digits,
    op: str,
    seed: int,
    *,
    epochs: int = EPOCHS,
    learning_rate: float = LEARNING_RATE,
    momentum: float = 0.0,
    model: LeNet | None = None,
) -> Run:
    """Train on all ranks; return the steps on every rank, the accuracies on rank 0 alone.

    Ranks that are threads share torch's generator: seed it and make their models before.
    """
    started = time.perf_counter()
    rank, size = hvd.rank(), hvd.size()
    if model is None:
        torch.manual_seed(seed)
        model = LeNet()
    model = model.to(digits.images.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), op=OPS[op]
    )

    steps_an_epoch = len(digits.labels) // (size * BATCH)
    run = Run(op, size, seed, learning_rate, epochs * steps_an_epoch)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule(step, run.steps))
    looks_every = max(1, EXAMPLES_PER_LOOK // (size * BATCH))
    shuffle = torch.Generator().manual_seed(seed + 1000)
    step = 0
    for _ in range(epochs):
        mine = torch.randperm(len(digits.labels), generator=shuffle)[rank::size]
        for batch in mine[: steps_an_epoch * BATCH].split(BATCH):
            optimizer.zero_grad()
            cross_entropy(model(digits.images[batch]), digits.labels[batch]).backward()
            optimizer.step()
            rates.step()
            step += 1
            if rank == 0 and (step % looks_every == 0 or step == run.steps):
                run.looks.append((step, accuracy_on_test(model, digits)))
    run.seconds = time.perf_counter() - started
    return run


@torch.no_grad()
def accuracy_on_test(model: nn.Module, digits: Digits) -> float:
    answers = model(digits.test_images).argmax(dim=1)
    return (answers == digits.test_labels).float().mean().item()


def local_device() -> torch.device:
    """Return a GPU of its own for each rank of this host, or the CPU for all of them."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= hvd.local_size():
        torch.cuda.set_device(hvd.local_rank())
        return torch.device("cuda", hvd.local_rank())
    return torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--op", nargs="+", choices=OPS, default=["adasum"])
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--learning-rate", type=float, default=LEARNING_RATE)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--json", type=Path, help="write the runs there")
    parser.add_argument("--trace", type=Path, help="write PATH.rank<r>.json, a timeline")
    options = parser.parse_args()

    hvd.init()
    digits = Digits.load(local_device())
    if options.trace:
        options.trace.parent.mkdir(parents=True, exist_ok=True)
        hvd.start_timeline(f"{options.trace}.rank{{rank}}.json")
    runs = []
    for op in options.op:
        for seed in options.seed:
            run = train(
                digits,
                op,
                seed,
                epochs=options.epochs,
                learning_rate=options.learning_rate,
                momentum=options.momentum,
            )
            if hvd.rank() == 0:
                runs.append(run)
                reached = run.steps_to_target
                when = f"at step {reached}" if reached else "not reached"
                print(
                    f"{run.ranks} ranks, {op:7}, seed {seed}: accuracy {run.accuracy:.3f}, "
                    f"{TARGET:.0%} {when} of {run.steps} ({run.seconds:.1f} s)",
                    flush=True,
                )
    hvd.stop_timeline()
    if options.json and hvd.rank() == 0:
        options.json.write_text(json.dumps([asdict(run) for run in runs]))
    hvd.shutdown()


if __name__ == "__main__":
    main()
