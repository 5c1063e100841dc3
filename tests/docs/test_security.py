"""What SECURITY.md says of pickles, ports and files, held against the code that runs.

That the store listens at MASTER_ADDR alone is tested with the rendezvous.
"""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest
import torch

import collectives
from tests.processes.harness import listening, run_ranks

ROOT = Path(__file__).parents[2]
SOURCES = [
    path for name in ("adasum", "collectives", "kernels") for path in (ROOT / name).rglob("*.py")
]
# torch.distributed's, which pickle.
PICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}


def said() -> str:
    """SECURITY.md on one line."""
    return " ".join((ROOT / "SECURITY.md").read_text().split())


def test_nothing_in_the_packages_unpickles() -> None:
    assert "Nothing is unpickled" in said() and len(SOURCES) > 100
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            # The one that imports pickle writes with it, for torch's restricted reader.
            writes = {"pickle"} if path.name == "plain_types.py" else set()
            assert not {"pickle", "dill", "cloudpickle", "marshal"} & {*names} - writes, path
            if isinstance(node, ast.Attribute):
                assert node.attr not in PICKLING, path
                if ast.unparse(node.value) == "pickle":
                    assert node.attr == "Pickler", path
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch.load":
                safely = {k.arg: ast.unparse(k.value) for k in node.keywords}
                assert safely.get("weights_only") == "True", path


def ports(rank: int, transport: str) -> tuple[int, int, list[str]]:
    """Listeners of gloo's with a group, beside the store's, and with a part of it.

    And what shared memory is called.
    """
    store = f"0100007F:{int(os.environ['MASTER_PORT']):04X}"
    group = collectives.init(transport=transport, timeout=30.0)
    whole = listening()
    assert (store in whole) == (rank == 0)
    part = group.split([0, 1])
    assert part is not None
    group.all_reduce(torch.ones(100_000))
    part.all_reduce(torch.ones(100_000))
    both = listening()
    maps = Path("/proc/self/maps").read_text().splitlines()
    names = [line.split(maxsplit=5)[-1].strip() for line in maps if "adasum-" in line]
    collectives.shutdown()
    return len(whole - {store}), len(both - whole), names


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's tables of sockets")
@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_group_that_stands_listens_for_gloo_and_the_store_alone(transport: str) -> None:
    assert "on one TCP port for each process group" in said()
    for whole, part, names in run_ranks(2, ports, transport):
        assert (whole, part) == (1, 1)
        # Shared memory has no name that another process could open.
        assert all(name.startswith("/memfd:adasum-") for name in names)
        assert bool(names) == (transport == "auto")
