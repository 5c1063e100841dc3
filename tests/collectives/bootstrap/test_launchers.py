"""What other launchers than torchrun say becomes torchrun's variables."""

from __future__ import annotations

import os

import pytest

from collectives.bootstrap import launchers

TORCHRUNS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# What each calls rank, size, local rank and local size.
NAMES = {
    "horovodrun": [f"HOROVOD_{each}" for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "mpirun": [f"OMPI_COMM_WORLD_{each}" for each in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")],
    "mpiexec": ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"],
}


def by(launcher: str, rank: int, size: int, local_size: int | None = None) -> dict[str, str]:
    """The variables of a rank on nodes of `local_size`, all ranks' unless given."""
    local_size = local_size or size
    local_rank, node = rank % local_size, rank // local_size
    if launcher != "srun":
        values = (rank, size, local_rank, local_size)
        return dict(zip(NAMES[launcher], map(str, values), strict=True))
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_LOCALID": str(local_rank),
        "SLURM_NODEID": str(node),
        "SLURM_STEP_TASKS_PER_NODE": f"{local_size}(x{size // local_size})",
        "SLURM_STEP_NODELIST": "localhost,n[07-09]",
    }


def translated(monkeypatch: pytest.MonkeyPatch, said: dict[str, str]) -> tuple[int, dict[str, str]]:
    """The number of ranks, and torchrun's variables, in a process with these variables alone."""
    monkeypatch.setattr(os, "environ", dict(said))
    size = launchers.world_size()
    return size, {name: os.environ[name] for name in TORCHRUNS if name in os.environ}


@pytest.mark.parametrize("launcher", [*NAMES, "srun"])
def test_ranks_of_one_host_meet_at_loopback(monkeypatch: pytest.MonkeyPatch, launcher: str) -> None:
    size, found = translated(monkeypatch, by(launcher, 3, 4))
    port = found.pop("MASTER_PORT")
    assert size == 4
    assert list(found.values()) == ["3", "4", "3", "4", "127.0.0.1"]
    assert 10_000 <= int(port) < 29_000
    # Every rank is told the same.
    assert translated(monkeypatch, by(launcher, 0, 4))[1]["MASTER_PORT"] == port


def test_ranks_of_several_hosts_under_srun_meet_at_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = {**by("srun", 3, 4, 2), "SLURM_STEP_NODELIST": "rack1-n[09,11-12]"}
    _, found = translated(monkeypatch, said)
    assert found.pop("MASTER_PORT")
    assert list(found.values()) == ["3", "4", "1", "2", "rack1-n09"]


@pytest.mark.parametrize("launcher", NAMES)
def test_ranks_of_several_hosts_under_mpi_without_an_address_are_refused(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    said = by(launcher, 1, 4, 2)
    with pytest.raises(ValueError, match=rf"MASTER_ADDR is not set, and {launcher}, .* 4 ranks"):
        translated(monkeypatch, said)
    assert "RANK" not in os.environ
    said["MASTER_ADDR"] = "n7"
    with pytest.raises(ValueError, match=r"MASTER_PORT is not set, .*set MASTER_ADDR and MASTER_P"):
        translated(monkeypatch, said)
    said["MASTER_PORT"] = "1234"
    assert [*translated(monkeypatch, said)[1].values()] == ["1", "4", "1", "2", "n7", "1234"]


@pytest.mark.parametrize("launcher", NAMES)
def test_ranks_that_may_be_on_several_hosts_are_refused(
    monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    said = by(launcher, 0, 2)
    del said[NAMES[launcher][3]]
    with pytest.raises(ValueError, match="does not say that all are on one host"):
        translated(monkeypatch, said)


def test_address_that_is_set_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {**by("srun", 0, 2, 1), "MASTER_ADDR": "n9", "MASTER_PORT": "1234"}
    del said["SLURM_STEP_NODELIST"], said["SLURM_JOB_ID"]
    _, found = translated(monkeypatch, said)
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("n9", "1234")


def test_innermost_launcher_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """srun started torchrun, or mpirun's daemons, or asked for PMI."""
    place = {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "n1", "MASTER_PORT": "1"}
    said = {**by("srun", 1, 4), **by("mpiexec", 2, 3), **by("mpirun", 0, 2)}
    assert translated(monkeypatch, {**said, **place}) == (6, place)
    assert translated(monkeypatch, said)[1]["WORLD_SIZE"] == "2"
    assert translated(monkeypatch, {**said, **by("horovodrun", 0, 1)})[0] == 1
    assert translated(monkeypatch, {**by("srun", 1, 4), **by("mpiexec", 2, 3)})[0] == 3
    pmi = {**by("srun", 1, 2, 1), "PMI_RANK": "1", "PMI_SIZE": "2"}
    assert translated(monkeypatch, pmi)[1]["MASTER_ADDR"] == "localhost"


def test_jobs_and_steps_near_each_other_have_ports_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = set()
    for job in range(4700, 4800):
        for step in range(90):
            numbers = {"SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}
            found = translated(monkeypatch, {**by("srun", 0, 2), **numbers})[1]
            ports.add(int(found["MASTER_PORT"]))
    assert len(ports) == 100 * 90
    assert min(ports) >= 10_000
    # torchrun's own, and those that systems give to clients, are above.
    assert max(ports) < 29_400


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID must be an integer .*got '' of '4'"),
        ({"SLURM_PROCID": "4"}, "from 0 to SLURM_STEP_NUM_TASKS - 1, got '4' of '4'"),
        ({"SLURM_STEP_NUM_TASKS": "many"}, "SLURM_STEP_NUM_TASKS - 1, got '0' of 'many'"),
        ({"SLURM_STEP_ID": ""}, "SLURM_STEP_ID must be a number, got '': set MASTER_PORT"),
        ({"SLURM_STEP_NODELIST": "n[1"}, r"SLURM_STEP_NODELIST must .*'n\[1'.*set MASTER_ADDR"),
        ({"MASTER_PORT": "x"}, "MASTER_PORT must be a port from 1 to 65535, got 'x'"),
    ],
)
def test_variables_that_are_wrong_are_named(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        translated(monkeypatch, {**by("srun", 0, 4, 2), **change})


def test_process_outside_a_step_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script of sbatch has all that a task has but the step's numbers."""
    said = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "4711", "SLURM_LOCALID": "0"}
    assert translated(monkeypatch, said) == (1, {})
    assert translated(monkeypatch, by("srun", 0, 1)) == (1, {})
    # What is meant to be alone says so.
    alone = {**by("srun", 3, 4), "RANK": "0", "WORLD_SIZE": "1"}
    assert translated(monkeypatch, alone)[0] == 1


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("a", "a"),
        ("a,b[1-2]", "a"),
        ("a[1-3,7],b", "a1"),
        ("node[08-11]", "node08"),
        ("r[1-2]n[09-10]", "r1n09"),
        ("r[3,1]-n[0-1].site,gpu-2.site", "r3-n0.site"),
        ("a[5]-ib", "a5-ib"),
    ],
)
def test_first_host_of_a_slurm_step_is_read_from_its_list(
    monkeypatch: pytest.MonkeyPatch, hosts: str, first: str
) -> None:
    said = {**by("srun", 0, 4, 2), "SLURM_STEP_NODELIST": hosts}
    assert translated(monkeypatch, said)[1]["MASTER_ADDR"] == first


@pytest.mark.parametrize(
    ("tasks", "node", "local_size"),
    [
        ("4", None, "4"),
        ("4(x3),1", "2", "4"),
        ("4,8", "1", "8"),
        ("4(x3),1", "4", None),
        ("4(x3),1", None, None),
        ("", "0", None),
        ("1(x4)", "0", None),
    ],
)
def test_tasks_of_a_slurm_host_are_its_local_ranks_if_slurm_says_them(
    monkeypatch: pytest.MonkeyPatch, tasks: str, node: str | None, local_size: str | None
) -> None:
    said = {**by("srun", 3, 8, 4), "SLURM_STEP_TASKS_PER_NODE": tasks}
    said.pop("SLURM_NODEID")
    if node is not None:
        said["SLURM_NODEID"] = node
    assert translated(monkeypatch, said)[1].get("LOCAL_WORLD_SIZE") == local_size
