"""What started this process among others is not taken for a process alone."""

from __future__ import annotations

import pytest

import collectives

LAUNCHERS = {
    "HOROVOD_SIZE": "horovodrun",
    "OMPI_COMM_WORLD_SIZE": "mpirun",
    "PMI_SIZE": "mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*LAUNCHERS, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def alone() -> bool:
    try:
        return collectives.init().size == 1
    finally:
        collectives.shutdown()


@pytest.mark.parametrize(("variable", "launcher"), LAUNCHERS.items())
def test_ranks_of_another_launcher_do_not_train_each_alone(
    monkeypatch: pytest.MonkeyPatch, variable: str, launcher: str
) -> None:
    monkeypatch.setenv(variable, "4")
    with pytest.raises(ValueError, match=rf"{launcher} started 4 .*{variable}.*torchrun"):
        alone()
    assert not collectives.is_initialized()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert alone()


@pytest.mark.parametrize("variable", LAUNCHERS)
@pytest.mark.parametrize("size", ["1", "", "many"])
def test_one_process_of_another_launcher_is_alone(
    monkeypatch: pytest.MonkeyPatch, variable: str, size: str
) -> None:
    monkeypatch.setenv(variable, size)
    assert alone()
