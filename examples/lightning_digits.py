"""Adasum in Lightning, on the handwritten digits.

    python examples/lightning_digits.py --devices 4                          # a GPU each
    torchrun --nproc-per-node 4 examples/lightning_digits.py --devices 4     # or CPU processes

`--op own` leaves the callback out.
"""

from __future__ import annotations

import argparse
import logging

import lightning
import torch
from ddp_digits import add_arguments, report
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from train_digits import BATCH, LEARNING_RATE, OPS, Digits, LeNet, accuracy_on_test

import adasum
from adasum.integrations.lightning import HookCallback


class Task(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = LeNet()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LEARNING_RATE)


def train(op: str, epochs: int, devices: int, digits: Digits) -> lightning.Trainer:
    lightning.seed_everything(0, verbose=False)
    callbacks = [] if op == "own" else [HookCallback(adasum.HookState(op=OPS[op]))]
    trainer = lightning.Trainer(
        strategy="ddp",
        callbacks=callbacks,
        devices=devices,
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    examples = TensorDataset(digits.images, digits.labels)
    trainer.fit(Task(), DataLoader(examples, batch_size=BATCH, shuffle=True))
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2)
    options = add_arguments(parser).parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    digits = Digits.load(torch.device("cpu"))
    for op in options.op:
        trainer = train(op, options.epochs, options.devices, digits)
        net = trainer.lightning_module.net.cpu()
        if trainer.is_global_zero:
            accuracy = accuracy_on_test(net, digits)
            print(report(op, accuracy, list(net.parameters())), flush=True)


if __name__ == "__main__":
    main()
