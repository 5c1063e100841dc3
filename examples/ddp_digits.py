"""Adasum in torch's DistributedDataParallel, on the handwritten digits.

    torchrun --nproc-per-node 4 examples/ddp_digits.py

A script that trains with DDP needs two more lines: the import and `register_comm_hook`.
`--op own` leaves the second out.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train_digits import BATCH, LEARNING_RATE, OPS, Digits, LeNet, accuracy_on_test

import adasum


def train(op: str, epochs: int, digits: Digits, device: torch.device) -> LeNet:
    torch.manual_seed(0)
    net = LeNet().to(device)
    model = DistributedDataParallel(net)
    if op != "own":
        model.register_comm_hook(adasum.HookState(op=OPS[op]), adasum.ddp_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    examples = TensorDataset(digits.images, digits.labels)
    sampler = DistributedSampler(examples)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(examples, batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return net


def report(op: str, accuracy: float, parameters: list[torch.Tensor]) -> str:
    """Return the line that each of these scripts prints; the norm tells trainings apart."""
    norm = torch.cat([p.detach().double().reshape(-1) for p in parameters]).norm().item()
    return f"{op}: test accuracy {accuracy:.3f}, norm of the parameters {norm:.9f}"


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    parser.add_argument("--op", nargs="+", choices=[*OPS, "own"], default=["adasum"])
    parser.add_argument("--epochs", type=int, default=4)
    return parser


def own_device() -> torch.device:
    """Return a GPU of its own for each rank of this host, or the CPU for all of them."""
    local_rank = dist.get_node_local_rank()
    if torch.cuda.device_count() > local_rank:
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    return torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options = add_arguments(parser).parse_args()
    dist.init_process_group()
    device = own_device()
    digits = Digits.load(device)
    for op in options.op:
        net = train(op, options.epochs, digits, device)
        if dist.get_rank() == 0:
            print(report(op, accuracy_on_test(net, digits), list(net.parameters())), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
