"""The core of a Horovod PyTorch script, of which only the import is changed."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import adasum as hvd
from tests.processes.harness import run_ranks


def script(rank: int, use_adasum: bool, fp16: bool) -> tuple[list[float], list[float], int]:
    hvd.init()
    torch.manual_seed(42 + rank)

    generator = torch.Generator().manual_seed(7)
    x = torch.randn(128, 8, generator=generator)
    y = (x @ torch.randn(8, 3, generator=generator)).argmax(1)
    data = torch.utils.data.TensorDataset(x, y)
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(data, batch_size=16, sampler=sampler)

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    lr_scaler = hvd.size() if not use_adasum else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * lr_scaler, momentum=0.5)

    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    compression = hvd.Compression.fp16 if fp16 else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if use_adasum else hvd.Average,
        gradient_predivide_factor=1.0,
    )

    losses = []
    for epoch in range(4):
        sampler.set_epoch(epoch)
        total = torch.tensor(0.0)
        for inputs, target in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), target)
            loss.backward()
            optimizer.step()
            total += loss.detach() / len(loader)
        losses.append(hvd.allreduce(total, name="avg_loss").item())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()
    return losses, weights, hvd.local_rank()


@pytest.mark.parametrize(("use_adasum", "fp16"), [(True, False), (False, True)])
def test_horovod_script_with_another_import_trains(use_adasum: bool, fp16: bool) -> None:
    results = run_ranks(2, script, use_adasum, fp16, timeout=90.0)
    for rank, (losses, weights, local_rank) in enumerate(results):
        assert local_rank == rank
        assert losses == results[0][0]
        assert weights == results[0][1]
        assert losses[-1] < 0.8 * losses[0]
