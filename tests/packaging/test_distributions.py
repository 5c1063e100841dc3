"""The wheel and the sdist: their contents, and tests that run on the installed wheel."""

from __future__ import annotations

import email
import platform
import re
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import kernels
from tests.processes.commands import ROOT, printed, python

PACKAGES = ("adasum", "collectives", "kernels")
# What the sdist has beside the packages.
TREE = ("bench", "docs", "examples", "tests")
LIBRARY = "kernels/cpu/libnative.so"
HAS_C = platform.system() == "Linux" and platform.machine() in ("x86_64", "aarch64")
needs_c = pytest.mark.skipif(
    not (HAS_C and shutil.which("gcc")), reason="no gcc on the PATH, or nothing for it to compile"
)
# One quick file for each package.
FAST = (
    "tests/kernels/test_packing.py",
    "tests/collectives/schedules/test_topology.py",
    "tests/adasum/test_reducer.py",
)
BUILD = """
import sys
from setuptools import build_meta
out, *kinds = sys.argv[1:]
for kind in kinds:
    getattr(build_meta, f"build_{kind}")(out)
"""


def build(tree: Path, out: Path, *kinds: str, **variables: str) -> list[Path]:
    """Build `kinds` ("sdist", "wheel", "editable") of `tree` into `out`, as pip does without
    isolation."""
    out.mkdir()
    python("-c", BUILD, out, *kinds, place=tree, **variables)
    return [next(out.glob("*.tar.gz" if kind == "sdist" else "*.whl")) for kind in kinds]


def sources(tree: Path, folder: str) -> set[str]:
    """List a folder's files, relative to the tree, without what was compiled."""
    return {
        path.relative_to(tree).as_posix()
        for path in (tree / folder).rglob("*")
        if path.is_file() and not {"__pycache__", path.suffix} & {*path.parts, ".pyc", ".so"}
    }


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def copy_of_the_tree(tree: Path, *folders: str) -> None:
    pytest.importorskip("setuptools", minversion="77", reason="building needs setuptools>=77")
    tree.mkdir()
    for folder in folders:
        ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.so")
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, tree)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both distributions of a copy of the tree, since building writes into it."""
    place = tmp_path_factory.mktemp("built")
    tree = place / "tree"
    copy_of_the_tree(tree, *PACKAGES, *TREE, ".ci")
    # As `make build` leaves it: neither distribution is to have that one.
    (tree / LIBRARY).write_bytes(b"compiled from other sources")
    sdist, wheel = build(tree, place / "out", "sdist", "wheel")
    unpacked = place / "unpacked"
    shutil.unpack_archive(sdist, unpacked)
    (again,) = unpacked.iterdir()
    (second,) = build(again, place / "again", "wheel")
    return {"tree": tree, "sdist": again, "wheel": wheel, "wheel of the sdist": second}


def test_wheel_contains_the_three_packages_and_nothing_else(built: dict[str, Path]) -> None:
    files = set(contents(built["wheel"]))
    info = {name for name in files if name.startswith("adasum-") and ".dist-info/" in name}
    assert files - info - {LIBRARY} == set().union(*(sources(ROOT, each) for each in PACKAGES))
    assert {f"{package}/py.typed" for package in PACKAGES} <= files
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in info)


def test_wheel_metadata_has_license_readme_and_dependencies(built: dict[str, Path]) -> None:
    files = contents(built["wheel"])
    metadata = email.message_from_bytes(next(v for k, v in files.items() if k.endswith("METADATA")))
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    readme = metadata.get_payload(decode=True).decode()
    assert metadata["Description-Content-Type"] == "text/markdown"
    # Without its pictures and the addresses of its links, which are relative.
    assert len(readme) > 0.8 * len((ROOT / "README.md").read_text())
    # PyPI shows nothing of a relative target.
    targets = re.findall(r"\]\(([^)\s]+)\)", readme)
    assert targets
    assert [target for target in targets if not re.match(r"https://|#", target)] == []
    lines = sorted(line.replace(" ", "") for line in metadata.get_all("Requires-Dist", []))
    needed = [line.split(">=")[0] for line in lines if "extra==" not in line]
    assert needed == ["numpy", "torch", "typing_extensions"]
    # The wheels of NCCL for CUDA 12 and 13 own one file, which torch's wheel has brought.
    extras = [line.split(">=")[0] for line in lines if "cuda1" in line.partition(";")[2]]
    assert extras == ["cupy-cuda12x", "cupy-cuda13x"] and "nccl" not in "".join(lines)
    scripts = next(v for k, v in files.items() if k.endswith("entry_points.txt")).decode()
    assert "adasum = adasum.__main__:main" in scripts
    tags = email.message_from_bytes(next(v for k, v in files.items() if k.endswith("/WHEEL")))
    assert tags["Root-Is-Purelib"] == ("false" if HAS_C else "true")
    # ctypes loads what is compiled: one wheel serves any Python.
    system = sysconfig.get_platform().replace("-", "_") if HAS_C else "any"
    assert tags.get_all("Tag") == [f"py3-none-{system}"]


def test_citation_names_this_version(built: dict[str, Path]) -> None:
    version = built["wheel"].name.split("-")[1]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_sdist_contains_all_that_the_tests_need(built: dict[str, Path]) -> None:
    for folder in (*PACKAGES, *TREE):
        assert sources(built["sdist"], folder) == sources(built["tree"], folder)
    for name in ("LICENSE", "README.md", "CHANGELOG.md", "Makefile", "constraints.txt", ".ci/run"):
        assert (built["sdist"] / name).read_bytes() == (ROOT / name).read_bytes()


def test_sdist_builds_the_same_wheel(built: dict[str, Path]) -> None:
    # RECORD, with every file's hash, is one of the files.
    assert contents(built["wheel of the sdist"]) == contents(built["wheel"])


PATH_AND_SUM = """
import kernels, torch
print(kernels.sum_n([torch.ones(3), torch.ones(3)]).tolist())
print(kernels.backend_info().cpu_path)
"""


def path_and_sum(packages: Path) -> list[str]:
    """What computes on CPU tensors with the packages of a folder."""
    options = {"without": ["ADASUM_CPU_KERNELS"], "PYTHONPATH": str(packages)}
    return python("-c", PATH_AND_SUM, place=packages, **options).splitlines()


@needs_c
def test_wheel_has_the_compiled_kernels(built: dict[str, Path], tmp_path: Path) -> None:
    assert contents(built["wheel"])[LIBRARY].startswith(b"\x7fELF")
    shutil.unpack_archive(built["wheel"], tmp_path, format="zip")
    assert path_and_sum(tmp_path) == ["[2.0, 2.0, 2.0]", "compiled"]


def test_wheel_made_without_a_compiler_has_torchs_functions_and_says_so(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copy_of_the_tree(tree, *PACKAGES)
    (wheel,) = build(tree, tmp_path / "out", "wheel", CC="/bin/false")
    assert LIBRARY not in contents(wheel)
    shutil.unpack_archive(wheel, tmp_path / "site", format="zip")
    result, path = path_and_sum(tmp_path / "site")
    assert result == "[2.0, 2.0, 2.0]" and path.startswith("torch: ")
    if HAS_C:
        assert "the C kernels were not compiled at installation: with gcc, or what $CC" in path


@needs_c
@pytest.mark.slow
def test_editable_installation_compiles_in_place_where_there_is_a_compiler(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    copy_of_the_tree(tree, *PACKAGES)
    build(tree, tmp_path / "without", "editable", CC="/bin/false")
    assert path_and_sum(tree)[1].startswith("torch: ")
    build(tree, tmp_path / "with", "editable")
    assert path_and_sum(tree) == ["[2.0, 2.0, 2.0]", "compiled"]


@pytest.mark.slow
def test_installed_wheel_passes_the_tests_of_every_package(
    built: dict[str, Path], tmp_path: Path
) -> None:
    """The environment borrows torch and pytest; our packages are only in the wheel."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    (site,) = environment.glob("lib/python*/site-packages")
    here = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "here.pth").write_text("\n".join(here))
    # Unpacking a wheel without scripts installs it.
    with zipfile.ZipFile(built["wheel"]) as archive:
        archive.extractall(site)
    tests = tmp_path / "tests of the sdist"
    shutil.copytree(built["sdist"], tests)
    for package in PACKAGES:
        shutil.rmtree(tests / package)
    output: list[str] = []
    for arguments in (
        ["adasum.check", "--no-self-test"],
        ["pytest", "-q", "-p", "no:cacheprovider", "-k", "not emulator", *FAST],
    ):
        command = environment / "bin" / "python", "-m", *arguments
        output += printed(*command, place=tests, without=["PYTHONPATH"]).splitlines()
    version = built["wheel"].name.split("-")[1]
    assert f"  adasum                   {version}" in output
    assert f"  kernels imported from    {site / 'kernels'}" in output
    # The compiled kernels are in the wheel, or this would be torch.
    assert f"  CPU tensors by           {kernels.backend_info().cpu_path}" in output
    assert " passed" in output[-1]
