"""Adasum over the replicas of a model that FSDP2 shards, on the handwritten digits.

    torchrun --nproc-per-node 4 examples/fsdp2_digits.py --shards 2

The mesh is (replicate, shard): FSDP averages over the shards of a replica, then Adasum runs over
the replicas. `--op own` is FSDP's own average over all ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from ddp_digits import add_arguments, own_device, report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train_digits import BATCH, LEARNING_RATE, OPS, Digits, LeNet, accuracy_on_test

import adasum


def train(op: str, epochs: int, shards: int, digits: Digits, device: torch.device) -> LeNet:
    replicas = dist.get_world_size() // shards
    names = ("replicate", "shard")
    mesh = init_device_mesh(device.type, (replicas, shards), mesh_dim_names=names)
    # The same seed on every rank, because nothing copies parameters between replicas.
    torch.manual_seed(0)
    model = LeNet().to(device)
    inner = mesh if op == "own" else mesh["shard"]
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=inner)
    fully_shard(model, mesh=inner)
    if op != "own":
        replicate = mesh.get_group("replicate")
        state = adasum.HookState(op=OPS[op], process_group=replicate)
        adasum.register_fsdp_hook(model, state)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    examples = TensorDataset(digits.images, digits.labels)
    sampler = DistributedSampler(examples)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(examples, batch_size=BATCH, sampler=sampler):
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shards", type=int, default=2)
    options = add_arguments(parser).parse_args()
    dist.init_process_group()
    if dist.get_world_size() % options.shards:
        parser.error(f"{dist.get_world_size()} ranks are no multiple of --shards {options.shards}")
    device = own_device()
    digits = Digits.load(device)
    for op in options.op:
        model = train(op, options.epochs, options.shards, digits, device)
        # On all ranks, because each holds a part of every parameter.
        accuracy = accuracy_on_test(model, digits)
        parameters = [parameter.full_tensor() for parameter in model.parameters()]
        if dist.get_rank() == 0:
            print(report(op, accuracy, parameters), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
