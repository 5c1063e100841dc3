"""Who may import whom: floors, the wings inside a floor, no cycle, and nothing private of others.

design.md's order, held over every import statement of the source files.
"""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatchcase
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from adasum.check import report
from adasum.check.report import PRIVATE_NAMES
from tests.architecture.imports import (
    PACKAGES,
    graph_of,
    modules_of,
    names_imported,
    private_names,
)
from tests.processes.commands import python

ROOT = Path(__file__).parents[2]
MODULES = modules_of(ROOT, *PACKAGES)


# Where the core imports a tool, and only once it is used: public names, and the hook by which a
# failed call has its record written.
TOOLS_USED = {
    ("collectives", "collectives.tools.flight.writer"),
    ("collectives", "collectives.tools.lab"),
    ("collectives.recorder", "collectives.tools.flight.writer"),
}


@cache
def graph() -> dict[str, set[str]]:
    """Made by the tests: every worker that collects this file would parse the packages."""
    return {
        module: {other for other in imported if (module, other) not in TOOLS_USED}
        for module, imported in graph_of(MODULES).items()
    }


# From the top down; those side by side do not import each other. A module belongs to the longest
# name here that its own name begins with; "kernels.__init__" is kernels/__init__.py, "kernels"
# every module that no other name covers.
WINGS = {
    "kernels": (
        ("kernels.__init__",),
        ("kernels.packing", "kernels.reduction", "kernels.projection", "kernels.gram_matrix"),
        ("kernels.torch_ops",),
        ("kernels.plans",),
        ("kernels.binding",),
        ("kernels.arguments",),
        ("kernels.backends",),
        ("kernels.gpu", "kernels.cpu"),
        ("kernels",),
    ),
    "collectives": (
        (
            *("collectives.bench", "collectives.cost", "collectives.flight"),
            "collectives.schedules.__main__",
        ),
        ("collectives.tools",),
        ("collectives.__init__",),
        ("collectives.backend",),
        ("collectives.initialize",),
        ("collectives.group",),
        ("collectives.requests",),
        ("collectives.arguments", "collectives.calls"),
        ("collectives.work",),
        ("collectives.bootstrap",),
        ("collectives.negotiation",),
        ("collectives.execution",),
        ("collectives.call",),
        ("collectives.transport",),
        ("collectives.schedules",),
        ("collectives",),
    ),
    "adasum": (
        ("adasum.check", "adasum.demo", "adasum.__main__", "adasum.bits.__main__"),
        ("adasum.__init__",),
        ("adasum.integrations",),
        ("adasum.fsdp",),
        ("adasum.ddp", "adasum.bits"),
        ("adasum.optimizer",),
        ("adasum.horovod",),
        ("adasum",),
    ),
}
LEVELS = {
    wing: level
    for level, wings in enumerate(
        wings for floor in ("adasum", "collectives", "kernels") for wings in WINGS[floor]
    )
    for wing in wings
}

# All that imports tools: modules that keep old commands running, and those of `TOOLS_USED`.
IMPORTS_TOOLS = {
    *("adasum.demo.__main__", "collectives", "collectives.recorder"),
    *("collectives.bench", "collectives.cost", "collectives.schedules.__main__"),
    *("collectives.flight.__main__", "collectives.flight.dump", "collectives.flight.recorder"),
}

# Nothing stands here for speed alone. "*" stands for the rest of a name.
PRIVATE_WITH_REASON = {
    "torch._foreach_*": "public, as torch.foreach, only in torch after 2.13",
    "torch._C": "the file of torch's extension, which alone knows its OpenMP in some wheels",
    "torch._C._current_graph_task_id": "the only way to ask whether a backward pass is running",
    "torch._dynamo": "skip_code: torch.compile would compile a frame around each call",
    "torch._C._len_torch_*_stack": "whether modes are active in this thread is told nowhere else",
    "torch._C._functorch": "nor whether torch.func transforms the caller",
    "torch.overrides._get_current_function_mode_stack": "which modes those of functions are",
    "torch.overrides._pop_mode_temporarily": "reductions in a step run outside of users' modes",
    "torch.utils._device": "the mode of torch.set_default_device, which may stay active for ever",
    "torch.autograd.Variable._execution_engine": "queue_callback, the only call at backward's end",
    "torch.autograd.forward_ad._current_level": "whether forward mode is on, without a call for it",
    "torch.autograd.profiler._is_profiler_enabled": "names for a timeline are made only for one",
    "torch.optim.optimizer._global_optimizer_*_hooks": "torch lists them nowhere else",
    "torch.utils._python_dispatch._disable_current_modes": "reductions run outside of modes",
    "torch.distributed._symmetric_memory*": "documented so: memory that a node's GPUs share",
    "ctypes._NamedFuncPointer": "the type that ctypes.CDLL gives its functions",
}


def wing_of(module: str) -> str:
    """The entry of `WINGS` that the module belongs to."""
    if module in PACKAGES:
        return f"{module}.__init__"
    while module not in LEVELS:
        module = module.rpartition(".")[0]
    return module


def arrows() -> set[tuple[str, str]]:
    """Which wing imports which other wing."""
    return {
        (wing_of(module), wing_of(other))
        for module, imported in graph().items()
        for other in imported
        if wing_of(module) != wing_of(other)
    }


def test_imports_of_the_packages_only_point_down() -> None:
    assert {wing_of(module) for module in MODULES} == set(LEVELS)
    upward = {f"{here} -> {there}" for here, there in arrows() if LEVELS[here] >= LEVELS[there]}
    assert upward == set()


def test_tools_are_imported_by_the_modules_listed_only() -> None:
    tools = {module for module in MODULES if wing_of(module) == "collectives.tools"}
    imported = graph_of(MODULES)
    assert {module for module in set(MODULES) - tools if imported[module] & tools} == IMPORTS_TOOLS


@pytest.mark.parametrize("left_out", ["collectives.tools", "torch._dynamo"])
def test_import_of_the_packages_leaves_out_tools_and_the_compiler(left_out: str) -> None:
    code = f"import sys, adasum; print([m for m in sys.modules if {left_out!r} in m])"
    assert python("-c", code) == "[]\n"


@pytest.mark.timing
def test_import_of_adasum_takes_at_most_a_quarter_more_than_torchs() -> None:
    code = (
        "import resource, {}; used = resource.getrusage(resource.RUSAGE_SELF); "
        "print(used.ru_utime + used.ru_stime)"
    )
    least = {"torch": 1e9, "adasum": 1e9}
    for _ in range(5):
        for module in least:
            least[module] = min(least[module], float(python("-c", code.format(module))))
    assert least["adasum"] <= 1.25 * least["torch"]


def test_modules_of_the_packages_and_of_the_benches_form_no_cycle() -> None:
    # A CycleError has the modules of a cycle.
    TopologicalSorter(graph() | graph_of(modules_of(ROOT, "bench"))).prepare()


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        *[(package, ("bench", "docs", "examples", "tests")) for package in PACKAGES],
        ("bench", ("docs", "examples", "tests")),
        ("examples", ("docs", "tests")),
    ],
)
def test_what_is_shipped_and_measured_imports_no_test(
    package: str, forbidden: tuple[str, ...]
) -> None:
    wrong = [
        f"{module} -> {name}"
        for module, path in modules_of(ROOT, package).items()
        for name, _ in names_imported(ast.parse(path.read_text()))
        if name.partition(".")[0] in forbidden
    ]
    assert wrong == []


def test_private_names_of_other_libraries_are_used_for_a_reason_only() -> None:
    used = set().union(*(private_names(ast.parse(path.read_text())) for path in MODULES.values()))
    allowed = {
        name: [pattern for pattern in PRIVATE_WITH_REASON if fnmatchcase(name, pattern)]
        for name in used
    }
    assert {name for name, patterns in allowed.items() if not patterns} == set()
    assert set(PRIVATE_WITH_REASON) == set().union(*allowed.values())


def test_private_names_that_the_report_looks_for_are_those_used() -> None:
    """A newer torch may lack one: the report of `adasum.check`, and this, say which."""
    used = set().union(*(private_names(ast.parse(path.read_text())) for path in MODULES.values()))
    named = {name.replace(":", ".") for name in PRIVATE_NAMES}
    # The file of the extension is found by its module, which all else needs, too.
    found = {name for name in used if name.startswith("torch.")} - {"torch._C"}
    assert {name for name in named if "distributed_c10d" not in name} == found
    # By an alias in the code, where torch may be built without it.
    aliased = (ROOT / "collectives" / "transport" / "process_groups.py").read_text()
    c10ds = set(re.findall(r"_c10d\.(_\w+(?:\.\w+)?)", aliased))
    prefix = "torch.distributed.distributed_c10d."
    assert {name.removeprefix(prefix) for name in named if prefix in name} == c10ds
    assert report._private_names() == f"all {len(PRIVATE_NAMES)} there"
