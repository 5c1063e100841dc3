"""Adasum in a script written for Hugging Face Accelerate, on the handwritten digits.

    accelerate launch --multi_gpu examples/accelerate_digits.py
    torchrun --nproc-per-node 4 examples/accelerate_digits.py      # on CPUs: ACCELERATE_USE_CPU=1

The hook is registered on the model that `prepare` returns. `--op own` leaves it out.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from ddp_digits import add_arguments, report
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from train_digits import BATCH, LEARNING_RATE, OPS, Digits, LeNet, accuracy_on_test

import adasum
from adasum.integrations.accelerate import register_hook


def train(op: str, epochs: int, digits: Digits, accelerator: Accelerator) -> torch.nn.Module:
    torch.manual_seed(0)
    model = LeNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    examples = TensorDataset(digits.images, digits.labels)
    loader = DataLoader(examples, batch_size=BATCH, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if op != "own":
        register_hook(accelerator, model, adasum.HookState(op=OPS[op]))
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
    return accelerator.unwrap_model(model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = add_arguments(parser).parse_args()
    accelerator = Accelerator()
    digits = Digits.load(accelerator.device)
    for op in options.op:
        net = train(op, options.epochs, digits, accelerator)
        accuracy = accuracy_on_test(net, digits)
        accelerator.print(report(op, accuracy, list(net.parameters())), flush=True)
        accelerator.free_memory()
    accelerator.end_training()


if __name__ == "__main__":
    main()
