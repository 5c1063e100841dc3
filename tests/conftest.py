"""The order of the test files, `--emulated` and `--gpu`, and kernels compiled before the start.

What takes long to import is imported where it is used: the process that hands out files to others
runs no test, and they start after it.
"""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections import defaultdict
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILE = ("setup.py", "-q", "build_ext", "--inplace", "-b", "out/build", "-t", "out/build")

# Files and folders that take longest. Two workers take files in turn: one that is long and last
# leaves the other worker without work.
LONGEST = (
    "pretended_gpu/test_rehearsal.py",
    "kernels/torch_compile/test_values.py",
    "kernels/test_reduction.py",
    "kernels/test_sum_order.py",
    "kernels/cpu/test_native.py",
    "kernels/test_projection.py",
    "faults",
    "network_namespaces",
    "packaging/test_distributions.py::test_editable",
    "processes",
    "kernels",
    "packaging",
    "examples",
    "bench",
    "adasum/test_ddp.py",
    "collectives/execution/test_operations.py",
    "collectives/execution/test_executor.py",
    "collectives/execution/test_shared_memory.py",
    "collectives/schedules",
    "docs",
)

# Files whose slow tests run for minutes, more than every commit's CI has: marked `nightly`.
NIGHTLY = (
    "accuracy",
    "adasum/check",
    "adasum/optimizer/test_mutations.py",
    "adasum/test_ddp.py",
    "adasum/test_direct.py",
    "adasum/test_compile.py",
    "adasum/test_integrations.py",
    "bench",
    "collectives/tools/test_bench.py",
    "collectives/execution/test_executor.py",
    "collectives/schedules/test_algorithms.py::test_rings_at_once",
    "collectives/flight",
    "collectives/transport/test_streams.py",
    "examples",
    "faults",
    "frozen/test_frozen.py",
    "fuzz/test_huge.py::test_kernels_address",
    "horovod_conformance",
    "kernels/cpu/test_bits.py",
    "kernels/cpu/test_compilers.py",
    "kernels/cpu/test_threads.py",
    "kernels/gpu",
    "kernels/test_adasum_coefficients.py",
    "kernels/test_gram_matrix.py",
    "kernels/test_projection.py",
    "kernels/test_reduction.py",
    "kernels/test_sum_order.py",
    "kernels/test_weights.py",
    "kernels/torch_compile",
    "network_namespaces",
    "packaging/test_distributions.py::test_editable",
    "pretended_gpu/test_commands.py",
    "processes",
    "torch_conformance",
)

# What `make test` leaves to every commit's CI: long tests of what others touch, too, or of what
# seldom breaks. They are marked `slow` once the nightly ones are chosen, so that none becomes one.
FOR_CI = (
    "accuracy/test_adasum.py::test_adasum_of_every_kind_of_vectors_is_within_bounds[6",
    "accuracy/test_adasum.py::test_adasum_of_every_kind_of_vectors_is_within_bounds[8",
    "adasum/optimizer/test_requests.py::test_steady_step_leaves_nothing_allocated",
    "adasum/test_compile.py",
    "adasum/test_ddp.py::test_fsdp_on_two_replicas",
    "adasum/test_direct.py::test_direct_is_the_tree_of_longdoubles_within_100_eps_whatever_cancels[8-8",
    "collectives/flight/test_signal.py::test_rank_that_waits_writes_its_file_at_once_and_goes_on[gloo",
    "collectives/schedules/test_levels.py::test_every_pair",
    "examples/test_evidence.py::test_evidence_resumes",
    "examples/test_frameworks.py::test_ddp_and_fsdp_examples_train_by_the_chosen_op[ddp",
    "examples/test_horovod_mnist.py::test_horovod_mnist_example_trains",
    "examples/test_trace.py",
    "fuzz/test_huge.py::test_kernels_address_in_64_bits[node_adasum2",
    "kernels/cpu/test_compilers.py::test_arithmetic",
    "kernels/cpu/test_compilers.py::test_the_bits",
    "kernels/gpu/test_machine_code.py::test_kernel_compiled",
    "kernels/gpu/test_node_adasum.py::test_launches_in_any_interleaving",
    "kernels/gpu/test_traffic.py::test_traffic_of_adasum_grows_with_the_data[2200064",
    "kernels/test_projection.py::test_more_chunks_than_one_partial_block[emulator",
    "network_namespaces/test_hosts.py::test_ranks_know",
    "packaging/test_distributions.py::test_sdist",
    "packaging/test_distributions.py::test_wheel",
    "packaging/test_makefile.py::test_build_compiles_in_place",
    "packaging/test_other_packages.py::test_other_package_of_our_name",
    "packaging/test_other_packages.py::test_package_that_looks",
    "packaging/test_types.py::test_types_of_a_users_program_by_pyright",
    "packaging/test_without",
    "processes/test_conformance.py::test_transport[gloo",
    "processes/test_conformance.py::test_transport[hybrid",
    "processes/test_conformance.py::test_transport[mixed",
    "processes/test_limits.py::test_rank_without_memory_in_init",
    "processes/test_one_process.py::test_adasum_log_info",
    "processes/test_subgroups.py::test_processes[gloo",
)

# Where there are many parametrizations `make test` runs so many of a test that every value of every
# parameter occurs, but QUICK at least; CI runs all. Those of other files are few, or share a run.
THINNED = (
    "accuracy",
    "adasum",
    "collectives",
    "examples",
    "faults",
    "kernels",
)
QUICK = 4


# First, as the option -m deselects in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark nightly and slow tests, and sort those of the longest files to the front."""
    for item in items:
        if item.get_closest_marker("slow") and item.nodeid.removeprefix("tests/").startswith(
            NIGHTLY
        ):
            item.add_marker("nightly")
    if not config.getoption("emulated"):
        _leave_to_ci(items)

    def rank(item: pytest.Item) -> int:
        path = item.nodeid.removeprefix("tests/")
        return next((i for i, long in enumerate(LONGEST) if path.startswith(long)), len(LONGEST))

    items.sort(key=rank)


def _leave_to_ci(items: list[pytest.Item]) -> None:
    """Mark `slow` what FOR_CI and THINNED leave out of `make test`."""
    elsewhere = ("slow", "timing", "recipe", "gpu")
    quick = {i.nodeid: i for i in items if not any(map(i.get_closest_marker, elsewhere))}
    thinned: dict[str, list[str]] = defaultdict(list)
    for name, item in quick.items():
        path = name.removeprefix("tests/")
        if path.startswith(FOR_CI):
            item.add_marker("slow")
        elif path.startswith(THINNED):
            thinned[path.partition("[")[0]].append(name)
    for names in thinned.values():
        for name in spare(names):
            quick[name].add_marker("slow")


def spare(names: list[str]) -> list[str]:
    """Return the parametrizations of a test that `make test` leaves out.

    Those that stay have every value of every parameter, and are QUICK at least. They are chosen one
    after the other, next the one that brings most; of several the first by a hash, lest all tests
    that have the same parameters combine them in the same way.
    """
    values = {name: {*enumerate(name.partition("[")[2].split("-"))} for name in names}
    missing = set().union(*values.values())
    left = sorted(names, key=lambda name: zlib.crc32(name.encode()))
    while left and (missing or len(names) - len(left) < QUICK):
        name = max(left, key=lambda name: len(values[name] & missing))
        left.remove(name)
        missing -= values[name]
    return left


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep what is imported and collected out of what is looked through for garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Else libraries report what is left at the end."""
    gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--emulated` and `--gpu`."""
    parser.addoption(
        "--emulated",
        action="store_true",
        help="run the code that Triton compiles for sm_90, in tests/ptx_emulator",
    )
    parser.addoption("--gpu", action="store_true", help="end with status 2 where there is no GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Compile a checkout's C kernels. With `--gpu`, do not take skipped tests for passed ones."""
    if not hasattr(config, "workerinput"):
        _compile_kernels(ROOT / "kernels" / "cpu")
        _keep_flight_records(config)
    if config.getoption("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.exit("torch sees no GPU here", returncode=2)


def _keep_flight_records(config: pytest.Config) -> None:
    """Have the ranks of all tests, whose errors are on purpose, write to a folder that goes."""
    if "ADASUM_FLIGHT_FOLDER" not in os.environ:
        folder = os.environ["ADASUM_FLIGHT_FOLDER"] = tempfile.mkdtemp(prefix="flight-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
        config.add_cleanup(lambda: os.environ.pop("ADASUM_FLIGHT_FOLDER", None))


def _compile_kernels(folder: Path) -> None:
    """Do as `make build`, where need be: without it all tests would be of torch's functions.

    So it is an error if they cannot be compiled, unless ADASUM_CPU_KERNELS=torch asks for that.
    """
    library, sources = folder / "libnative.so", [*folder.glob("*.[ch]")]

    def is_current() -> bool:
        made = library.stat().st_mtime if library.exists() else 0.0
        return made >= max(path.stat().st_mtime for path in sources)

    # Without sources the packages are installed elsewhere.
    if not sources or is_current() or os.environ.get("ADASUM_CPU_KERNELS") == "torch":
        return
    command = [sys.executable, *COMPILE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    # Without a compiler, or on another processor, there is nothing but torch's functions.
    if done.stderr and not is_current() and shutil.which("gcc"):
        pytest.exit(f"kernels/cpu/native.c is not compiled: {done.stderr}", returncode=2)


@pytest.fixture
def by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks that share memory send messages, as ranks of several hosts do."""
    monkeypatch.setattr("collectives.calls.plan_host_all_reduce", lambda *arguments: None)


@pytest.fixture(scope="session", autouse=True)
def _emulate_kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    """Under `--emulated`, run every kernel of this process in the emulator."""
    if not request.config.getoption("emulated"):
        yield
        return
    from tests.ptx_emulator.driver import emulated

    # Looking for races copies all memory, and ranks here have buffers of 32 MiB.
    with emulated(races=False):
        yield
