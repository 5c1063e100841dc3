"""Tasks of a Slurm step on two hosts: they meet at the first one, by Slurm's variables alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.network_namespaces.network import LINK, ROOT, Hosts, why_not

JOB = """
    import os, torch, collectives

    group = collectives.init(timeout=60)
    total = group.all_reduce(torch.tensor([float(group.rank)])).item()
    place = f"{group.local_rank} of {group.local_size} on {os.uname().nodename}"
    print(f"rank {group.rank}: {total}, {place} of {group.num_nodes}, {os.environ['MASTER_ADDR']}")
    group.barrier()
    collectives.shutdown()
"""
TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def step(task: int) -> dict[str, str]:
    """What srun tells one of four tasks on two nodes."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "1",
        "SLURM_PROCID": str(task),
        "SLURM_STEP_NUM_TASKS": "4",
        "SLURM_LOCALID": str(task % 2),
        "SLURM_NODEID": str(task // 2),
        "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
        "SLURM_STEP_NODELIST": "10.77.0.[1-2]",
    }


@pytest.mark.slow
def test_tasks_of_a_step_on_two_hosts_reduce_together(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    job = tmp_path / "job.py"
    job.write_text(textwrap.dedent(JOB))
    common = {name: text for name, text in os.environ.items() if name not in TORCHRUNS}
    common |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK}
    with Hosts(2) as hosts:
        tasks = [
            subprocess.Popen(
                hosts.command(task // 2, [sys.executable, str(job)]),
                env={**common, **step(task)},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for task in range(4)
        ]
        try:
            for task, process in enumerate(tasks):
                out, errors = process.communicate(timeout=120)
                assert process.returncode == 0, errors
                place = f"{task % 2} of 2 on host{task // 2} of 2, 10.77.0.1"
                assert out.splitlines()[-1] == f"rank {task}: 6.0, {place}"
        finally:
            for process in tasks:
                process.kill()
                process.wait(10)
