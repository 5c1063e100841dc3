"""What is trained: model, data in three parts, and how many batches of how many examples.

A training sees the same batches at any number of ranks: rank r of n takes batch n * s + r in step
s. So n ranks make one n-th of the steps, and the numbers of batches divide by all of RANKS.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from train_digits import VALIDATION_IMAGES, Digits, LeNet

from evidence import characters, data
from evidence.models import EfficientNetLite0, ResNet, accuracy

RANKS = (2, 3, 4, 6, 8, 16, 32)
VALIDATION, TEST = 1, 2
LossOf = Callable[[nn.Module, int], Tensor]


@dataclass(frozen=True)
class Task:
    """A task, and what of the protocol depends on it.

    Attributes:
        label: For tables and plots.
        family: "sgd" or "adamw": which rates and methods it has.
        batches: Of all ranks together, each of `batch` examples.
        looks: How often the validation part is looked at.
        seeds: Of the final trainings.
        ranks: Of the final trainings.
        score: "accuracy", 0..1, or "loss" in nats.
        chance: Score and loss of guessing, which a training that diverges has.
        make_model: Takes nothing; torch's generator is seeded before.
        losses: Takes a seed and returns loss_of(model, batch).
        evaluate: Takes a model and VALIDATION or TEST; returns (score, loss).
    """

    label: str
    family: str
    batches: int
    batch: int
    looks: int
    seeds: tuple[int, ...]
    ranks: tuple[int, ...]
    score: str
    chance: tuple[float, float]
    make_model: Callable[[], nn.Module]
    losses: Callable[[int], LossOf]
    evaluate: Callable[[nn.Module, int], tuple[float, float]]

    def better(self, score: float) -> float:
        """Return the score so that larger is better."""
        return score if self.score == "accuracy" else -score


TEN = tuple(range(10))


def digits() -> Task:
    all_ = Digits.load(torch.device("cpu"))
    ours = len(all_.labels) - VALIDATION_IMAGES
    parts = data.Parts(
        (all_.images[:ours], all_.labels[:ours]),
        (all_.images[ours:], all_.labels[ours:]),
        (all_.test_images, all_.test_labels),
    )
    return _images("digits", LeNet, parts, 8, epochs=8, looks=16, ranks=RANKS)


def fashion() -> Task:
    parts = data.fashion(3584, 512, 2048)
    return _images("Fashion-MNIST", ResNet, parts, 16, epochs=3, looks=5, ranks=RANKS)


def finetune() -> Task:
    parts = data.fashion(768, 256, 1024)

    def make_model() -> nn.Module:
        return EfficientNetLite0(data.efficientnet_weights())

    return _images("fine-tuning", make_model, parts, 8, epochs=2, looks=2, ranks=(8,))


def text() -> Task:
    numbers = {character: i for i, character in enumerate(characters.ALPHABET, start=1)}
    text_ = torch.tensor([numbers.get(character, 0) for character in data.shakespeare()])
    blocks = text_.split(characters.BLOCK)
    training = torch.cat([block for i, block in enumerate(blocks) if i % 10 < 8])
    held = {VALIDATION: torch.cat(blocks[8::10]), TEST: torch.cat(blocks[9::10])}
    batches, batch = 576, 4

    def losses(seed: int) -> LossOf:
        windows = characters.batches(training, batches, batch, seed)
        return lambda model, i: characters.loss(model, windows[i])

    def evaluate(model: nn.Module, part: int) -> tuple[float, float]:
        loss = characters.held_out_loss(model, held[part])
        return loss, loss

    guess = math.log(len(characters.ALPHABET) + 1)
    return Task(
        "Shakespeare",
        "adamw",
        batches,
        batch,
        4,
        TEN,
        RANKS,
        "loss",
        (guess, guess),
        lambda: characters.Transformer(128, 5, 4),
        losses,
        evaluate,
    )


def _images(
    label: str,
    make_model: Callable[[], nn.Module],
    parts: data.Parts,
    batch: int,
    *,
    epochs: int,
    looks: int,
    ranks: tuple[int, ...],
) -> Task:
    images, labels = parts.training
    held = {VALIDATION: parts.validation, TEST: parts.test}

    def losses(seed: int) -> LossOf:
        shuffle = torch.Generator().manual_seed(seed + 1000)
        orders = [torch.randperm(len(labels), generator=shuffle) for _ in range(epochs)]
        chosen = torch.cat(orders).view(-1, batch)
        return lambda model, i: cross_entropy(model(images[chosen[i]]), labels[chosen[i]])

    @torch.no_grad()
    def evaluate(model: nn.Module, part: int) -> tuple[float, float]:
        cuts = zip(*(tensor.split(512) for tensor in held[part]), strict=True)
        losses = [cross_entropy(model(x), y, reduction="sum").item() for x, y in cuts]
        return accuracy(model, *held[part]), sum(losses) / len(held[part][1])

    return Task(
        label,
        "sgd",
        epochs * len(labels) // batch,
        batch,
        looks,
        TEN,
        ranks,
        "accuracy",
        (0.1, math.log(10)),
        make_model,
        losses,
        evaluate,
    )


TASKS: dict[str, Callable[[], Task]] = {
    "digits": lru_cache(digits),
    "fashion": lru_cache(fashion),
    "text": lru_cache(text),
    "finetune": lru_cache(finetune),
}
