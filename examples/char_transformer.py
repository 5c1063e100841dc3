"""A character-level transformer and its text, the language reference that ships with Python.

The text is `pydoc_data.topics`, what `help("topics")` shows: every paragraph once, topics in the
order of their names. It grows with each version of Python, so results name its size and SHA-256.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional

# Printable ASCII; number 0 stands for every other character.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 64
# Of ten blocks of so many characters, eight are trained on, one is for tuning the learning rate.
BLOCK = 4096
# Evenly spread over the tuning or the test text, and the same at every evaluation.
WINDOWS = 256


@dataclass(frozen=True)
class Text:
    """The parts of the text, as int64 numbers of characters, [n] each."""

    training: Tensor
    tuning: Tensor
    test: Tensor
    characters: int
    sha256: str

    @classmethod
    def load(cls) -> Text:
        paragraphs: dict[str, None] = {}
        for name in sorted(topics):
            # Topics quote each other: a paragraph of the test text must not be trained on.
            paragraphs.update(dict.fromkeys(p.rstrip() for p in topics[name].split("\n\n")))
        text = "\n\n".join(paragraphs)
        numbers = {character: i for i, character in enumerate(ALPHABET, start=1)}
        blocks = torch.tensor([numbers.get(character, 0) for character in text]).split(BLOCK)
        return cls(
            torch.cat([block for i, block in enumerate(blocks) if i % 10 < 8]),
            torch.cat(blocks[8::10]),
            torch.cat(blocks[9::10]),
            len(text),
            hashlib.sha256(text.encode()).hexdigest(),
        )


def batches(training: Tensor, count: int, batch: int, seed: int) -> Tensor:
    """Return [count, batch, CONTEXT + 1] windows at random positions; the same for one seed."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(training) - CONTEXT, (count, batch, 1), generator=generator)
    return training[starts + torch.arange(CONTEXT + 1)]


class Block(nn.Module):
    """Causal attention, then two linear layers, each after a layer norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Maps characters [batch, length] to logits [batch, length, characters]; 69,000 weights."""

    def __init__(self, width: int = 48, layers: int = 2, heads: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(len(ALPHABET) + 1, width)
        self.position = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, len(ALPHABET) + 1)

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.position[: characters.shape[1]]
        return self.head(self.norm(self.blocks(x)))


def loss(model: nn.Module, windows: Tensor) -> Tensor:
    """Return the mean cross entropy of the next character in nats; windows are [batch, length]."""
    logits = model(windows[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())


@torch.no_grad()
def held_out_loss(model: nn.Module, text: Tensor) -> float:
    """Return the loss on WINDOWS windows of the text."""
    starts = torch.linspace(0, len(text) - CONTEXT - 1, WINDOWS).long()
    return loss(model, text[starts[:, None] + torch.arange(CONTEXT + 1)]).item()
