"""bench.gpu and its stages as commands, whose Pythons have the pretended GPU: for every night."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from bench import processes
from bench.gpu import plan
from tests.pretended_gpu import build, pretend, rehearsal
from tests.pretended_gpu.test_rehearsal import rehearse

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
def test_command_of_the_first_day_runs_its_checks_in_processes(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    if build.cupy() is None:
        pytest.skip("pip cannot get cupy's wheel")
    command = [sys.executable, "-m", "bench.gpu", "--only", "check", "--minutes", "12"]
    environment = pretend.environment(counted=True, sizes=rehearsal.SIZES)
    log, out, archive = tmp_path / "log.txt", tmp_path / "out", tmp_path / "all.tar.gz"
    words = [*command, "--out", str(out), "--archive", str(archive)]
    assert processes.run(words, log, 800.0, environment) == 0, log.read_text()
    record = json.loads((out / "stages" / "check.json").read_text())
    assert record["status"] == "ok" and archive.exists()
    said = (out / "stages" / "check" / "log.txt").read_text().partition("checks:\n")[2]
    lines = [line for line in said.splitlines() if line.startswith(("ok ", "FAILED", "left out"))]
    assert len(lines) == 4 and all(line.startswith("ok ") for line in lines), said
    assert lines[-1].startswith("ok       NCCL of cupy")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["pack", "dot_and_norms", "adasum", "gram"])
def test_check_passes_on_compiled_code_behind_the_launcher(name: str, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    parts = {"checks": {"names": [name], "emulated": [name]}}
    status, said = rehearse(tmp_path, parts=parts, seconds=590.0)
    assert status == 0, said[-6000:]


# Autograd asks the accelerator of torch's C part for its devices.
_WITH_AUTOGRAD = "tests/kernels/test_gradients.py::test_gradients_on_every_backend[triton]"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "fewest"), [("tests-others", 140), ("tests-projection", 140), ("tests-reduction", 250)]
)
def test_kernel_tests_of_a_gpu_machine_pass_on_the_pretended_one(
    name: str, fewest: int, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    facts = {"nccl of cupy": 0, "why no nccl of cupy": ""}
    (stage,) = (each for each in plan.stages(facts, None) if each.name == name)
    left = [f"--deselect={_WITH_AUTOGRAD}"]
    words = [word.replace("{out}", str(tmp_path)) for word in stage.command]
    log = tmp_path / "log.txt"
    status = processes.run([*words, *left], log, 800.0, pretend.environment(counted=True))
    said = log.read_text()
    assert status == 0, said[-6000:]
    passed = re.search(r"(\d+) passed", said)
    assert passed is not None and int(passed[1]) >= fewest, said[-1000:]
