"""A transformer over characters, and the windows of a text that it is trained and measured on."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

# Printable ASCII; number 0 stands for every other character.
ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
CONTEXT = 64
# Of ten blocks of so many characters, eight are trained on, and one is for each other part.
BLOCK = 4096
# Evenly spread over the validation or the test part, and the same at every evaluation.
WINDOWS = 256


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
    """Maps characters [batch, length] to logits [batch, length, characters]."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
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
