"""Adasum in Hugging Face's Trainer: a tiny vision transformer on the handwritten digits.

    torchrun --nproc-per-node 4 examples/transformers_digits.py

A callback registers the hook when training begins. `--op own` leaves it out.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from ddp_digits import add_arguments, report
from torch import Tensor
from torch.utils.data import Dataset
from train_digits import BATCH, OPS, Digits
from transformers import (
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import adasum
from adasum.integrations.transformers import HookCallback


class Examples(Dataset):
    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"pixel_values": self.images[index], "labels": self.labels[index]}


def make_model() -> ViTForImageClassification:
    """Return a transformer over patches of 2 by 2, about 20,000 parameters."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    patches = {"image_size": 8, "patch_size": 2, "num_channels": 1}
    config = ViTConfig(**sizes, **patches, num_attention_heads=2, num_labels=10)
    return ViTForImageClassification(config)


def train(op: str, epochs: int, digits: Digits, out: str) -> Trainer:
    arguments = TrainingArguments(
        out,
        num_train_epochs=epochs,
        per_device_train_batch_size=BATCH,
        learning_rate=2**-8,
        lr_scheduler_type="constant",
        use_cpu=not torch.cuda.is_available(),
        seed=0,
        disable_tqdm=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )
    examples = Examples(digits.images, digits.labels)
    trainer = Trainer(make_model(), arguments, train_dataset=examples)
    if op != "own":
        trainer.add_callback(HookCallback(trainer, adasum.HookState(op=OPS[op])))
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = add_arguments(parser).parse_args()
    digits = Digits.load(torch.device("cpu"))
    for op in options.op:
        with tempfile.TemporaryDirectory() as out:
            trainer = train(op, options.epochs, digits, out)
        if trainer.is_world_process_zero():
            model = trainer.model.cpu().eval()
            with torch.inference_mode():
                found = model(digits.test_images).logits.argmax(1)
            accuracy = (found == digits.test_labels).double().mean().item()
            print(report(op, accuracy, list(model.parameters())), flush=True)


if __name__ == "__main__":
    main()
