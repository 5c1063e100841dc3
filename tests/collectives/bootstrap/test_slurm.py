"""What srun says about a step, read."""

from __future__ import annotations

import itertools
import os

import pytest

from collectives.bootstrap import slurm


@pytest.mark.parametrize(
    ("hosts", "expanded"),
    [
        ("a", "a"),
        ("a,b", "a b"),
        ("a[1-3,7],b", "a1 a2 a3 a7 b"),
        ("node[08-11]", "node08 node09 node10 node11"),
        ("n[098-101,7]", "n098 n099 n100 n101 n7"),
        ("r[1-2]n[09-10]", "r1n09 r1n10 r2n09 r2n10"),
        ("r[1,3]-n[0-1].site,gpu-2.site", "r1-n0.site r1-n1.site r3-n0.site r3-n1.site gpu-2.site"),
        ("a[5]-ib", "a5-ib"),
        ("a[1-2][3-4]", "a13 a14 a23 a24"),
    ],
)
def test_list_of_hosts_is_expanded(hosts: str, expanded: str) -> None:
    assert " ".join(slurm.expand(hosts)) == expanded


def test_first_of_many_hosts_costs_no_expansion_of_all() -> None:
    hosts = slurm.expand("a[000000000-999999999]b[0-999999999],c")
    assert [*itertools.islice(hosts, 2)] == ["a000000000b0", "a000000000b1"]


@pytest.mark.parametrize(
    "hosts", ["", ",", "a,", "a[1-3", "a1]", "a[]", "a[3-1]", "a[x]", "a[1-]", "a[1-2-3]", "a[[1]]"]
)
def test_first_host_of_no_list_is_an_error_that_names_the_variable(
    monkeypatch: pytest.MonkeyPatch, hosts: str
) -> None:
    monkeypatch.setenv("SLURM_STEP_NODELIST", hosts)
    with pytest.raises(ValueError, match=r"SLURM_STEP_NODELIST .*: set MASTER_ADDR"):
        slurm.first_host()


@pytest.mark.parametrize(
    ("tasks", "node", "count"),
    [
        ("4", None, 4),
        ("2(x3),1", "0", 2),
        ("2(x3),1", "2", 2),
        ("2(x3),1", "3", 1),
        ("2(x3),1", "4", None),
        ("2(x3),1", None, None),
        ("", "0", None),
        ("2(3)", "0", None),
        (None, "0", None),
    ],
)
def test_tasks_of_a_host_are_counted_where_slurm_says_them(
    monkeypatch: pytest.MonkeyPatch, tasks: str | None, node: str | None, count: int | None
) -> None:
    said = {"SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    monkeypatch.setattr(os, "environ", {k: v for k, v in said.items() if v is not None})
    assert slurm.local_size() == count
