"""Launchers other than torchrun, which set other environment variables."""

from __future__ import annotations

import os

# By the variable that holds the number of processes.
_LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}


def refuse_to_stand_alone() -> None:
    """Raise ValueError in one of several processes of such a launcher.

    Each would take itself for the only rank: all would train alone, on the same data, and write the
    same checkpoints, without an error.
    """
    for variable, launcher in _LAUNCHERS.items():
        size = os.environ.get(variable, "")
        if size.isdecimal() and int(size) > 1:
            raise ValueError(
                f"{launcher} started {size} processes (environment variable {variable}), and none "
                "of them would know of the others: start them with torchrun, or set RANK, "
                "WORLD_SIZE, MASTER_ADDR and MASTER_PORT in each (RANK=0 and WORLD_SIZE=1 where "
                "each is meant to be alone)"
            )
