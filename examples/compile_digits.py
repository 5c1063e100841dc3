"""Adasum with torch.compile, on the handwritten digits.

    torchrun --nproc-per-node 4 examples/compile_digits.py                   # DDP with the hook
    torchrun --nproc-per-node 4 examples/compile_digits.py --by optimizer    # DistributedOptimizer

The model is compiled, the reduction is not: it runs between the compiled graphs of backward.
`--op own` is DDP without the hook. The model has no max-pool: torch 2.13.0, by itself, compiles
zero gradients in front of one on CPUs.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from ddp_digits import add_arguments, own_device, report
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train_digits import BATCH, LEARNING_RATE, OPS, Digits, accuracy_on_test

import adasum


def train(op: str, by: str, epochs: int, digits: Digits, device: torch.device) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=LEARNING_RATE)
    wrapped: nn.Module = net
    if by == "ddp" or op == "own":
        wrapped = DistributedDataParallel(net)
        if op != "own":
            wrapped.register_comm_hook(adasum.HookState(op=OPS[op]), adasum.ddp_hook)
    else:
        optimizer = adasum.DistributedOptimizer(
            optimizer, named_parameters=net.named_parameters(), op=OPS[op]
        )
    # What DDP wraps is compiled around it, so that graphs end where buckets do.
    model = torch.compile(wrapped)
    examples = TensorDataset(digits.images, digits.labels)
    sampler = DistributedSampler(examples)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(examples, batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return net


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--by", choices=["ddp", "optimizer"], default="ddp")
    options = add_arguments(parser).parse_args()
    dist.init_process_group()
    adasum.init()
    device = own_device()
    digits = Digits.load(device)
    for op in options.op:
        net = train(op, options.by, options.epochs, digits, device)
        if dist.get_rank() == 0:
            print(report(op, accuracy_on_test(net, digits), list(net.parameters())), flush=True)
    adasum.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
