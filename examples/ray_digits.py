"""Adasum in Ray Train's TorchTrainer, on the handwritten digits.

    python examples/ray_digits.py --workers 4

Ray starts the workers and torch.distributed in each; `prepare_model` wraps the model in
DistributedDataParallel, which takes the hook. `--op own` leaves it out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ddp_digits import add_arguments, report
from ray import train
from ray.train.torch import TorchTrainer, prepare_data_loader, prepare_model
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train_digits import BATCH, LEARNING_RATE, OPS, Digits, LeNet, accuracy_on_test

import adasum


def work(config: dict[str, Any]) -> None:
    """Train on one worker; the first one hands the model back."""
    digits = Digits.load(torch.device("cpu"))
    examples = TensorDataset(digits.images, digits.labels)
    torch.manual_seed(0)
    model = prepare_model(LeNet())
    # With a single worker it is not wrapped.
    if config["op"] != "own" and isinstance(model, DistributedDataParallel):
        model.register_comm_hook(adasum.HookState(op=OPS[config["op"]]), adasum.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    loader = prepare_data_loader(DataLoader(examples, batch_size=BATCH, shuffle=True))
    for epoch in range(config["epochs"]):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for images, labels in loader:
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = None
        if train.get_context().get_world_rank() == 0:
            torch.save(getattr(model, "module", model).state_dict(), Path(folder, "model.pt"))
            checkpoint = train.Checkpoint.from_directory(folder)
        train.report({}, checkpoint=checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    options = add_arguments(parser).parse_args()
    digits = Digits.load(torch.device("cpu"))
    ray.init(include_dashboard=False, log_to_driver=False)
    scaling = train.ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available())
    for op in options.op:
        with tempfile.TemporaryDirectory() as out:
            trainer = TorchTrainer(
                work,
                train_loop_config={"op": op, "epochs": options.epochs},
                scaling_config=scaling,
                run_config=train.RunConfig(name=op, storage_path=out),
            )
            net = LeNet()
            with trainer.fit().checkpoint.as_directory() as folder:
                net.load_state_dict(torch.load(Path(folder, "model.pt"), map_location="cpu"))
        print(report(op, accuracy_on_test(net, digits), list(net.parameters())), flush=True)
    ray.shutdown()


if __name__ == "__main__":
    main()
